"""Data-parallel ranks have equal work, measured by the cost of all passes of an example."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nemo_kto.data.batches.dataset import DPOExample, KTOExample
from nemo_kto.data.batches.loader import DPOCosts, KTOCosts, balanced_shares, by_prompt, every_nth


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


def test_costs_with_shared_prompts() -> None:
    """Sample and KL example share their prompt in the passes of the reference, the answers of a pair in all passes."""
    batch = [kto_example([1], 2), kto_example([1, 2], 4)]
    settings: dict[str, Any] = {"cost": lambda length: 4 * cost(length), "kl_cost": lambda length: 2 * cost(length)}
    plain = KTOCosts(**settings, seq_length=9)(batch)
    costs = KTOCosts(**settings, shared_cost=cost, seq_length=9)
    assert costs(batch) == [plain[0] - cost(1), plain[1] - cost(2)]
    assert costs.saved(batch) == [5 * cost(1), 5 * cost(2)]
    assert KTOCosts(cost=cost, kl_cost=None, shared_cost=cost, seq_length=9).saved(batch) == [cost(1), cost(2)]
    pair = DPOExample(prompt_ids=[1], chosen_ids=[2, 3], rejected_ids=[4], chosen_reward=1.0, rejected_reward=0.0)
    assert DPOCosts(cost=cost, shared_cost=cost)([pair]) == [306 + 203 - 101]
    assert DPOCosts(cost=cost, shared_cost=cost).saved([pair]) == [101]


COSTS = KTOCosts(cost=cost, kl_cost=None, seq_length=99)


def test_equal_prompts_are_divided_if_one_rank_would_be_late() -> None:
    batch = [kto_example([1] * 2, 30)] * 6 + [kto_example([2] * 2, 30)] * 2
    shares = by_prompt(batch, ranks=4, costs=COSTS, otherwise=every_nth)
    assert [len(share) for share in shares] == [2, 2, 2, 2]
    assert sorted(number for share in shares for number in share) == list(range(8))
