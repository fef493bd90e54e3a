"""Data loaders, and the assignment of examples to data-parallel ranks."""

from __future__ import annotations

import atexit
import heapq
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from nemo_kto.data.batches.collate import kl_partners_of
from nemo_kto.data.batches.dataset import DPOExample, KTOExample
from nemo_kto.data.batches.sampler import GlobalBatchSampler

SequenceCost = Callable[[int], float]
"""The work of one or more passes over a sequence of so many tokens, in any unit."""


@dataclass(frozen=True, kw_only=True)
class KTOCosts:
    """Of each example of a global batch.

    Attributes:
        cost: of the passes over the sample.
        kl_cost: of those over its KL example; None where none is made.
        seq_length: longest sequence; the responses of KL examples are cut to fit.
    """

    cost: SequenceCost
    kl_cost: SequenceCost | None
    seq_length: int

    def __call__(self, batch: Sequence[KTOExample]) -> list[float]:
        """[N], in the order of the batch."""
        costs_N = [self.cost(len(each.prompt_ids) + len(each.response_ids)) for each in batch]
        if self.kl_cost is None:
            return costs_N
        for number, partner in enumerate(kl_partners_of(batch)):
            length = min(self.seq_length, len(batch[number].prompt_ids) + len(batch[partner].response_ids))
            costs_N[number] += self.kl_cost(length)
        return costs_N


@dataclass(frozen=True, kw_only=True)
class DPOCosts:
    """Of each pair of a global batch: that of both answers.

    Attributes:
        cost: of the passes over a sequence.
    """

    cost: SequenceCost

    def __call__(self, batch: Sequence[DPOExample]) -> list[float]:
        """[N], in the order of the batch."""
        return [
            self.cost(len(each.prompt_ids) + len(each.chosen_ids)) + self.cost(len(each.prompt_ids) + len(each.rejected_ids))
            for each in batch
        ]


def balanced_shares(costs_N: Sequence[float], *, ranks: int) -> list[list[int]]:
    """The numbers of the examples of each rank, in order; the most expensive one goes to the rank with the least so far.

    The largest sum is at most 4/3 of the smallest that is possible (Graham 1969, https://doi.org/10.1137/0117039).

    Examples:
        >>> balanced_shares([3.0, 7.0, 4.0, 2.0, 2.0], ranks=2)
        [[1, 3], [0, 2, 4]]
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    sums = [(0.0, rank) for rank in range(ranks)]  # a heap; ties go to the lowest rank
    for number in sorted(range(len(costs_N)), key=lambda each: -costs_N[each]):
        total, rank = sums[0]
        heapq.heapreplace(sums, (total + costs_N[number], rank))
        shares[rank].append(number)
    return [sorted(share) for share in shares]


def every_nth(batch: Sequence[object], *, ranks: int) -> list[list[int]]:
    """Examples rank, rank + ranks, ... of a batch: as many for each rank as can be.

    Examples:
        >>> every_nth("abcde", ranks=2)
        [[0, 2, 4], [1, 3]]
    """
    return [list(range(rank, len(batch), ranks)) for rank in range(ranks)]


def by_cost(batch: Sequence[object], *, ranks: int, costs: Callable[..., list[float]]) -> list[list[int]]:
    """:func:`balanced_shares` of the examples of a batch."""
    return balanced_shares(costs(batch), ranks=ranks)


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
