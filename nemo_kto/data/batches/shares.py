"""Which data-parallel rank gets which examples of a global batch, where the work is to be equal.

Shape suffixes: N examples of a global batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nemo_kto.data.batches.collate import kl_partners_of
from nemo_kto.data.batches.examples import DPOExample, KTOExample

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
