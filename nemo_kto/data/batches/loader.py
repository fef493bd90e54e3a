"""The loader of one rank: global batches in, this rank's share of each out."""

from __future__ import annotations

import atexit
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from nemo_kto.data.batches.sampler import GlobalBatchSampler
from nemo_kto.data.batches.shares import every_nth

Example = TypeVar("Example")
Share = TypeVar("Share")


def share(batch: Sequence[Example], *, kept: Sequence[int]) -> list[Example]:
    """The examples ``kept`` of a global batch, as they are; the trainer collates them."""
    return [batch[number] for number in kept]


def build_dataloader(
    *,
    dataset: Dataset[Example],
    sampler: GlobalBatchSampler,
    rank: int,
    size: int,
    take: Callable[..., Share],
    shares: Callable[..., list[list[int]]] = every_nth,
    num_workers: int = 0,
) -> DataLoader[Share]:
    """A loader that yields this rank's share of each global batch of ``sampler``.

    Every rank reads the whole global batch, because KL examples are formed over all of it; examples are memory-mapped, so
    this is cheap. Where the next iteration starts is set on ``loader.batch_sampler`` (see ``GlobalBatchSampler``).

    Args:
        dataset: examples, by number.
        sampler: the order, the same on every rank.
        rank, size: of this process in the data-parallel group, and of that group.
        take: (global batch, kept=numbers of this rank) -> what is yielded: :func:`share`, or ``kto_custom_collate`` with
            its options bound.
        shares: (global batch, ranks=size) -> numbers of the examples of each rank.
        num_workers: processes that read ahead; the batches are the same for any number.

    Raises:
        ValueError: ``rank`` is not one of ``size``.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank must be at least 0 and below size, got rank {rank} of {size}")
    return DataLoader(
        dataset,  # type: ignore[arg-type]  # torch types a loader by what it reads, and not by what it yields
        batch_sampler=sampler,
        collate_fn=partial(_take, take=take, shares=shares, rank=rank, size=size),
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        worker_init_fn=_ignore_stop_signals,
        # Without one of its own, every iteration draws from torch's global generator, and a resumed run (which
        # iterates less often) would get other random numbers than the run it continues.
        generator=torch.Generator().manual_seed(0),
    )


def every_example(loader: Any) -> DataLoader[Any]:
    """A loader of the first epoch of another one, with the incomplete batch at the end that training leaves out."""
    return DataLoader(
        loader.dataset,
        batch_sampler=replace(loader.batch_sampler, drop_last=False),
        collate_fn=loader.collate_fn,
        generator=torch.Generator().manual_seed(0),
    )


def _ignore_stop_signals(worker: int) -> None:
    """Signals that ask a run to stop reach all its processes on some clusters; the rank decides, and needs its workers."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


@atexit.register
def _end_workers() -> None:
    """Python would end them with SIGTERM, and wait for them."""
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def _take(
    batch: Sequence[Example],
    *,
    take: Callable[..., Share],
    shares: Callable[..., list[list[int]]],
    rank: int,
    size: int,
) -> Share:
    return take(batch, kept=shares(batch, ranks=size)[rank])
