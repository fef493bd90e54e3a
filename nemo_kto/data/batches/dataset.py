"""Datasets of tokenised examples, and their splits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, TypeVar

import datasets
import numpy as np
import torch.utils.data
from datasets.table import Table, concat_tables
from transformers import PreTrainedTokenizerBase

from nemo_kto.data.rows.blend import Range, blend, join_small, leave_out_small, refuse_small_sets, split_ranges
from nemo_kto.data.rows.data_sources import (
    SPLITS,
    WHOLE,
    Source,
    read_data_prefix,
    split_shares,
    validation_names,
    validation_split,
)
from nemo_kto.data.rows.drops import DEFAULT_DROPS, drop_text, repeated
from nemo_kto.data.rows.forms import data_name, row_place
from nemo_kto.data.rows.labels import Labels
from nemo_kto.data.rows.reader import Fields, FileColumns, RowErrors
from nemo_kto.data.rows.records import DataError
from nemo_kto.data.tokens.cache import Progress, TokenCache, examples_hash, show_nothing
from nemo_kto.data.tokens.chat_template import RecordEncoder
from nemo_kto.data.tokens.tokeniser import DPO_EXAMPLES, KTO_EXAMPLES, ExampleKind
from nemo_kto.data.tokens.truncation import Truncation

if TYPE_CHECKING:
    import pyarrow


TokenIds = Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class KTOExample:
    """One tokenised prompt ([P] ints, P >= 1) with one labelled answer ([R] ints, R >= 1).

    An answer includes the end-of-turn token unless it was truncated.
    """

    prompt_ids: TokenIds
    response_ids: TokenIds
    desirable: bool
    weight: float = 1.0

    @property
    def answers(self) -> dict[str, TokenIds]:
        """Token ids of the answer, by the name of its class."""
        return {"desirable" if self.desirable else "undesirable": self.response_ids}


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOExample:
    """One tokenised pair; answers as in :class:`KTOExample`, rewards in any unit."""

    prompt_ids: TokenIds
    chosen_ids: TokenIds
    rejected_ids: TokenIds
    chosen_reward: float
    rejected_reward: float
    weight: float = 1.0

    @property
    def answers(self) -> dict[str, TokenIds]:
        """Token ids of both answers, by the name of their class."""
        return {"chosen": self.chosen_ids, "rejected": self.rejected_ids}


@dataclass(frozen=True, kw_only=True)
class SplitCounts:
    """Counts of one split; for a blend, counts of one epoch."""

    rows: int  # examples or pairs
    desirable: int | None  # None for pairs
    tokens: int  # in prompts and answers, after truncation; the prompt of a pair counts once per answer
    longest: int  # tokens of the longest prompt and of the longest answer; no sequence, also of a KL example, has more
    cut_prompts: int  # examples or pairs with a truncated prompt
    cut_responses: int  # examples or pairs with any truncated answer

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
                yield f"{split}: {what} truncated in {count} of {self.rows} rows by model.data.seq_length={seq_length}"


_BINS = 40  # of a histogram of lengths


@dataclass(frozen=True, kw_only=True)
class LengthHistogram:
    """Numbers of sequences with [0, width), [width, 2 * width), ... tokens.

    Examples:
        >>> LengthHistogram.of(np.array([3, 3, 41]))
        LengthHistogram(width=2, counts=[0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1], last_is_open=False)
    """

    width: int  # a power of two
    counts: list[int]
    last_is_open: bool  # the last bin also counts all longer sequences, at most one in a thousand

    @classmethod
    def of(cls, lengths_N: np.ndarray) -> LengthHistogram:
        nearly_all = int(np.quantile(lengths_N, 0.999, method="higher")) if len(lengths_N) else 0
        width = 1
        while nearly_all >= _BINS * width:
            width *= 2
        counts = np.bincount(np.minimum(lengths_N // width, nearly_all // width))
        return cls(width=width, counts=counts.tolist(), last_is_open=bool((lengths_N // width > nearly_all // width).any()))


_NAMED_FILES = 3  # maximum number of files with a warning each

Example = TypeVar("Example")


@dataclass(frozen=True)
class Origin:
    """Origin of an example: the line of its file, and whether its prompt and any of its answers were truncated."""

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
        return f", {' and '.join(cut)} truncated" if cut else ""


class FileOfTable(NamedTuple):
    """Data file, and the number of examples made from it."""

    path: Path
    examples: int


class _TokenDataset(torch.utils.data.Dataset[Example]):
    """Dataset of the examples in a memory-mapped table, in the order of an index."""

    _example: Callable[..., Example]
    _columns: ClassVar[tuple[str, ...]]  # fields of an example
    _sequences: ClassVar[tuple[str, ...]]  # columns of token ids that form the sequences of an example
    _defaults: Mapping[str, float] = {}  # column -> value in examples without one

    def __init__(self, *, table: datasets.Dataset, index: np.ndarray, files: Sequence[FileOfTable] = ()) -> None:
        """Create a view of the examples at the positions ``index`` [N] of a table of ``TokenCache``.

        ``files``, from which the table was made in this order, are needed only by :meth:`names`.
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
        table = self._table[self._index[np.asarray(places)].tolist()]
        columns: dict[str, list] = {}
        for name in self._columns:
            column = table.column(name)
            if name in self._defaults:
                column = column.fill_null(self._defaults[name])
            columns[name] = _ragged(column) if name.endswith("_ids") else column.to_pylist()
        return [self._example(**dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]

    def fingerprint(self) -> str:
        """Return a hash of the token ids, labels, rewards and weights in order; it does not depend on the file paths."""
        return examples_hash([Path(file["filename"]) for file in self._table.cache_files], self._index)

    def origins(self, places: Sequence[int]) -> list[Origin]:
        table = self._table[self._index[np.asarray(places)].tolist()]
        columns = [table.column(name).to_pylist() for name in ("line", "prompt_cut", "response_cut")]
        return [Origin(*values) for values in zip(*columns, strict=True)]

    def names(self, places: Sequence[int]) -> list[str]:
        """Return the rows of the examples, such as "data/rows.jsonl:3", without duplicates: a pair may be two examples."""
        ends = np.cumsum([file.examples for file in self._files])
        of_files = np.searchsorted(ends, self._index[np.asarray(places)], side="right").tolist()
        lines = [origin.line for origin in self.origins(places)]
        named = (row_place(self._files[number].path, line) for number, line in zip(of_files, lines, strict=True))
        return list(dict.fromkeys(named))

    def examples_of_lines(self, count: int) -> int:
        """Return the number of examples that come from the first ``count`` rows of the file; a pair may be two examples."""
        lines = [origin.line for origin in self.origins(range(min(len(self), 2 * count)))]
        return sum(line in list(dict.fromkeys(lines))[:count] for line in lines)

    @cached_property
    def counts(self) -> SplitCounts:
        """Counts of the split; computing them takes a second for ten million examples."""
        tokens, longest = 0, dict[str, int]()
        for name in self._sequences:
            lengths = self._lengths(name)
            tokens += int(lengths.sum(dtype=np.int64))
            longest[name] = int(lengths.max(initial=0))
        prompt = longest.pop("prompt_ids")
        return SplitCounts(
            rows=len(self),
            desirable=self._number_of("desirable") if "desirable" in self._table.column_names else None,
            tokens=tokens,
            longest=prompt + max(longest.values()),
            cut_prompts=self._number_of("prompt_cut"),
            cut_responses=self._number_of("response_cut"),
        )

    def length_histograms(self) -> dict[str, LengthHistogram]:
        """Return the lengths of the prompts and of the answers of each class in tokens, such as "prompt", "chosen"."""
        parts = dict.fromkeys(self._sequences)
        return {name.removesuffix("_ids"): LengthHistogram.of(self._lengths(name)) for name in parts}

    def _lengths(self, column: str) -> np.ndarray:
        """Return the number of tokens [N] of each sequence of a column."""
        chunks = self._table.data.column(column).chunks
        return np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in chunks])[self._index]

    def _number_of(self, column: str) -> int:
        return int(self._table.data.column(column).to_numpy()[self._index].sum())


class KTODataset(_TokenDataset[KTOExample]):
    """Dataset of unpaired answers, each desirable or undesirable."""

    kind = KTO_EXAMPLES
    _example = KTOExample
    _columns = ("prompt_ids", "response_ids", "desirable", "weight")
    _sequences = ("prompt_ids", "response_ids")

    @property
    def class_weights(self) -> tuple[float, float]:
        """Total weight of the desirable and of the undesirable examples: their numbers if all weights are 1."""
        desirable, weights = (self._table.data.column(name).to_numpy()[self._index] for name in ("desirable", "weight"))
        return float(weights[desirable].sum()), float(weights[~desirable].sum())

    def length_histograms(self) -> dict[str, LengthHistogram]:
        desirable_N, lengths_N = self._table.data.column("desirable").to_numpy()[self._index], self._lengths("response_ids")
        lengths = {"desirable": lengths_N[desirable_N], "undesirable": lengths_N[~desirable_N]}
        return {
            "prompt": LengthHistogram.of(self._lengths("prompt_ids")),
            **{name: LengthHistogram.of(of_class_N) for name, of_class_N in lengths.items()},
        }


class DPODataset(_TokenDataset[DPOExample]):
    """Dataset of pairs of answers."""

    kind = DPO_EXAMPLES
    _example = DPOExample
    _columns = ("prompt_ids", "chosen_ids", "rejected_ids", "chosen_reward", "rejected_reward", "weight")
    _sequences = ("prompt_ids", "chosen_ids", "prompt_ids", "rejected_ids")

    def __init__(
        self,
        *,
        table: datasets.Dataset,
        index: np.ndarray,
        default_chosen_reward: float,
        default_rejected_reward: float,
        files: Sequence[FileOfTable] = (),
    ) -> None:
        """Create a view of a table; the default rewards are those of rows without."""
        super().__init__(table=table, index=index, files=files)
        self._defaults = {"chosen_reward": default_chosen_reward, "rejected_reward": default_rejected_reward}


AnyDataset = TypeVar("AnyDataset", KTODataset, DPODataset)


@dataclass(frozen=True, kw_only=True)
class Splits(Generic[AnyDataset]):
    """Datasets of a run; None for a split without data."""

    train: AnyDataset | None
    validation: Mapping[str, AnyDataset]  # by name; a single set without a name has the empty name
    test: AnyDataset | None
    labels: str = ""  # which values of the label columns mean desirable and undesirable; empty for pairs
    prompts: str = ""  # whether prompts of plain text use the chat template; empty if there are none, or no template
    left_out: str = ""  # numbers of rows that were left out, by kind; empty if there are none
    special_tokens: str = ""  # number of rows with special tokens within their texts; empty if there are none
    warnings: tuple[str, ...] = ()  # unexpected treatment of columns and rows, one line each

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
    labels: Mapping[str, Sequence[object]] | None = None,
    json_columns: Sequence[str] | None = None,
    drop: Sequence[str] = DEFAULT_DROPS,
    min_validation_rows: int = 1,
    cache_shared: bool = False,
    cache_verified: bool = False,
    preprocess_workers: int | None = 1,
    apply_chat_template: bool = False,
    date: datetime | None = None,
    max_rows: int | None = None,
    progress: Progress = show_nothing,
) -> Splits[AnyDataset]:
    """Build the training, validation and test datasets; they are tokenised once and then memory-mapped from ``cache_dir``.

    Args:
        kind: ``KTO_EXAMPLES`` or ``DPO_EXAMPLES``.
        make: (table=..., index=..., files=...) -> the dataset of a split: :class:`KTODataset`, or :class:`DPODataset` with
            its default rewards bound.
        data_prefix: see ``sources.read_data_prefix``.
        splits_string: shares of each file (or folder) in the order of its rows, such as "98,2", or "auto", see
            ``sources.split_shares``. None: all rows are for training. It is ignored if ``data_prefix`` itself defines the
            splits.
        tokenizer, vocab_size, apply_chat_template, date: see ``chat.RecordEncoder``.
        seq_length, truncation_mode: see ``truncation.Truncation``.
        fields, labels, json_columns: see ``reader.Fields`` and ``labels.Labels``.
        drop: kinds of rows that are left out, see ``drops.DROPS``.
        seed: determines the order of the examples within a blend.
        cache_dir, cache_shared, cache_verified, preprocess_workers, max_rows, progress: see ``cache.TokenCache``.
        min_validation_rows: minimum size of a validation set. The rows of a smaller set are used for training, or dropped if
            the set has separate files; a smaller named set is an error.

    Raises:
        DataError: files are missing, a column of ``fields`` is in no file, or rows are broken (all of them are counted).
        UserError: a named validation set has too few rows.
    """
    encoder = RecordEncoder(tokenizer=tokenizer, vocab_size=vocab_size, apply_chat_template=apply_chat_template, date=date)
    sources = read_data_prefix(data_prefix)
    cache = TokenCache(
        kind=kind,
        folder=Path(cache_dir),
        fields=Fields(columns=fields or {}, labels=Labels.of(labels), json_columns=json_columns, drop=drop),
        encoder=encoder,
        truncation=Truncation(seq_length, truncation_mode, encoder.bos_id),
        shared=cache_shared,
        verified=cache_verified,
        preprocess_workers=preprocess_workers,
        max_rows=max_rows,
        progress=progress,
    )
    opened = _open_all(sources, cache)
    total = FileColumns()
    for _, columns in opened.values():
        total.merge(columns)
    warnings = list(_notes({file: columns for file, (_, columns) in opened.items()}))
    tables = {
        source: concat_tables([opened[file][0] for file in source.files]) for group in sources.values() for source in group
    }
    kept = {}
    for split, group in sources.items():
        kept[split], counts = _kept(group, tables, drop)
        total.dropped = {**total.dropped, **{each: total.dropped.get(each, 0) + counts[each] for each in counts}}
        if left_out := drop_text(counts):
            warnings.append(f"{'rows' if split == WHOLE else split}: left out: {left_out} (model.data.drop)")
    ranges: dict[str, list[Range]]
    if WHOLE in sources:
        cuts = [_cut(source, tables[source], kept[WHOLE][source], splits_string) for source in sources[WHOLE]]
        ranges = {split: [cut[split] for cut in cuts] for split in SPLITS}
        warnings += join_small(ranges, splits_string, min_validation_rows)
    else:
        ranges = {split: [(source, 0, len(kept[split][source])) for source in group] for split, group in sources.items()}
        refuse_small_sets(ranges, min_validation_rows)
        warnings += leave_out_small(ranges, min_validation_rows)
    built = {}
    for split, parts in ranges.items():
        if parts := [part for part in parts if part[1] < part[2]]:
            table = datasets.Dataset(concat_tables([tables[source] for source, *_ in parts]))
            files = [FileOfTable(file, len(opened[file][0])) for source, *_ in parts for file in source.files]
            index = _index(parts, tables, kept[WHOLE if WHOLE in sources else split], seed)
            built[split] = make(table=table, index=index, files=files)
    of_sets = {name: validation_split(name) for name in validation_names(data_prefix)}
    validation = {name: built[split] for name, split in of_sets.items() if split in built}
    return Splits(
        train=built.get("train"),
        validation=validation,
        test=built.get("test"),
        labels=cache.fields.labels.text(total.labels),
        prompts=_prompts_text(encoder, built.get("train")) if total.texts else "",
        left_out=drop_text(total.dropped),
        special_tokens=total.special_tokens_text(),
        warnings=tuple(warnings),
    )


def _prompts_text(encoder: RecordEncoder, train: KTODataset | DPODataset | None) -> str:
    """Describe how prompts of plain text are tokenised; empty if the first of them needs no chat template."""
    if encoder.apply_chat_template:
        return "plain text as user messages of the model's chat template (model.data.apply_chat_template)"
    if train is not None and encoder.is_untemplated(list(train[0].prompt_ids)):
        return "plain text without the model's chat template; model.data.apply_chat_template=true applies it"
    return ""


def _open_all(sources: Mapping[str, Sequence[Source]], cache: TokenCache) -> dict[Path, tuple[Table, FileColumns]]:
    """Return the examples and columns of every file; all files are read before an error about broken rows is raised."""
    broken = RowErrors()
    files = dict.fromkeys(file for group in sources.values() for source in group for file in source.files)
    opened = cache.open(list(files), broken=broken)
    found = {column for _, columns in opened.values() for column in columns.found}
    if missing := [column for column in cache.fields.columns.values() if column not in found]:
        has = ", ".join(sorted(found)) or "none"
        raise DataError(f"model.data.fields must name columns of the rows, got {missing[0]}; the columns are {has}")
    broken.raise_if_any()
    return {file: (table, columns) for file, (table, columns) in opened.items() if table is not None}


def _notes(of_files: Mapping[Path, FileColumns]) -> Iterator[str]:
    """Yield a warning for each note about a file, or one for all files with the same columns if there are many."""
    alike: dict[tuple[str, ...], list[Path]] = {}
    for file, columns in of_files.items():
        alike.setdefault(tuple(sorted(columns.unused)), []).append(file)
    for files in alike.values():
        if len(files) <= _NAMED_FILES:
            yield from (f"{data_name(file)}: {note}" for file in files for note in of_files[file].notes())
            continue
        total = FileColumns()
        for file in files:
            total.merge(of_files[file])
        yield from (f"{files[0]} and {len(files) - 1:,} other files: {note}" for note in total.notes())


def _kept(
    group: Sequence[Source], tables: Mapping[Source, Table], drop: Sequence[str]
) -> tuple[dict[Source, np.ndarray], dict[str, int]]:
    """Return the positions [N] that are kept of each source's examples, and the number of repeated ones of each kind."""
    starts = np.cumsum([0, *(len(tables[source]) for source in group)])
    found = repeated(concat_tables([tables[source] for source in group]), drop)
    is_kept = np.ones(starts[-1], dtype=bool)
    for places_M in found.values():
        is_kept[places_M] = False
    kept = {source: np.flatnonzero(is_kept[slice(*ends)]) for source, ends in zip(group, pairwise(starts), strict=True)}
    return kept, {kind: len(places_M) for kind, places_M in found.items()}


def _cut(source: Source, table: Table, kept_N: np.ndarray, splits_string: str | None) -> dict[str, Range]:
    def is_second_of_pair(place: int) -> bool:
        first, second = (table.slice(int(kept_N[each]), 1).column("line")[0].as_py() for each in (place - 1, place))
        return bool(first == second)

    shares = split_shares("1" if splits_string is None else splits_string, len(kept_N))
    ranges = split_ranges(len(kept_N), shares, is_second_of_pair)
    return {split: (source, start, stop) for split, (start, stop) in zip(SPLITS, ranges, strict=True)}


def _index(
    parts: Sequence[Range], tables: Mapping[Source, Table], kept: Mapping[Source, np.ndarray], seed: int
) -> np.ndarray:
    """Return the positions [N] of the rows of a split in the concatenated tables of its sources, blended by weight."""
    begins = accumulate((len(tables[source]) for source, *_ in parts), initial=0)
    places = [begin + kept[source][start:stop] for begin, (source, start, stop) in zip(begins, parts, strict=False)]
    whole, firsts = np.concatenate(places), np.cumsum([0, *map(len, places)])
    if weights := [source.weight for source, *_ in parts if source.weight is not None]:
        chosen, within = blend([len(own) for own in places], weights, seed=seed)
        return whole[firsts[chosen] + within]
    return whole


def _ragged(column: pyarrow.ChunkedArray) -> list[np.ndarray]:
    """Return the lists of an Arrow column as views of one array."""
    lists = column.combine_chunks()
    values, offsets = lists.values.to_numpy(), lists.offsets.to_numpy()
    return [values[start:stop] for start, stop in pairwise(offsets)]
