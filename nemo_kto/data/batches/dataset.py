"""Datasets of tokenised examples, and their splits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, TypeVar

import datasets
import numpy as np
import torch.utils.data
from datasets.table import Table, concat_tables
from transformers import PreTrainedTokenizerBase

from nemo_kto.data.rows.blend import Range, blend, join_small, leave_out_small, refuse_small_sets, split_ranges
from nemo_kto.data.rows.reader import Fields, FileColumns
from nemo_kto.data.rows.records import DataError, RowErrors
from nemo_kto.data.rows.sources import (
    SPLITS,
    WHOLE,
    Source,
    read_data_prefix,
    split_shares,
    validation_names,
    validation_split,
)
from nemo_kto.data.tokens.cache import ExampleKind, Progress, TokenCache, show_nothing
from nemo_kto.data.tokens.chat import RecordEncoder
from nemo_kto.data.tokens.fingerprint import examples_hash
from nemo_kto.data.tokens.truncation import Truncation

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True, slots=True, kw_only=True)
class KTOExample:
    """One tokenised prompt with one labelled answer.

    Attributes:
        prompt_ids: [P] int, P >= 1.
        response_ids: [R] int, R >= 1; includes the end-of-turn token unless the answer was truncated.
        desirable: label of the answer: True for desirable, False for undesirable.
        weight: weight of the loss of this example.
    """

    prompt_ids: Sequence[int] | np.ndarray
    response_ids: Sequence[int] | np.ndarray
    desirable: bool
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOExample:
    """One tokenised pair.

    Attributes:
        prompt_ids: [P] int, P >= 1.
        chosen_ids, rejected_ids: [C] and [R] int, C, R >= 1; include the end-of-turn token unless the answer was truncated.
        chosen_reward, rejected_reward: rewards of the answers, in any unit.
        weight: weight of the loss of this pair.
    """

    prompt_ids: Sequence[int] | np.ndarray
    chosen_ids: Sequence[int] | np.ndarray
    rejected_ids: Sequence[int] | np.ndarray
    chosen_reward: float
    rejected_reward: float
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class SplitCounts:
    """Counts of one split; for a blend, counts of one epoch.

    Attributes:
        rows: number of examples, or pairs.
        desirable: number of desirable examples; None for pairs.
        tokens: number of tokens in prompts and answers, after truncation; the prompt of a pair counts once per answer.
        cut_prompts: number of examples, or pairs, whose prompt was truncated.
        cut_responses: number of examples, or pairs, of which an answer was truncated.
    """

    rows: int
    desirable: int | None
    tokens: int
    cut_prompts: int
    cut_responses: int

    @property
    def classes(self) -> dict[str, int]:
        """Number of examples in each class; empty for pairs."""
        return {} if self.desirable is None else {"desirable": self.desirable, "undesirable": self.rows - self.desirable}

    def warnings(self, split: str, *, seq_length: int) -> Iterator[str]:
        """Yield warnings about likely problems of the split named ``split``."""
        if self.desirable is not None and self.desirable in (0, self.rows):
            label = "desirable" if self.desirable else "undesirable"
            yield f"{split}: all {self.rows} rows are {label}; is the file sorted by label?"
        for what, count in (("prompt", self.cut_prompts), ("answer", self.cut_responses)):
            if count:
                limit = f"longer than model.data.seq_length={seq_length}"
                yield f"{split}: the {what} is cut in {count} of {self.rows} rows, which are {limit}"


_NAMED_FILES = 3  # maximum number of files with a warning each

Example = TypeVar("Example")


@dataclass(frozen=True)
class Origin:
    """Origin of an example: the line in its file, and whether its prompt and any of its answers were truncated."""

    line: int
    prompt_cut: bool
    response_cut: bool

    @property
    def title(self) -> str:
        """Name of the line, such as "line 3"."""
        return f"line {self.line}"

    @property
    def cuts(self) -> str:
        """Truncated parts, as the end of a sentence; empty if nothing was truncated."""
        cut = [name for name, is_cut in (("prompt", self.prompt_cut), ("answer", self.response_cut)) if is_cut]
        return f", {' and '.join(cut)} cut" if cut else ""


class FileOfTable(NamedTuple):
    """Data file, and the number of examples made from it."""

    path: Path
    examples: int


class _TokenDataset(torch.utils.data.Dataset[Example], ABC):
    """Dataset of the examples in a memory-mapped table, in the order of an index."""

    def __init__(self, *, table: datasets.Dataset, index: np.ndarray, files: Sequence[FileOfTable] = ()) -> None:
        """Create a view of a table.

        Args:
            table: examples as stored by ``TokenCache``.
            index: [N] int64, position of each example in the table.
            files: files that the table was made from, in order; needed only by :meth:`names`.
        """
        self._table = table.with_format("arrow")
        self._index = index
        self._files = files

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, place: int) -> Example:
        return self.__getitems__([place])[0]

    def __getitems__(self, places: Sequence[int]) -> list[Example]:
        """Return several examples in one look-up; torch's DataLoader calls a method with this name."""
        return self._examples(self._table[self._index[np.asarray(places)].tolist()])

    def fingerprint(self) -> str:
        """Return a hash of the token ids, labels, rewards and weights in order; it does not depend on the file paths."""
        return examples_hash([Path(file["filename"]) for file in self._table.cache_files], self._index)

    def origins(self, places: Sequence[int]) -> list[Origin]:
        """Return the origin of each example and whether it was truncated."""
        table = self._table[self._index[np.asarray(places)].tolist()]
        columns = [table.column(name).to_pylist() for name in ("line", "prompt_cut", "response_cut")]
        return [Origin(*values) for values in zip(*columns, strict=True)]

    def names(self, places: Sequence[int]) -> list[str]:
        """Return the rows of the examples, such as "data/rows.jsonl:3", without duplicates: a pair may be two examples."""
        ends = np.cumsum([file.examples for file in self._files])
        of_files = np.searchsorted(ends, self._index[np.asarray(places)], side="right").tolist()
        lines = [origin.line for origin in self.origins(places)]
        named = (f"{self._files[number].path}:{line}" for number, line in zip(of_files, lines, strict=True))
        return list(dict.fromkeys(named))

    def examples_of_lines(self, count: int) -> int:
        """Return the number of examples that come from the first ``count`` rows of the file; a pair may be two examples."""
        lines = [origin.line for origin in self.origins(range(min(len(self), 2 * count)))]
        return sum(line in list(dict.fromkeys(lines))[:count] for line in lines)

    @cached_property
    def counts(self) -> SplitCounts:
        """Counts of the split; computing them takes a second for ten million examples."""
        return SplitCounts(
            rows=len(self),
            desirable=self._desirable(),
            tokens=sum(self._tokens_in(name) for name in self._sequences),
            cut_prompts=self._number_of("prompt_cut"),
            cut_responses=self._number_of("response_cut"),
        )

    _sequences: ClassVar[tuple[str, ...]]  # columns of token ids that form the sequences of an example

    def _desirable(self) -> int | None:
        """Return the number of desirable examples; None for pairs."""
        return None

    def _number_of(self, column: str) -> int:
        """Return the number of examples for which a column of the table is true."""
        return int(self._table.data.column(column).to_numpy()[self._index].sum())

    def _tokens_in(self, column: str) -> int:
        chunks = self._table.data.column(column).chunks
        lengths = np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in chunks])
        return int(lengths[self._index].sum(dtype=np.int64))

    @abstractmethod
    def _examples(self, table: pyarrow.Table) -> list[Example]:
        """Return the examples of a slice of the table."""


class KTODataset(_TokenDataset[KTOExample]):
    """Dataset of unpaired answers, each desirable or undesirable."""

    def _examples(self, table: pyarrow.Table) -> list[KTOExample]:
        columns: dict[str, list] = {name: _ragged(table.column(name)) for name in ("prompt_ids", "response_ids")}
        columns |= {name: table.column(name).to_pylist() for name in ("desirable", "weight")}
        return [KTOExample(**dict(zip(columns, example, strict=True))) for example in zip(*columns.values(), strict=True)]

    _sequences = ("prompt_ids", "response_ids")

    @property
    def class_weights(self) -> tuple[float, float]:
        """Total weight of the desirable and of the undesirable examples: their numbers if all weights are 1."""
        desirable, weights = (self._table.data.column(name).to_numpy()[self._index] for name in ("desirable", "weight"))
        return float(weights[desirable].sum()), float(weights[~desirable].sum())

    def _desirable(self) -> int:
        return self._number_of("desirable")


class DPODataset(_TokenDataset[DPOExample]):
    """Dataset of pairs of answers."""

    _sequences = ("prompt_ids", "chosen_ids", "prompt_ids", "rejected_ids")

    def __init__(
        self,
        *,
        table: datasets.Dataset,
        index: np.ndarray,
        default_rewards: tuple[float, float],
        files: Sequence[FileOfTable] = (),
    ) -> None:
        """Create a view of a table.

        Args:
            table, index, files: see the base class.
            default_rewards: rewards of the chosen and of the rejected answer for examples without rewards.
        """
        super().__init__(table=table, index=index, files=files)
        self._default_rewards = default_rewards

    def _examples(self, table: pyarrow.Table) -> list[DPOExample]:
        columns: dict[str, list] = {
            name: _ragged(table.column(name)) for name in ("prompt_ids", "chosen_ids", "rejected_ids")
        }
        for name, default in zip(("chosen_reward", "rejected_reward"), self._default_rewards, strict=True):
            columns[name] = table.column(name).fill_null(default).to_pylist()
        columns["weight"] = table.column("weight").to_pylist()
        return [DPOExample(**dict(zip(columns, example, strict=True))) for example in zip(*columns.values(), strict=True)]


AnyDataset = TypeVar("AnyDataset", KTODataset, DPODataset)


@dataclass(frozen=True, kw_only=True)
class Splits(Generic[AnyDataset]):
    """Datasets of a run.

    Attributes:
        train, test: the dataset of the split; None if the data has no such split.
        validation: name of each validation set -> its dataset; a single set without a name has the empty name.
        warnings: unexpected treatment of columns and rows, one line each.
    """

    train: AnyDataset | None
    validation: Mapping[str, AnyDataset]
    test: AnyDataset | None
    warnings: tuple[str, ...] = ()

    @property
    def in_use(self) -> dict[str, AnyDataset]:
        """Name of each split that a run reads -> its dataset."""
        validation = {validation_split(name): examples for name, examples in self.validation.items()}
        return validation if self.train is None else {"train": self.train, **validation}


def build_splits(
    *,
    kind: ExampleKind,
    make: Callable[..., AnyDataset],
    data_prefix: object,
    splits_string: str | None,
    tokenizer: PreTrainedTokenizerBase,
    seq_length: int,
    truncation_mode: str,
    cache_dir: str | Path,
    seed: int,
    vocab_size: int | None = None,
    fields: Mapping[str, str] | None = None,
    min_validation_rows: int = 1,
    cache_shared: bool = False,
    cache_verified: bool = False,
    preprocess_workers: int | None = 1,
    progress: Progress = show_nothing,
) -> Splits[AnyDataset]:
    """Build the training, validation and test datasets.

    The examples are tokenised on the first call and memory-mapped from ``cache_dir`` afterwards.

    Args:
        kind: ``cache.KTO_EXAMPLES`` or ``cache.DPO_EXAMPLES``.
        make: (table=..., index=..., files=...) -> the dataset of a split: :class:`KTODataset`, or :class:`DPODataset` with
            its default rewards bound.
        data_prefix: see ``sources.read_data_prefix``.
        splits_string: shares of each file (or folder) in the order of its rows, such as "98,2", or "auto", see
            ``sources.split_shares``. None: all rows are for training. It is ignored if ``data_prefix`` itself defines the
            splits.
        tokenizer, vocab_size: tokenizer and vocabulary size of the model, see ``chat.RecordEncoder``.
        seq_length, truncation_mode, fields: see ``truncation.Truncation`` and ``reader.Fields``.
        seed: determines the order of the examples within a blend.
        cache_dir, cache_shared, cache_verified, preprocess_workers, progress: see ``cache.TokenCache``.
        min_validation_rows: minimum size of a validation set. The rows of a smaller set are used for training, or dropped
            if the set has separate files; a smaller named set is an error.

    Raises:
        DataError: files are missing, a column of ``fields`` is in no file, or rows are broken (all of them are counted).
        UserError: a named validation set has too few rows.
    """
    encoder = RecordEncoder(tokenizer=tokenizer, vocab_size=vocab_size)
    sources = read_data_prefix(data_prefix)
    cache = TokenCache(
        kind=kind,
        folder=Path(cache_dir),
        fields=Fields(fields or {}),
        encoder=encoder,
        truncation=Truncation(seq_length, truncation_mode, encoder.bos_id),
        shared=cache_shared,
        verified=cache_verified,
        preprocess_workers=preprocess_workers,
        progress=progress,
    )
    warnings: list[str] = []
    tables, files = _open_all(sources, cache, warnings)
    ranges = _ranges(sources, tables, splits_string, min_validation_rows, warnings)
    built = {split: _assemble(make, tables, files, rows, seed) for split, rows in ranges.items()}
    of_sets = {name: built.get(validation_split(name)) for name in validation_names(data_prefix)}
    sets = {name: each for name, each in of_sets.items() if each is not None}
    return Splits(train=built.get("train"), validation=sets, test=built.get("test"), warnings=tuple(warnings))


def _open_all(
    sources: dict[str, tuple[Source, ...]], cache: TokenCache, warnings: list[str]
) -> tuple[dict[Source, Table], dict[Source, list[FileOfTable]]]:
    """Return the examples and the files of every source, and add a warning about unused columns to ``warnings``.

    All files are read before an error about broken rows is raised.
    """
    broken = RowErrors()
    files = dict.fromkeys(file for group in sources.values() for source in group for file in source.files)
    opened = cache.open(list(files), broken=broken)
    found = {column for _, columns in opened.values() for column in columns.found}
    if missing := [column for column in cache.fields.columns.values() if column not in found]:
        has = ", ".join(sorted(found)) or "none"
        raise DataError(
            f"model.data.fields must name columns of the rows, got {missing[0]}, which no row has; they have {has}"
        )
    broken.raise_if_any()
    warnings += _unused_columns({file: columns for file, (_, columns) in opened.items()})
    tables = {file: table for file, (table, _) in opened.items() if table is not None}
    every = [source for group in sources.values() for source in group]
    joined = {source: concat_tables([tables[file] for file in source.files]) for source in every}
    return joined, {source: [FileOfTable(Path(file), len(tables[file])) for file in source.files] for source in every}


def _unused_columns(of_files: Mapping[Path, FileColumns]) -> Iterator[str]:
    """Yield a warning for each file with unused columns, or one for all files with the same ones if there are many."""
    alike: dict[tuple[str, ...], list[Path]] = {}
    for file, columns in of_files.items():
        if columns.unused:
            alike.setdefault(tuple(sorted(columns.unused)), []).append(file)
    for files in alike.values():
        if len(files) <= _NAMED_FILES:
            yield from (f"{file}: columns that are not used: {of_files[file].unused_text()}" for file in files)
            continue
        total = FileColumns()
        for file in files:
            total.merge(of_files[file])
        yield f"{files[0]} and {len(files) - 1:,} other files: columns that are not used: {total.unused_text()}"


def _ranges(
    sources: dict[str, tuple[Source, ...]],
    tables: Mapping[Source, Table],
    splits_string: str | None,
    min_validation_rows: int,
    warnings: list[str],
) -> dict[str, list[Range]]:
    """Return the rows of each split; unexpected choices are added to ``warnings``."""
    ranges: dict[str, list[Range]]
    if WHOLE not in sources:
        ranges = {split: [(source, 0, len(tables[source])) for source in group] for split, group in sources.items()}
        refuse_small_sets(ranges, min_validation_rows)
        warnings += leave_out_small(ranges, min_validation_rows)
        return ranges
    cuts = {source: _cut(table, "1" if splits_string is None else splits_string) for source, table in tables.items()}
    ranges = {}
    for split in SPLITS:
        ranges[split] = [(source, first, stop) for source in sources[WHOLE] for first, stop in [cuts[source][split]]]
    warnings += join_small(ranges, splits_string, min_validation_rows)
    return ranges


def _assemble(
    make: Callable[..., AnyDataset],
    tables: Mapping[Source, Table],
    files: Mapping[Source, Sequence[FileOfTable]],
    ranges: Sequence[Range],
    seed: int,
) -> AnyDataset | None:
    """Build the dataset of a split from its range of each source; None if it has no rows."""
    parts, made_of, places, weights, start = [], list[FileOfTable](), [], [], 0
    for source, first, stop in ranges:
        if first < stop:
            parts.append(tables[source])
            made_of += files[source]
            places.append(np.arange(start + first, start + stop))
            weights.append(source.weight)
            start += len(tables[source])
    if not parts:
        return None
    index = np.concatenate(places)
    if blended := [weight for weight in weights if weight is not None]:
        chosen, within = blend([len(own) for own in places], blended, seed=seed)
        index = np.array([own[0] for own in places])[chosen] + within
    return make(table=datasets.Dataset(concat_tables(parts)), index=index, files=made_of)


def _cut(table: Table, splits_string: str) -> dict[str, tuple[int, int]]:
    """Return the rows [start, stop) of a source for each split."""

    def is_second_of_pair(place: int) -> bool:
        first, second = table.slice(place - 1, 2).column("line").to_pylist()
        return bool(first == second)

    shares = split_shares(splits_string, len(table))
    return dict(zip(SPLITS, split_ranges(len(table), shares, is_second_of_pair), strict=True))


def _ragged(column: pyarrow.ChunkedArray) -> list[np.ndarray]:
    """Return the lists of an Arrow column as views of one array."""
    lists = column.combine_chunks()
    values, offsets = lists.values.to_numpy(), lists.offsets.to_numpy()
    return [values[start:stop] for start, stop in pairwise(offsets)]
