"""Datasets of tokenised examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

import datasets
import numpy as np
import torch.utils.data

from nemo_kto.data.rows.forms import row_place
from nemo_kto.data.tokens.cache import DPO_EXAMPLES, KTO_EXAMPLES, examples_hash

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


def _ragged(column: pyarrow.ChunkedArray) -> list[np.ndarray]:
    """Return the lists of an Arrow column as views of one array."""
    lists = column.combine_chunks()
    values, offsets = lists.values.to_numpy(), lists.offsets.to_numpy()
    return [values[start:stop] for start, stop in pairwise(offsets)]
