"""Order of the examples, their assignment to data-parallel ranks, and data loaders; N examples are in a global batch."""

from __future__ import annotations

import atexit
import hashlib
import heapq
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from nemo_kto.data.batches.collate import kl_partners_of, prompt_keys
from nemo_kto.data.batches.dataset import DPOExample, KTOExample

SequenceCost = Callable[[int], float]
"""Sequence length in tokens -> cost of one or more passes over the sequence, in any unit."""


@dataclass(kw_only=True, eq=False)
class GlobalBatchSampler(Sampler[list[int]]):
    """Sampler that yields the indices of the examples of each global batch of an epoch; ValueError if none can be formed.

    The order depends only on seed and epoch. Every example occurs once per epoch, except that the incomplete last batch is
    dropped if ``drop_last`` is set. Iterating does not change the state, so that workers may prefetch; the trainer sets the
    start of an iteration with ``set_position``. If ``needs_kl_examples`` is set, a last batch with a single example is
    merged into the previous batch, because a KL example needs the response of another example.
    """

    num_examples: int
    global_batch_size: int  # over all ranks
    seed: int
    shuffle: bool  # new order in each epoch; otherwise the order of the dataset
    drop_last: bool  # the incomplete last batch: in training, but not in validation
    needs_kl_examples: bool = True

    def __post_init__(self) -> None:
        least, why = (2, " (each example is paired with the answer of another)") if self.needs_kl_examples else (1, "")
        if self.global_batch_size < least:
            raise ValueError(f"global_batch_size must be at least {least}{why}, got {self.global_batch_size}")
        needed = self.global_batch_size if self.drop_last else least
        if self.num_examples < needed:
            raise ValueError(
                f"the dataset must have at least {needed} rows for a global batch of {self.global_batch_size}, got "
                f"{self.num_examples}; {'lower global_batch_size or ' if self.drop_last else ''}add rows"
            )
        self._epoch = self._consumed = 0

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch, independent of the position."""
        return len(self._ranges(0))

    def set_position(self, epoch: int, consumed_in_epoch: int) -> None:
        """Set the next iteration to start in ``epoch`` after the first ``consumed_in_epoch`` examples."""
        if epoch < 0 or not 0 <= consumed_in_epoch <= self.num_examples:
            raise ValueError(
                f"a position must have an epoch of at least 0 and 0 to {self.num_examples} examples consumed in it, got "
                f"epoch {epoch} and {consumed_in_epoch} examples; the data must be those the run was started with"
            )
        self._epoch, self._consumed = epoch, consumed_in_epoch

    def order_hash(self) -> str:
        """Return a hash of the order of the first epoch: another numpy release may give another order for the same seed."""
        return hashlib.sha256(self._order(0).astype("<i8").tobytes()).hexdigest()

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order(self._epoch)
        for start, stop in self._ranges(self._consumed):
            yield order[start:stop].tolist()

    def _order(self, epoch: int) -> np.ndarray:
        if self.shuffle:
            return np.random.default_rng((self.seed, epoch)).permutation(self.num_examples)
        return np.arange(self.num_examples)

    def _ranges(self, first: int) -> list[tuple[int, int]]:
        """Return (start, stop) of each batch within the order, starting at position ``first``."""
        size = self.global_batch_size
        ranges = [(start, min(start + size, self.num_examples)) for start in range(first, self.num_examples, size)]
        left_over = (self.num_examples - first) % size
        if left_over and self.drop_last:
            ranges.pop()
        elif left_over == 1 and self.needs_kl_examples and len(ranges) > 1:
            ranges[-2:] = [(ranges[-2][0], self.num_examples)]
        return ranges


class ExampleCosts(Protocol):
    """Costs of the examples of a global batch, [N] in the order of the batch."""

    def __call__(self, batch: Sequence[Any]) -> list[float]: ...  # of each example, if it shares its prompt with no other
    def saved(self, batch: Sequence[Any]) -> list[float]: ...  # by an example that shares its prompt with another


@dataclass(frozen=True, kw_only=True)
class KTOCosts:
    """Cost of each example of a global batch, see :class:`ExampleCosts`."""

    cost: SequenceCost  # of the passes over a sample
    kl_cost: SequenceCost | None  # of the passes over its KL example; None if there are no KL examples
    shared_cost: SequenceCost | None = None  # of the passes in which both share their prompt; None if they do not
    seq_length: int  # to which the responses of KL examples are truncated

    @classmethod
    def of(
        cls,
        *,
        cost: SequenceCost,
        kl_cost: SequenceCost | None,
        reference_cost: SequenceCost,
        seq_length: int,
        share_prompts: bool,
    ) -> KTOCosts:
        """Build the costs; with ``share_prompts``, the reference evaluates a sample together with its KL example."""
        shared = reference_cost if share_prompts else None
        return cls(cost=cost, kl_cost=kl_cost, shared_cost=shared, seq_length=seq_length)

    def __call__(self, batch: Sequence[KTOExample]) -> list[float]:
        costs_N = [self.cost(len(each.prompt_ids) + len(each.response_ids)) for each in batch]
        if self.kl_cost is not None:
            for number, partner in enumerate(kl_partners_of(batch)):
                length = len(batch[number].prompt_ids) + len(batch[partner].response_ids)
                costs_N[number] += self.kl_cost(min(self.seq_length, length)) - self._shared(batch[number])
        return costs_N

    def saved(self, batch: Sequence[KTOExample]) -> list[float]:
        costs = [self.cost] if self.kl_cost is None else [self.cost, self.kl_cost]
        return [sum(cost(len(each.prompt_ids)) for cost in costs) - self._shared(each) for each in batch]

    def _shared(self, example: KTOExample) -> float:
        return 0.0 if self.shared_cost is None or self.kl_cost is None else self.shared_cost(len(example.prompt_ids))


@dataclass(frozen=True, kw_only=True)
class DPOCosts:
    """Cost of each pair of a global batch, summed over both answers, see :class:`ExampleCosts`."""

    cost: SequenceCost  # of the passes over a sequence
    shared_cost: SequenceCost | None = None  # of the passes in which both answers share their prompt; None if they do not

    @classmethod
    def of(cls, *, cost: SequenceCost, share_prompts: bool, **_: object) -> DPOCosts:
        """Build the costs; with ``share_prompts``, all passes evaluate the two answers together."""
        return cls(cost=cost, shared_cost=cost if share_prompts else None)

    def __call__(self, batch: Sequence[DPOExample]) -> list[float]:
        return [
            self.cost(len(each.prompt_ids) + len(each.chosen_ids))
            + self.cost(len(each.prompt_ids) + len(each.rejected_ids))
            - self._shared(each)
            for each in batch
        ]

    def saved(self, batch: Sequence[DPOExample]) -> list[float]:
        return [2 * self.cost(len(each.prompt_ids)) - self._shared(each) for each in batch]

    def _shared(self, pair: DPOExample) -> float:
        return 0.0 if self.shared_cost is None else self.shared_cost(len(pair.prompt_ids))


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


def by_prompt(
    batch: Sequence[Any], *, ranks: int, costs: ExampleCosts, otherwise: Callable[..., list[list[int]]]
) -> list[list[int]]:
    """Assign the examples of a batch to ranks by their costs, with equal prompts on the same rank as far as that is faster.

    Examples with the same prompt are divided into parts of at most N / ranks examples, of half as many, and so on; of these
    divisions, the one with the lowest cost of the busiest rank is used. Without equal prompts, use ``otherwise``.
    """
    groups: dict[bytes, list[int]] = {}
    for number, key in enumerate(prompt_keys(batch)):
        groups.setdefault(key, []).append(number)
    if ranks == 1 or len(groups) == len(batch):
        return otherwise(batch, ranks=ranks)
    costs_N, saved_N = costs(batch), costs.saved(batch)
    found: list[tuple[float, list[list[int]]]] = []
    most = max(1, len(batch) // ranks)
    while most:
        parts = [group[start : start + most] for group in groups.values() for start in range(0, len(group), most)]
        of_parts = [sum(costs_N[k] for k in part) - (len(part) - 1) * saved_N[part[0]] for part in parts]
        shares = balanced_shares(of_parts, ranks=ranks)
        busiest = max(sum(of_parts[number] for number in share) for share in shares)
        found.append((busiest, [sorted(k for number in share for k in parts[number]) for share in shares]))
        most //= 2
    return min(found, key=lambda each: each[0])[1]


Example = TypeVar("Example")
Batch = TypeVar("Batch")


def build_dataloader(
    *,
    dataset: Dataset[Example],
    sampler: GlobalBatchSampler,
    rank: int,
    size: int,
    collate: Callable[..., Batch],
    shares: Callable[..., list[list[int]]] = every_nth,
    num_workers: int = 0,
) -> DataLoader[Batch]:
    """Build a loader of the collated examples of data-parallel rank ``rank`` of ``size`` in each batch of ``sampler``.

    Every rank reads the whole global batch, because KL examples are formed over all of it; this is cheap, because examples
    are memory-mapped. The start of the next iteration is set on ``loader.batch_sampler`` (see ``GlobalBatchSampler``).

    Args:
        collate: (global batch, kept=indices of this rank) -> batch, such as ``kto_custom_collate`` with its options bound.
        shares: (global batch, ranks=size) -> indices of the examples of each rank.
        num_workers: number of processes that prefetch; it does not change the batches.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank must be at least 0 and below size, got rank {rank} of {size}")
    return DataLoader(
        dataset,  # type: ignore[arg-type]  # torch types a loader by the items of its dataset, not by what it yields
        batch_sampler=sampler,
        collate_fn=partial(_collate_share, collate=collate, shares=shares, rank=rank, size=size),
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        worker_init_fn=_ignore_stop_signals,
        # Without a separate generator, every iteration draws from torch's global generator, and a resumed run (which
        # iterates less often) would get different random numbers than the original run.
        generator=torch.Generator().manual_seed(0),
    )


def _collate_share(
    batch: Sequence[Example], *, collate: Callable[..., Batch], shares: Callable[..., list[list[int]]], rank: int, size: int
) -> Batch:
    return collate(batch, kept=shares(batch, ranks=size)[rank])


def gathered_examples(loader: Any, count: int) -> dict[int, KTOExample | DPOExample]:
    """Return the first ``count`` examples (whole global batches) by their indices, as they are gathered from the ranks."""
    of_ranks, gathered = loader.collate_fn.keywords, dict[int, KTOExample | DPOExample]()
    for batch in loader.batch_sampler:
        if len(gathered) >= count:
            break
        examples = loader.dataset.__getitems__(batch)
        for kept in of_ranks["shares"](examples, ranks=of_ranks["size"]):
            gathered |= {batch[number]: examples[number] for number in kept}
    return gathered


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


Item = TypeVar("Item")


class Prefetching(Iterator[Item], Generic[Item]):
    """Iterator whose next item a thread prepares from :meth:`begin_next` on.

    The items and their order are those of the iterable, and errors are raised where the item would be returned. At the end
    of a ``with`` block no item is being prepared any more.
    """

    def __init__(
        self, *, items: Iterable[Item], waiting: Callable[[], AbstractContextManager[object]], in_thread: bool
    ) -> None:
        """Iterate over ``items``.

        Args:
            waiting: returns a context in which the caller waits for an item.
            in_thread: False to prepare each item when it is asked for.
        """
        self._items, self._waiting, self._in_thread = iter(items), waiting, in_thread
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")  # started by the first call of submit
        self._coming: Future[list[Item]] | None = None

    def begin_next(self) -> None:
        """Begin to prepare the next item."""
        if self._in_thread:
            self._coming = self._coming or self._thread.submit(self._take)

    def _take(self) -> list[Item]:
        return [*islice(self._items, 1)]  # empty at the end

    def __next__(self) -> Item:
        coming, self._coming = self._coming, None
        with self._waiting():
            taken = self._take() if coming is None else coming.result()
        if not taken:
            raise StopIteration
        return taken[0]

    def __enter__(self) -> Prefetching[Item]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._thread.shutdown(cancel_futures=True)
