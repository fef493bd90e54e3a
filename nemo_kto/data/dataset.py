"""Datasets of examples: the splits of ``data_prefix``, memory-mapped."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import datasets
import numpy as np
import torch.utils.data
from transformers import PreTrainedTokenizerBase

from nemo_kto.data.blend import blend, split_ranges
from nemo_kto.data.cache import DPO_EXAMPLES, KTO_EXAMPLES, TokenCache
from nemo_kto.data.chat import RecordEncoder
from nemo_kto.data.prefix import SPLITS, WHOLE, Source, read_data_prefix, read_splits_string
from nemo_kto.data.records import DPOExample, KTOExample, RowErrors

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


class DPODataset(_TokenDataset[DPOExample]):
    """Pairs of answers."""

    def __init__(self, *, table: datasets.Dataset, index: np.ndarray, default_rewards: tuple[float, float]) -> None:
        """Args: default_rewards: of the chosen and of the rejected answer, where an example has none of its own."""
        super().__init__(table=table, index=index)
        self._default_rewards = default_rewards

    def _examples(self, table: pyarrow.Table) -> list[DPOExample]:
        columns: dict[str, list[Any]] = {
            name: _ragged(table.column(name)) for name in ("prompt_ids", "chosen_ids", "rejected_ids")
        }
        for side, default in zip(("chosen", "rejected"), self._default_rewards, strict=True):
            rewards = table.column(f"{side}_reward").to_pylist()
            columns[f"{side}_reward"] = [default if reward is None else reward for reward in rewards]
        return [DPOExample(**dict(zip(columns, example, strict=True))) for example in zip(*columns.values(), strict=True)]


AnyDataset = TypeVar("AnyDataset", KTODataset, DPODataset)


@dataclass(frozen=True)
class Splits(Generic[AnyDataset]):
    """The datasets of a run; None where the data has no such split."""

    train: AnyDataset | None
    validation: AnyDataset | None
    test: AnyDataset | None


def build_kto_splits(
    *,
    data_prefix: object,
    splits_string: str | None,
    tokenizer: PreTrainedTokenizerBase,
    seq_length: int,
    truncation_mode: str,
    cache_dir: str | Path,
    seed: int,
) -> Splits[KTODataset]:
    """Training, validation and test examples, tokenised on the first call and mapped from ``cache_dir`` afterwards.

    Args:
        data_prefix: see ``prefix.read_data_prefix``.
        splits_string: such as "98,1,1": shares of each file (or folder) in the order of its rows. None: all is for
            training. It is not needed, and not looked at, where ``data_prefix`` itself names the splits.
        tokenizer: the model's.
        seq_length: tokens in an example, at least 2; longer ones are cut.
        truncation_mode: ``keep_end`` or ``keep_start`` of the prompt.
        cache_dir: folder of the tokenised examples.
        seed: order of the examples within a blend.

    Raises:
        DataError: files are missing or rows are broken; all broken rows of all files are counted.
    """
    cache = TokenCache(
        kind=KTO_EXAMPLES,
        folder=cache_dir,
        encoder=RecordEncoder(tokenizer=tokenizer),
        seq_length=seq_length,
        truncation_mode=truncation_mode,
    )
    splits = _build_splits(KTODataset, data_prefix, splits_string, cache, seed)
    for split in SPLITS:
        _warn_of_one_class(split, getattr(splits, split))
    return splits


def build_dpo_splits(
    *,
    data_prefix: object,
    splits_string: str | None,
    tokenizer: PreTrainedTokenizerBase,
    seq_length: int,
    truncation_mode: str,
    cache_dir: str | Path,
    seed: int,
    default_chosen_reward: float,
    default_rejected_reward: float,
) -> Splits[DPODataset]:
    """Training, validation and test pairs.

    Args:
        data_prefix, splits_string, tokenizer, seq_length, truncation_mode, cache_dir, seed: see :func:`build_kto_splits`.
        default_chosen_reward: of the chosen answers of examples without rewards.
        default_rejected_reward: of their rejected answers.

    Raises:
        DataError: files are missing or rows are broken; all broken rows of all files are counted.
    """
    cache = TokenCache(
        kind=DPO_EXAMPLES,
        folder=cache_dir,
        encoder=RecordEncoder(tokenizer=tokenizer),
        seq_length=seq_length,
        truncation_mode=truncation_mode,
    )
    make = partial(DPODataset, default_rewards=(default_chosen_reward, default_rejected_reward))
    return _build_splits(make, data_prefix, splits_string, cache, seed)


def _build_splits(
    make: Callable[..., AnyDataset], data_prefix: object, splits_string: str | None, cache: TokenCache, seed: int
) -> Splits[AnyDataset]:
    sources = read_data_prefix(data_prefix)
    shares = _shares(splits_string) if WHOLE in sources else {}
    tables = _open_all(sources, cache)
    built: dict[str, AnyDataset | None] = dict.fromkeys(SPLITS)
    for split in SPLITS:
        if shares.get(split, 0) > 0:
            built[split] = _assemble(make, sources[WHOLE], tables, seed=seed, shares=shares, split=split)
        elif split in sources:
            built[split] = _assemble(make, sources[split], tables, seed=seed)
        else:
            continue
        if built[split] is None:
            logger.warning("%s: no row is left for this split; give it a larger share in splits_string", split)
    return Splits(**built)


def _shares(splits_string: str | None) -> dict[str, Fraction]:
    if splits_string is None:
        return {"train": Fraction(1)}
    return dict(zip(SPLITS, read_splits_string(splits_string), strict=True))


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
    *,
    seed: int,
    shares: dict[str, Fraction] | None = None,
    split: str = "train",
) -> AnyDataset | None:
    """One split out of its sources, or out of its share of each; None if no row is left for it."""
    parts, ranges, weights, start = [], [], [], 0
    for source in sources:
        table = datasets.concatenate_datasets([tables[file] for file in source.files])
        first, stop = (0, len(table)) if shares is None else _range(table, shares, split)
        if first < stop:
            parts.append(table)
            ranges.append(np.arange(start + first, start + stop))
            weights.append(source.weight)
            start += len(table)
    if not parts:
        return None
    table = datasets.concatenate_datasets(parts)
    blended = [weight for weight in weights if weight is not None]
    if not blended:
        return make(table=table, index=np.concatenate(ranges))
    chosen, places = blend([len(places) for places in ranges], blended, seed=seed)
    first_places = np.array([places[0] for places in ranges])
    return make(table=table, index=first_places[chosen] + places)


def _range(table: datasets.Dataset, shares: dict[str, Fraction], split: str) -> tuple[int, int]:
    def is_second_of_pair(place: int) -> bool:
        return table[place]["line"] == table[place - 1]["line"]

    ranges = split_ranges(len(table), list(shares.values()), is_second_of_pair)
    return ranges[list(shares).index(split)]


def _warn_of_one_class(split: str, dataset: KTODataset | None) -> None:
    if dataset is None:
        return
    desirable = dataset.desirable_count()
    logger.info("%s: %d rows, %d of them desirable", split, len(dataset), desirable)
    if desirable in (0, len(dataset)):
        logger.warning(
            "%s: all %d rows are %s; is the file sorted by label?",
            split,
            len(dataset),
            "desirable" if desirable else "undesirable",
        )


def _ragged(column: pyarrow.ChunkedArray) -> list[np.ndarray]:
    """The lists of an Arrow column, as views of one array."""
    lists = column.combine_chunks()
    values, offsets = lists.values.to_numpy(), lists.offsets.to_numpy()
    return [values[start:stop] for start, stop in pairwise(offsets)]
