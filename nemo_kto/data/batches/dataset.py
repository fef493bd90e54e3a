"""Tokenised records: what a dataset gives and a collate function takes."""

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

from nemo_kto.data.rows.reader import Fields, FileColumns
from nemo_kto.data.rows.records import DataError, RowErrors
from nemo_kto.data.rows.sources import (
    SPLITS,
    WHOLE,
    Range,
    Source,
    blend,
    join_small,
    leave_out_small,
    read_data_prefix,
    refuse_small_sets,
    split_ranges,
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
    """One tokenised record.

    Attributes:
        prompt_ids: [P] int, P >= 1.
        response_ids: [R] int, R >= 1, end-of-turn included where the answer was not cut.
        desirable: whether the answer is one to learn.
        weight: of its loss.
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
        chosen_ids, rejected_ids: [C] and [R] int, at least 1, end-of-turn included where the answer was not cut.
        chosen_reward, rejected_reward: what the answers are worth, in any unit.
        weight: of its loss.
    """

    prompt_ids: Sequence[int] | np.ndarray
    chosen_ids: Sequence[int] | np.ndarray
    rejected_ids: Sequence[int] | np.ndarray
    chosen_reward: float
    rejected_reward: float
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class SplitCounts:
    """The numbers of one split; of a blend, of one epoch of it.

    Attributes:
        rows: examples, or pairs.
        desirable: examples with a good answer; None for pairs.
        tokens: of prompts and answers, after truncation; the prompt of a pair counts once for each answer.
        cut_prompts: rows whose prompt lost tokens to truncation.
        cut_responses: rows whose answer, or one of whose two answers, did.
    """

    rows: int
    desirable: int | None
    tokens: int
    cut_prompts: int
    cut_responses: int

    @property
    def classes(self) -> dict[str, int]:
        """How many examples there are of each kind; empty for pairs."""
        return {} if self.desirable is None else {"desirable": self.desirable, "undesirable": self.rows - self.desirable}

    def warnings(self, split: str, *, seq_length: int) -> Iterator[str]:
        """What looks wrong with the split of this name."""
        if self.desirable is not None and self.desirable in (0, self.rows):
            label = "desirable" if self.desirable else "undesirable"
            yield f"{split}: all {self.rows} rows are {label}; is the file sorted by label?"
        for what, count in (("prompt", self.cut_prompts), ("answer", self.cut_responses)):
            if count:
                limit = f"longer than model.data.seq_length={seq_length}"
                yield f"{split}: the {what} is cut in {count} of {self.rows} rows, which are {limit}"


_NAMED_FILES = 3  # with a warning each

Example = TypeVar("Example")


@dataclass(frozen=True)
class Origin:
    """Where an example comes from: line of its file, and whether truncation cut its prompt and an answer of it."""

    line: int
    prompt_cut: bool
    response_cut: bool

    @property
    def title(self) -> str:
        """Such as "line 3"."""
        return f"line {self.line}"

    @property
    def cuts(self) -> str:
        """What was cut, as the end of a sentence."""
        cut = [name for name, is_cut in (("prompt", self.prompt_cut), ("answer", self.response_cut)) if is_cut]
        return f", {' and '.join(cut)} cut" if cut else ""


class FileOfTable(NamedTuple):
    """A file of rows, and how many examples it gave."""

    path: Path
    examples: int


class _TokenDataset(torch.utils.data.Dataset[Example], ABC):
    """Examples of a memory-mapped table, in the order of an index."""

    def __init__(self, *, table: datasets.Dataset, index: np.ndarray, files: Sequence[FileOfTable] = ()) -> None:
        """A view of a table.

        Args:
            table: examples as ``TokenCache`` keeps them.
            index: [N] int64, the place in the table of each.
            files: that the table was made of, one after the other; none where nobody will ask.
        """
        self._table = table.with_format("arrow")
        self._index = index
        self._files = files

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, place: int) -> Example:
        return self.__getitems__([place])[0]

    def __getitems__(self, places: Sequence[int]) -> list[Example]:
        """Many examples in one look-up (torch's DataLoader calls it by this name)."""
        return self._examples(self._table[self._index[np.asarray(places)].tolist()])

    def fingerprint(self) -> str:
        """Hash of the token ids, labels, rewards and weights of the examples in their order, wherever their files lie."""
        return examples_hash([Path(file["filename"]) for file in self._table.cache_files], self._index)

    def origins(self, places: Sequence[int]) -> list[Origin]:
        """Where the examples come from and what truncation took from them."""
        table = self._table[self._index[np.asarray(places)].tolist()]
        columns = [table.column(name).to_pylist() for name in ("line", "prompt_cut", "response_cut")]
        return [Origin(*values) for values in zip(*columns, strict=True)]

    def names(self, places: Sequence[int]) -> list[str]:
        """The rows that examples come from, such as "data/rows.jsonl:3"; a pair may be two examples of one row."""
        ends = np.cumsum([file.examples for file in self._files])
        of_files = np.searchsorted(ends, self._index[np.asarray(places)], side="right").tolist()
        lines = [origin.line for origin in self.origins(places)]
        named = (f"{self._files[number].path}:{line}" for number, line in zip(of_files, lines, strict=True))
        return list(dict.fromkeys(named))

    def examples_of_lines(self, count: int) -> int:
        """How many examples from the first on come from the first ``count`` rows of the file; pairs may be two each."""
        lines = [origin.line for origin in self.origins(range(min(len(self), 2 * count)))]
        return sum(line in list(dict.fromkeys(lines))[:count] for line in lines)

    @cached_property
    def counts(self) -> SplitCounts:
        """The numbers of the split; the first look takes a second for ten million examples."""
        return SplitCounts(
            rows=len(self),
            desirable=self._desirable(),
            tokens=sum(self._tokens_in(name) for name in self._sequences),
            cut_prompts=self._number_of("prompt_cut"),
            cut_responses=self._number_of("response_cut"),
        )

    _sequences: ClassVar[tuple[str, ...]]  # the columns of token ids that the sequences of an example are made of

    def _desirable(self) -> int | None:
        """Number of desirable examples; None where they are pairs."""
        return None

    def _number_of(self, column: str) -> int:
        """Number of examples in which a column of the table is true."""
        return int(self._table.data.column(column).to_numpy()[self._index].sum())

    def _tokens_in(self, column: str) -> int:
        chunks = self._table.data.column(column).chunks
        lengths = np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in chunks])
        return int(lengths[self._index].sum(dtype=np.int64))

    @abstractmethod
    def _examples(self, table: pyarrow.Table) -> list[Example]:
        """The examples of a piece of the table."""


class KTODataset(_TokenDataset[KTOExample]):
    """Unpaired answers, each desirable or undesirable."""

    def _examples(self, table: pyarrow.Table) -> list[KTOExample]:
        columns: dict[str, list] = {name: _ragged(table.column(name)) for name in ("prompt_ids", "response_ids")}
        columns |= {name: table.column(name).to_pylist() for name in ("desirable", "weight")}
        return [KTOExample(**dict(zip(columns, example, strict=True))) for example in zip(*columns.values(), strict=True)]

    _sequences = ("prompt_ids", "response_ids")

    @property
    def class_weights(self) -> tuple[float, float]:
        """Sum of the weights of the desirable examples, and of the undesirable ones: their numbers where all weigh 1."""
        desirable, weights = (self._table.data.column(name).to_numpy()[self._index] for name in ("desirable", "weight"))
        return float(weights[desirable].sum()), float(weights[~desirable].sum())

    def _desirable(self) -> int:
        return self._number_of("desirable")


class DPODataset(_TokenDataset[DPOExample]):
    """Pairs of answers."""

    _sequences = ("prompt_ids", "chosen_ids", "prompt_ids", "rejected_ids")

    def __init__(
        self,
        *,
        table: datasets.Dataset,
        index: np.ndarray,
        default_rewards: tuple[float, float],
        files: Sequence[FileOfTable] = (),
    ) -> None:
        """Args: default_rewards: of the chosen and of the rejected answer, where an example has none of its own."""
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
    """The datasets of a run; None where the data has no such split.

    Attributes:
        validation: name of each validation set -> its examples; the name is empty where there is one set without a name.
        warnings: what was done with columns and rows that is not obvious, one line each.
    """

    train: AnyDataset | None
    validation: Mapping[str, AnyDataset]
    test: AnyDataset | None
    warnings: tuple[str, ...] = ()

    @property
    def in_use(self) -> dict[str, AnyDataset]:
        """Name of each split that a run reads -> its examples."""
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
    """Training, validation and test examples, tokenised on the first call and mapped from ``cache_dir`` afterwards.

    Args:
        kind: ``cache.KTO_EXAMPLES`` or ``cache.DPO_EXAMPLES``.
        make: (table, index) -> the dataset of a split: :class:`KTODataset`, or :class:`DPODataset` with its defaults bound.
        data_prefix: see ``prefix.read_data_prefix``.
        splits_string: such as "98,2", or "auto": shares of each file (or folder) in the order of its rows, see
            ``prefix.split_shares``. None: all is for training. It is not needed, and not looked at, where ``data_prefix``
            itself names the splits.
        tokenizer, vocab_size: the model's, see ``chat.RecordEncoder``.
        seq_length, truncation_mode, fields: see ``truncation.Truncation`` and ``reader.Fields``.
        seed: order of the examples within a blend.
        cache_dir, cache_shared, cache_verified, preprocess_workers, progress: see ``cache.TokenCache``.
        min_validation_rows: a validation set of fewer rows is joined to the training rows, or left out where it has
            files of its own; it is refused where it has a name.

    Raises:
        DataError: files are missing, no file has a column of ``fields``, or rows are broken, of which all are counted.
        UserError: a validation set with a name has too few rows.
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
    """Every source's examples and files; all are read before any broken row is raised. Unused columns go to ``warnings``."""
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
    """A warning for each file with columns that are not used; one for all files with the same ones where they are many."""
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
    """The rows of each split; what is not obvious goes to ``warnings``."""
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
    """One split out of its range of each source; None if there is no row in it."""
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
    """The rows of a source that each split gets: the first, and the one after the last."""

    def is_second_of_pair(place: int) -> bool:
        first, second = table.slice(place - 1, 2).column("line").to_pylist()
        return bool(first == second)

    shares = split_shares(splits_string, len(table))
    return dict(zip(SPLITS, split_ranges(len(table), shares, is_second_of_pair), strict=True))


def _ragged(column: pyarrow.ChunkedArray) -> list[np.ndarray]:
    """The lists of an Arrow column, as views of one array."""
    lists = column.combine_chunks()
    values, offsets = lists.values.to_numpy(), lists.offsets.to_numpy()
    return [values[start:stop] for start, stop in pairwise(offsets)]
