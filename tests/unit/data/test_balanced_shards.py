"""Data-parallel ranks have equal work, measured by the cost of all passes of an example."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from nemo_kto.data.batches.dataset import DPOExample, KTOExample
from nemo_kto.data.batches.loader import DPOCosts, KTOCosts, balanced_shares


def cost(length: int) -> float:
    return 100.0 * length + length * (length + 1) / 2


def kto_example(prompt: list[int], answer: int) -> KTOExample:
    return KTOExample(prompt_ids=prompt, response_ids=[0] * answer, desirable=True)


def test_the_cost_of_a_kto_example_includes_its_kl_example() -> None:
    """Prompts of 1, 2 and 3 tokens; each KL example has the answer of the next, cut to 7 tokens in all."""
    batch = [kto_example([1], 2), kto_example([1, 2], 4), kto_example([1, 2, 3], 6)]
    samples = [4 * (300 + 6), 4 * (600 + 21), 4 * (900 + 45)]
    costs = KTOCosts(cost=lambda length: 4 * cost(length), kl_cost=lambda length: 2 * cost(length), seq_length=7)
    kl = [2 * (500 + 15), 2 * (700 + 28), 2 * (500 + 15)]
    assert costs(batch) == [a + b for a, b in zip(samples, kl, strict=True)]
    assert KTOCosts(cost=lambda length: 4 * cost(length), kl_cost=None, seq_length=7)(batch) == samples


def test_the_cost_of_a_pair_includes_both_answers() -> None:
    pair = DPOExample(prompt_ids=[1], chosen_ids=[2, 3], rejected_ids=[4], chosen_reward=1.0, rejected_reward=0.0)
    assert DPOCosts(cost=cost)([pair]) == [306 + 203]


@given(costs=st.lists(st.floats(0.1, 100.0), max_size=40), ranks=st.integers(1, 6))
def test_each_example_is_on_one_rank_and_costs_are_balanced(costs: list[float], ranks: int) -> None:
    shares = balanced_shares(costs, ranks=ranks)
    assert sorted(number for share in shares for number in share) == list(range(len(costs)))
    sums = [sum(costs[number] for number in share) for share in shares]
    assert max(sums) - min(sums) <= max(costs, default=0.0) + 1e-9, "always the rank with the least work"


def test_costs_of_ranks_differ_by_less_than_one_percent() -> None:
    draw = random.Random(0)
    costs = [cost(min(512, max(8, int(draw.lognormvariate(5.0, 0.7))))) for _ in range(64)]
    sums = [sum(costs[number] for number in share) for share in balanced_shares(costs, ranks=8)]
    assert max(sums) / (sum(sums) / 8) < 1.02
