"""Datasets of examples: the splits of ``data_prefix``, memory-mapped."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import datasets
import numpy as np
import torch.utils.data
from transformers import PreTrainedTokenizerBase

from nemo_kto.data.blend import blend, split_ranges
from nemo_kto.data.cache import ExampleKind, TokenCache
from nemo_kto.data.chat import RecordEncoder
from nemo_kto.data.fingerprint import examples_hash
from nemo_kto.data.prefix import SPLITS, WHOLE, Source, read_data_prefix, read_splits_string
from nemo_kto.data.records import DPOExample, KTOExample, RowErrors
from nemo_kto.data.truncation import Truncation

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger(__name__)

Example = TypeVar("Example")


class _TokenDataset(torch.utils.data.Dataset[Example], ABC):
    """Examples of a memory-mapped table, in the order of an index."""

    def __init__(self, *, table: datasets.Dataset, index: np.ndarray) -> None:
        """Args: table: examples as ``TokenCache`` keeps them; index: [N] int64, the place in the table of each."""
        self._table = table.with_format("arrow")
        self._index = index

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, place: int) -> Example:
        return self.__getitems__([place])[0]

    def __getitems__(self, places: Sequence[int]) -> list[Example]:
        """Many examples in one look-up (torch's DataLoader calls it by this name)."""
        return self._examples(self._table[self._index[np.asarray(places)].tolist()])

    def fingerprint(self) -> str:
        """Hash of the token ids, labels and rewards of the examples in their order, wherever their files lie."""
        return examples_hash([Path(file["filename"]) for file in self._table.cache_files], self._index)

    def log_counts(self, split: str) -> None:
        """Say how many examples the split has, and warn of what looks wrong."""
        logger.info("%s: %d rows", split, len(self))

    @abstractmethod
    def _examples(self, table: pyarrow.Table) -> list[Example]:
        """The examples of a piece of the table."""


class KTODataset(_TokenDataset[KTOExample]):
    """Unpaired answers, each desirable or undesirable."""

    def _examples(self, table: pyarrow.Table) -> list[KTOExample]:
        prompts, responses = _ragged(table.column("prompt_ids")), _ragged(table.column("response_ids"))
        desirable = table.column("desirable").to_pylist()
        return [KTOExample(*example) for example in zip(prompts, responses, desirable, strict=True)]

    def desirable_count(self) -> int:
        """Number of desirable examples."""
        return int(self._table.data.column("desirable").to_numpy()[self._index].sum())

    def log_counts(self, split: str) -> None:
        desirable = self.desirable_count()
        logger.info("%s: %d rows, %d of them desirable", split, len(self), desirable)
        if desirable in (0, len(self)):
            label = "desirable" if desirable else "undesirable"
            logger.warning("%s: all %d rows are %s; is the file sorted by label?", split, len(self), label)


class DPODataset(_TokenDataset[DPOExample]):
    """Pairs of answers."""

    def __init__(self, *, table: datasets.Dataset, index: np.ndarray, default_rewards: tuple[float, float]) -> None:
        """Args: default_rewards: of the chosen and of the rejected answer, where an example has none of its own."""
        super().__init__(table=table, index=index)
        self._default_rewards = default_rewards

    def _examples(self, table: pyarrow.Table) -> list[DPOExample]:
        columns: dict[str, list] = {
            name: _ragged(table.column(name)) for name in ("prompt_ids", "chosen_ids", "rejected_ids")
        }
        for name, default in zip(("chosen_reward", "rejected_reward"), self._default_rewards, strict=True):
            columns[name] = table.column(name).fill_null(default).to_pylist()
        return [DPOExample(**dict(zip(columns, example, strict=True))) for example in zip(*columns.values(), strict=True)]


AnyDataset = TypeVar("AnyDataset", KTODataset, DPODataset)


@dataclass(frozen=True)
class Splits(Generic[AnyDataset]):
    """The datasets of a run; None where the data has no such split."""

    train: AnyDataset | None
    validation: AnyDataset | None
    test: AnyDataset | None


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
) -> Splits[AnyDataset]:
    """Training, validation and test examples, tokenised on the first call and mapped from ``cache_dir`` afterwards.

    Args:
        kind: ``cache.KTO_EXAMPLES`` or ``cache.DPO_EXAMPLES``.
        make: (table, index) -> the dataset of a split: :class:`KTODataset`, or :class:`DPODataset` with its defaults bound.
        data_prefix: see ``prefix.read_data_prefix``.
        splits_string: such as "98,1,1": shares of each file (or folder) in the order of its rows. None: all is for
            training. It is not needed, and not looked at, where ``data_prefix`` itself names the splits.
        tokenizer: the model's.
        seq_length, truncation_mode: see ``truncation.Truncation``.
        cache_dir: folder of the tokenised examples.
        seed: order of the examples within a blend.

    Raises:
        DataError: files are missing or rows are broken; all broken rows of all files are counted.
    """
    encoder = RecordEncoder(tokenizer=tokenizer)
    truncation = Truncation(seq_length, truncation_mode, encoder.bos_id)
    sources = read_data_prefix(data_prefix)
    given = "1" if splits_string is None else splits_string
    shares = dict(zip(SPLITS, read_splits_string(given), strict=True)) if WHOLE in sources else {}
    tables = _open_all(sources, TokenCache(kind=kind, folder=Path(cache_dir), encoder=encoder, truncation=truncation))
    built: dict[str, AnyDataset | None] = dict.fromkeys(SPLITS)
    for split in SPLITS:
        if split in sources:
            built[split] = _assemble(make, sources[split], tables, {split: Fraction(1)}, split, seed)
        elif shares.get(split):
            built[split] = _assemble(make, sources[WHOLE], tables, shares, split, seed)
    return Splits(**built)


def _open_all(sources: dict[str, tuple[Source, ...]], cache: TokenCache) -> dict[Path, datasets.Dataset]:
    """Every file's examples; all files are read before any broken row is raised."""
    broken = RowErrors()
    files = dict.fromkeys(file for group in sources.values() for source in group for file in source.files)
    tables = {file: cache.open(file, broken=broken) for file in files}
    broken.raise_if_any()
    return {file: table for file, table in tables.items() if table is not None}


def _assemble(
    make: Callable[..., AnyDataset],
    sources: tuple[Source, ...],
    tables: dict[Path, datasets.Dataset],
    shares: dict[str, Fraction],
    split: str,
    seed: int,
) -> AnyDataset | None:
    """One split out of its share of each source; None if no row is left for it."""
    parts, ranges, weights, start = [], [], [], 0
    for source in sources:
        table = datasets.concatenate_datasets([tables[file] for file in source.files])
        first, stop = _range(table, shares, split)
        if first < stop:
            parts.append(table)
            ranges.append(np.arange(start + first, start + stop))
            weights.append(source.weight)
            start += len(table)
    if not parts:
        logger.warning("%s: no row is left for this split; give it a larger share in splits_string", split)
        return None
    index = np.concatenate(ranges)
    if blended := [weight for weight in weights if weight is not None]:
        chosen, places = blend([len(places) for places in ranges], blended, seed=seed)
        index = np.array([places[0] for places in ranges])[chosen] + places
    dataset = make(table=datasets.concatenate_datasets(parts), index=index)
    dataset.log_counts(split)
    return dataset


def _range(table: datasets.Dataset, shares: dict[str, Fraction], split: str) -> tuple[int, int]:
    def is_second_of_pair(place: int) -> bool:
        return table[place]["line"] == table[place - 1]["line"]

    ranges = split_ranges(len(table), list(shares.values()), is_second_of_pair)
    return ranges[list(shares).index(split)]


def _ragged(column: pyarrow.ChunkedArray) -> list[np.ndarray]:
    """The lists of an Arrow column, as views of one array."""
    lists = column.combine_chunks()
    values, offsets = lists.values.to_numpy(), lists.offsets.to_numpy()
    return [values[start:stop] for start, stop in pairwise(offsets)]
