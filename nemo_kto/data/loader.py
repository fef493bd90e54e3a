"""The loader of one rank: global batches in, this rank's share of each out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from nemo_kto.data.collate import kto_custom_collate
from nemo_kto.data.records import DPOExample, KTOExample
from nemo_kto.data.sampler import GlobalBatchSampler


def build_kto_dataloader(
    *,
    dataset: Dataset[KTOExample],
    sampler: GlobalBatchSampler,
    rank: int,
    size: int,
    eos_id: int,
    seq_length: int | None = None,
    pad_to_multiple: int = 1,
    with_kl: bool = True,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[dict[str, torch.Tensor]]:
    """A loader that yields rows rank, rank + size, ... of each global batch of ``sampler``.

    Every rank reads the whole global batch, because KL pairs are formed over all of it; rows are memory-mapped, so
    this is cheap. Where the next iteration starts is set on ``loader.batch_sampler`` (see ``GlobalBatchSampler``).

    Args:
        dataset: rows, by number.
        sampler: the order, the same on every rank.
        rank: of this process in the data-parallel group.
        size: of the data-parallel group.
        num_workers: processes that read ahead; the batches are the same for any number.
        pin_memory: put the tensors into page-locked memory.
        eos_id, seq_length, pad_to_multiple, with_kl, reset_position_ids, reset_attention_mask, eod_mask_loss: see
            ``kto_custom_collate``.

    Raises:
        ValueError: ``rank`` is not one of ``size``.
    """
    collate = partial(
        kto_custom_collate,
        eos_id=eos_id,
        reset_position_ids=reset_position_ids,
        reset_attention_mask=reset_attention_mask,
        eod_mask_loss=eod_mask_loss,
        seq_length=seq_length,
        pad_to_multiple=pad_to_multiple,
        with_kl=with_kl,
    )
    take = partial(_kto_share, rank=rank, size=size, collate=collate)
    return _loader(dataset, sampler, take, rank=rank, size=size, num_workers=num_workers, pin_memory=pin_memory)


def build_dpo_dataloader(
    *, dataset: Dataset[DPOExample], sampler: GlobalBatchSampler, rank: int, size: int, num_workers: int = 0
) -> DataLoader[list[DPOExample]]:
    """A loader that yields pairs rank, rank + size, ... of each global batch of ``sampler``; the trainer collates them.

    Args:
        dataset, sampler, rank, size, num_workers: see :func:`build_kto_dataloader`.

    Raises:
        ValueError: ``rank`` is not one of ``size``.
    """
    return _loader(dataset, sampler, partial(_share, rank=rank, size=size), rank=rank, size=size, num_workers=num_workers)


def _loader(
    dataset: Dataset[Any],
    sampler: GlobalBatchSampler,
    take: Callable[[Sequence[Any]], Any],
    *,
    rank: int,
    size: int,
    num_workers: int,
    pin_memory: bool = False,
) -> DataLoader[Any]:
    if not 0 <= rank < size:
        raise ValueError(f"rank must be at least 0 and below size, got rank {rank} of {size}")
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=take,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=pin_memory,
        # Without one of its own, every iteration draws from torch's global generator, and a resumed run (which
        # iterates less often) would go on with other random numbers than the run it continues.
        generator=torch.Generator().manual_seed(0),
    )


def _share(batch: Sequence[Any], *, rank: int, size: int) -> list[Any]:
    return list(batch[rank::size])


def _kto_share(batch: Sequence[KTOExample], *, rank: int, size: int, collate: Any) -> dict[str, torch.Tensor]:
    return collate(batch, rows=range(rank, len(batch), size))
