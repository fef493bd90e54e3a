"""The AUC is that of its definition, in any order and any division into batches."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from nemo_kto.losses.metrics import Metrics, Rewards, metrics_by_set, roc_auc, without_rounding_errors


def auc_by_definition(rewards: torch.Tensor, desirable: torch.Tensor) -> float:
    """The share of all pairs of a desirable and an undesirable example that are in order; a tie is half a pair."""
    pairs = [*product(rewards[desirable].tolist(), rewards[~desirable].tolist())]
    return sum(1.0 if good > bad else 0.5 if good == bad else 0.0 for good, bad in pairs) / len(pairs)


@pytest.mark.parametrize("seed", range(40))
def test_the_auc_equals_its_definition(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    count = int(torch.randint(2, 60, (), generator=draw))
    desirable = torch.rand(count, generator=draw) < 0.4
    desirable[:2] = torch.tensor([True, False])
    rewards = torch.randn(count, generator=draw, dtype=torch.float64)
    if seed % 2:
        rewards = (2 * rewards).round()  # many ties
    auc = roc_auc(rewards, desirable)
    assert auc == auc_by_definition(rewards, desirable)
    order = torch.randperm(count, generator=draw)
    assert roc_auc(rewards[order], desirable[order]) == auc
    reverse = roc_auc(-rewards, desirable)
    assert (auc or 0.0) + (reverse or 0.0) == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize(
    ("rewards", "desirable", "auc"),
    [
        ([3.0, 1.0, 2.0], [True, False, True], 1.0),
        ([1.0, 3.0], [True, False], 0.0),
        ([0.0] * 5, [True, False, False, True, True], 0.5),  # policy and reference are equal
        ([float("inf"), 1.0, -float("inf")], [True, False, False], 1.0),
        ([1.0, 2.0], [True, True], None),
        ([1.0, 2.0], [False, False], None),
        ([1.0, float("nan")], [True, False], None),
        ([], [], None),
    ],
)
def test_known_values(rewards: list[float], desirable: list[bool], auc: float | None) -> None:
    assert roc_auc(torch.tensor(rewards), torch.tensor(desirable, dtype=torch.bool)) == auc


def test_a_million_examples() -> None:
    rewards = torch.arange(1_000_000, dtype=torch.float64)
    desirable = rewards % 2 == 1
    assert roc_auc(rewards, desirable) == (500_000 * 500_001 / 2) / 500_000**2


def batch(chosen: list[float], rejected: list[float], *, paired: bool = False) -> Metrics:
    def derive(sums: object) -> dict[str, float]:
        return {"loss": 0.0}

    chosen_N, rejected_N = (torch.tensor(values, dtype=torch.float64) for values in (chosen, rejected))
    return Metrics({"rows": 1}, derive, {"": Rewards(chosen_N=chosen_N, rejected_N=rejected_N, paired=paired)})


def test_batches_are_joined_before_the_auc() -> None:
    """The AUC of both batches is 1, of all their examples less."""
    one, two = batch([1.0], [0.0]), batch([3.0, 4.0], [2.0])
    assert one["auc"] == two["auc"] == 1.0
    assert (one + two)["auc"] == Metrics.total([two, one])["auc"] == 5 / 6
    assert "auc" not in batch([1.0, 2.0], [])
    assert (batch([1.0], []) + batch([], [2.0]))["auc"] == 0.0
    assert "auc" not in batch([1.0], [0.0], paired=True), "pairs have acc"


def test_log_ratios_within_rounding_errors_are_ties() -> None:
    """A few units in the last place of a log-prob are nothing; larger log-ratios stay as they are."""
    logps_N = torch.tensor([-150.0, -150.0, -150.0, -3.0, -1500.0])
    log_ratios_N = torch.tensor([3e-5, -1e-4, 1e-3, -1e-5, 1e-3])
    assert without_rounding_errors(log_ratios_N, logps_N).tolist() == pytest.approx([0.0, 0.0, 1e-3, -1e-5, 0.0])
    assert without_rounding_errors(logps_N, logps_N).tolist() == logps_N.tolist(), "of a loss without a reference"
    broken_N = torch.tensor([math.nan, -math.inf, 0.0])
    torch.testing.assert_close(without_rounding_errors(broken_N, broken_N), broken_N, equal_nan=True, rtol=0, atol=0)


def test_validation_sets_have_separate_aucs() -> None:
    parts = [("a", batch([1.0], [0.0])), ("b", batch([1.0], [2.0])), ("a", batch([3.0, 4.0], [2.0]))]
    metrics = metrics_by_set(parts)
    assert metrics == {"a_loss": 0.0, "a_auc": 5 / 6, "b_loss": 0.0, "b_auc": 0.0}
    assert metrics.rewards["a"].by_class["desirable"].tolist() == [1.0, 3.0, 4.0]
    assert metrics_by_set([("", batch([1.0], [0.0]))]) == {"loss": 0.0, "auc": 1.0}
