"""Data loaders, and the assignment of examples to data-parallel ranks. Shape suffix: N examples in a global batch."""

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
"""Sequence length in tokens -> cost of one or more passes over the sequence, in any unit."""


@dataclass(frozen=True, kw_only=True)
class KTOCosts:
    """Cost of each example of a global batch."""

    cost: SequenceCost  # of the passes over a sample
    kl_cost: SequenceCost | None  # of the passes over its KL example; None if there are no KL examples
    seq_length: int  # to which the responses of KL examples are truncated

    def __call__(self, batch: Sequence[KTOExample]) -> list[float]:
        """Return the cost of each example: [N], in the order of the batch."""
        costs_N = [self.cost(len(each.prompt_ids) + len(each.response_ids)) for each in batch]
        if self.kl_cost is not None:
            for number, partner in enumerate(kl_partners_of(batch)):
                length = len(batch[number].prompt_ids) + len(batch[partner].response_ids)
                costs_N[number] += self.kl_cost(min(self.seq_length, length))
        return costs_N


@dataclass(frozen=True, kw_only=True)
class DPOCosts:
    """Cost of each pair of a global batch, summed over both answers; ``cost`` is that of the passes over a sequence."""

    cost: SequenceCost

    def __call__(self, batch: Sequence[DPOExample]) -> list[float]:
        """Return the cost of each pair: [N], in the order of the batch."""
        return [
            self.cost(len(each.prompt_ids) + len(each.chosen_ids)) + self.cost(len(each.prompt_ids) + len(each.rejected_ids))
            for each in batch
        ]


def balanced_shares(costs_N: Sequence[float], *, ranks: int) -> list[list[int]]:
    """Assign examples to ranks greedily, so that their total costs are balanced; return the sorted indices for each rank.

    Examples are taken in decreasing order of cost; each goes to the rank with the lowest total so far. The largest total is
    at most 4/3 of the optimum (Graham 1969, https://doi.org/10.1137/0117039).

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
    """Assign examples rank, rank + ranks, ... of a batch to each rank, so that the numbers of examples differ by at most 1.

    Examples:
        >>> every_nth("abcde", ranks=2)
        [[0, 2, 4], [1, 3]]
    """
    return [list(range(rank, len(batch), ranks)) for rank in range(ranks)]


def by_cost(batch: Sequence[object], *, ranks: int, costs: Callable[..., list[float]]) -> list[list[int]]:
    """Assign the examples of a batch to ranks by their costs, see :func:`balanced_shares`."""
    return balanced_shares(costs(batch), ranks=ranks)


Example = TypeVar("Example")
Share = TypeVar("Share")


def share(batch: Sequence[Example], *, kept: Sequence[int]) -> list[Example]:
    """Return the examples of a global batch with the indices ``kept``, not collated; the trainer collates them."""
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
    """Build a loader that yields the share of data-parallel rank ``rank`` of ``size`` in each global batch of ``sampler``.

    Every rank reads the whole global batch, because KL examples are formed over all of it; this is cheap, because examples
    are memory-mapped. The start of the next iteration is set on ``loader.batch_sampler`` (see ``GlobalBatchSampler``).

    Args:
        take: (global batch, kept=indices of this rank) -> the item to yield: :func:`share`, or ``kto_custom_collate`` with
            its options bound.
        shares: (global batch, ranks=size) -> indices of the examples of each rank.
        num_workers: number of processes that prefetch; it does not change the batches.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank must be at least 0 and below size, got rank {rank} of {size}")
    return DataLoader(
        dataset,  # type: ignore[arg-type]  # torch types a loader by the items of its dataset, not by what it yields
        batch_sampler=sampler,
        collate_fn=partial(_take_share, take=take, shares=shares, rank=rank, size=size),
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        worker_init_fn=_ignore_stop_signals,
        # Without a separate generator, every iteration draws from torch's global generator, and a resumed run (which
        # iterates less often) would get different random numbers than the original run.
        generator=torch.Generator().manual_seed(0),
    )


def _take_share(
    batch: Sequence[Example], *, take: Callable[..., Share], shares: Callable[..., list[list[int]]], rank: int, size: int
) -> Share:
    return take(batch, kept=shares(batch, ranks=size)[rank])


def every_example(loader: Any) -> DataLoader[Any]:
    """Build a loader of the first epoch of ``loader`` that includes the incomplete last batch, which training drops."""
    return DataLoader(
        loader.dataset,
        batch_sampler=replace(loader.batch_sampler, drop_last=False),
        collate_fn=loader.collate_fn,
        generator=torch.Generator().manual_seed(0),
    )


def _ignore_stop_signals(worker: int) -> None:
    """Ignore the signals that stop a run: clusters send them to all processes, and the rank still needs its workers."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


@atexit.register
def _end_workers() -> None:
    """Kill the loader workers at exit: Python would send SIGTERM, which they ignore, and wait for them."""
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
