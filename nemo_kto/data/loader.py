"""The loader of one rank: global batches in, this rank's share of each out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from nemo_kto.data.batch import KTOBatch
from nemo_kto.data.records import DPORow, KTORow
from nemo_kto.data.sampler import GlobalBatchSampler

Example = TypeVar("Example")
Share = TypeVar("Share")


def build_kto_dataloader(
    *,
    dataset: Dataset[KTORow],
    sampler: GlobalBatchSampler,
    rank: int,
    size: int,
    collate: Callable[..., KTOBatch],
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[KTOBatch]:
    """A loader that yields examples rank, rank + size, ... of each global batch of ``sampler``, collated.

    Every rank reads the whole global batch, because KL examples are formed over all of it; examples are memory-mapped, so
    this is cheap. Where the next iteration starts is set on ``loader.batch_sampler`` (see ``GlobalBatchSampler``).

    Args:
        dataset: examples, by number.
        sampler: the order, the same on every rank.
        rank: of this process in the data-parallel group.
        size: of the data-parallel group.
        collate: ``kto_custom_collate`` with its options bound; called with a global batch and the numbers to keep.
        num_workers: processes that read ahead; the batches are the same for any number.
        pin_memory: put the tensors into page-locked memory.

    Raises:
        ValueError: ``rank`` is not one of ``size``.
    """
    _check_rank(rank, size)
    take = partial(_collated_share, rank=rank, size=size, collate=collate)
    return _loader(dataset, sampler, take, num_workers=num_workers, pin_memory=pin_memory)


def build_dpo_dataloader(
    *, dataset: Dataset[DPORow], sampler: GlobalBatchSampler, rank: int, size: int, num_workers: int = 0
) -> DataLoader[list[DPORow]]:
    """A loader that yields pairs rank, rank + size, ... of each global batch of ``sampler``; the trainer collates them.

    Args:
        dataset, sampler, rank, size, num_workers: see :func:`build_kto_dataloader`.

    Raises:
        ValueError: ``rank`` is not one of ``size``.
    """
    _check_rank(rank, size)
    return _loader(dataset, sampler, partial(_share, rank=rank, size=size), num_workers=num_workers, pin_memory=False)


def _check_rank(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"rank must be at least 0 and below size, got rank {rank} of {size}")


def _loader(
    dataset: Dataset[Example],
    sampler: GlobalBatchSampler,
    take: Callable[[Sequence[Example]], Share],
    *,
    num_workers: int,
    pin_memory: bool,
) -> DataLoader[Share]:
    return DataLoader(
        dataset,  # type: ignore[arg-type]  # torch types a loader by what it reads, and not by what it yields
        batch_sampler=sampler,
        collate_fn=take,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=pin_memory,
        # Without one of its own, every iteration draws from torch's global generator, and a resumed run (which
        # iterates less often) would get other random numbers than the run it continues.
        generator=torch.Generator().manual_seed(0),
    )


def _share(batch: Sequence[Example], *, rank: int, size: int) -> list[Example]:
    return list(batch[rank::size])


def _collated_share(batch: Sequence[KTORow], *, rank: int, size: int, collate: Callable[..., KTOBatch]) -> KTOBatch:
    return collate(batch, kept=range(rank, len(batch), size))
