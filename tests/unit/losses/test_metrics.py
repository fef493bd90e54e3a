"""Metrics of a global batch are exact under any split and omit absent classes; the AUC is that of its definition."""

from __future__ import annotations

import doctest
import math
from collections.abc import Mapping
from itertools import product

import pytest
import torch

from nemo_kto.losses import metrics as metrics_module
from nemo_kto.losses.kto import kl_sums, kto_losses, kto_metric_sums, kto_metrics
from nemo_kto.losses.metrics import Metrics, Rewards, metrics_by_set, roc_auc, without_rounding_errors

BETA = 0.5


def sums_of(
    ratios: torch.Tensor, logps: torch.Tensor, desirable: torch.Tensor, valid: torch.Tensor, *, kl: bool = True
) -> dict[str, float]:
    losses = kto_losses(ratios, desirable, z0=torch.tensor(0.2), beta=BETA, desirable_weight=1.0, undesirable_weight=2.0)
    sums = kto_metric_sums(
        weighted_preference_losses_N=losses,
        weighted_sft_losses_N=-0.1 * logps,
        sft_scale=valid.sum() / (valid & desirable.bool()).sum().clamp(min=1),
        preference_losses_N=losses,
        sft_losses_N=-logps,
        log_ratios_N=ratios,
        logps_N=logps,
        desirable_N=desirable,
        valid_N=valid,
        beta=BETA,
    )
    if kl:
        sums |= kl_sums(ratios * 3 - 1, valid)
    return {name: value.item() for name, value in sums.items()}


@pytest.fixture
def batch() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    valid = torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 1]).bool()
    return torch.randn(9), -torch.rand(9) * 50, torch.tensor([1, 0, 0, 1, 1, 0, 1, 0, 0]), valid


def test_docstring_examples() -> None:
    result = doctest.testmod(metrics_module)
    assert result.failed == 0
    assert result.attempted > 0


def test_every_metric_against_manual_values() -> None:
    ratios, logps = torch.tensor([2.0, 4.0, -1.0, 9.0]), torch.tensor([-10.0, -30.0, -5.0, -7.0])
    desirable, valid = torch.tensor([1, 1, 0, 0]), torch.tensor([True, True, True, False])
    sums = kto_metric_sums(
        weighted_preference_losses_N=torch.tensor([0.25, 0.5, 0.75, 100.0]),
        weighted_sft_losses_N=torch.tensor([2.0, 6.0, 32.0, 64.0]),
        sft_scale=1.5,
        preference_losses_N=torch.tensor([0.5, 0.75, 1.0, 50.0]),
        sft_losses_N=torch.tensor([4.0, 8.0, 16.0, 32.0]),
        log_ratios_N=ratios,
        logps_N=logps,
        desirable_N=desirable,
        valid_N=valid,
        beta=BETA,
    )
    sums |= kl_sums(torch.tensor([1.0, 3.0, -1.0, 50.0]), valid)
    assert sums["loss_sum"].item() == 1.5 + 1.5 * 8.0
    got = kto_metrics({name: value.item() for name, value in sums.items()})
    assert got == pytest.approx(
        {
            "loss": 4.5,
            "preference_loss": 0.75,
            "sft_loss": 6.0,
            "kl": 1.0,
            "kl_unclamped": 1.0,
            "rewards_chosen_mean": 1.5,
            "rewards_rejected_mean": -0.5,
            "rewards_margin": 2.0,
            "rewards_all_mean": 2.5 / 3,
            "rewards_all_std": torch.tensor([1.0, 2.0, -0.5]).std().item(),
            "logps_chosen_mean": -20.0,
            "logps_rejected_mean": -5.0,
            "rows": 3,
            "invalid_rows": 1,
        }
    )


@pytest.mark.parametrize("split", [[9], [1] * 9, [2, 7], [4, 4, 1], [0, 9], [3, 0, 6]])
def test_any_split_gives_the_same_metrics(batch: tuple[torch.Tensor, ...], split: list[int]) -> None:
    whole = Metrics(sums_of(*batch), kto_metrics)
    parts = [Metrics(sums_of(*part), kto_metrics) for part in zip(*(values.split(split) for values in batch), strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert total == pytest.approx(whole, rel=1e-6)
    assert total["rows"] == 7
    assert total["invalid_rows"] == 2


def test_values_of_invalid_rows_are_ignored(batch: tuple[torch.Tensor, ...]) -> None:
    ratios, logps, desirable, valid = batch
    subset = sums_of(*(values[valid] for values in batch))
    spoilt = torch.where(valid, ratios, float("nan")), torch.where(valid, logps, float("inf")), desirable, valid
    assert sums_of(*spoilt) == pytest.approx(subset | {"invalid_rows": 2}, rel=1e-6)


def test_invalid_rows_get_no_gradient() -> None:
    ratios = torch.zeros(3, requires_grad=True)
    losses = kto_losses(
        ratios, torch.tensor([1, 0, 1]), z0=torch.tensor(0.0), beta=BETA, desirable_weight=1.0, undesirable_weight=1.0
    )
    valid = torch.tensor([True, True, False])
    rows = dict.fromkeys(("preference_losses_N", "sft_losses_N", "log_ratios_N", "logps_N"), ratios)
    rows |= {"weighted_preference_losses_N": losses, "weighted_sft_losses_N": 0.0 * ratios}
    desirable = torch.tensor([1, 0, 1])
    sums = kto_metric_sums(**rows, sft_scale=2.0, desirable_N=desirable, valid_N=valid, beta=BETA)
    sums["loss_sum"].backward()
    torch.testing.assert_close(ratios.grad, torch.tensor([-0.125, 0.125, 0.0]))
    assert [name for name, value in sums.items() if value.requires_grad] == ["loss_sum"]


def test_sums_of_many_rows_are_accurate() -> None:
    rows, valid = torch.tensor([2.0**24, 1.0, 1.0]), torch.ones(3, dtype=torch.bool)  # in fp32 2**24 + 1 is 2**24
    sums = sums_of(rows, rows, torch.ones(3), valid) | {"kl_sum": kl_sums(rows, valid)["kl_sum"].item()}
    assert sums["kl_sum"] == sums["logps_chosen_sum"] == 2**24 + 2
    assert sums["rewards_chosen_sum"] == BETA * (2**24 + 2)


@pytest.mark.parametrize(("label", "present", "absent"), [(1, "chosen", "rejected"), (0, "rejected", "chosen")])
def test_an_absent_class_is_not_logged(label: int, present: str, absent: str) -> None:
    rows = torch.tensor([1.0, 2.0])
    got = kto_metrics(sums_of(rows, rows, torch.full((2,), label), torch.ones(2, dtype=torch.bool)))
    assert got[f"rewards_{present}_mean"] == pytest.approx(BETA * 1.5)
    assert got["rewards_all_mean"] == pytest.approx(BETA * 1.5)
    assert {f"rewards_{absent}_mean", f"logps_{absent}_mean", "rewards_margin"}.isdisjoint(got)


def test_statistics_of_one_row_and_of_none() -> None:
    one, true = torch.tensor([1.0]), torch.tensor([True])
    assert "rewards_all_std" not in kto_metrics(sums_of(one, one, one, true))
    nothing = kto_metrics(sums_of(one, one, one, ~true))
    assert nothing == {"loss": 0.0, "kl": 0.0, "kl_unclamped": 0.0, "rows": 0, "invalid_rows": 1}


def test_the_kl_estimate_is_clamped_once_over_all_examples_and_logged_unclamped_too() -> None:
    four = torch.ones(4, dtype=torch.bool)
    below, above = (
        Metrics(sums_of(values, values, four.long(), four, kl=False) | sums, kto_metrics)
        for values, sums in ((torch.ones(4), {"kl_sum": -6.0, "kl_rows": 4}), (torch.ones(4), {"kl_sum": 2.0, "kl_rows": 4}))
    )
    assert (below["kl"], below["kl_unclamped"]) == (0.0, -1.5)
    assert (above["kl"], above["kl_unclamped"]) == (0.5, 0.5)
    assert ((below + above)["kl"], (below + above)["kl_unclamped"]) == (0.0, -0.5), "not the mean of 0 and 0.5"


def test_delta_is_logged_as_the_mean_of_several_batches(batch: tuple[torch.Tensor, ...]) -> None:
    assert "delta" not in kto_metrics(sums_of(*batch, kl=False))
    one, other = (Metrics(sums_of(*batch, kl=False) | {"delta_sum": d, "delta_batches": 1}, kto_metrics) for d in (0.1, 0.4))
    assert one["delta"] == 0.1
    assert (one + other)["delta"] == 0.25


def test_the_deviation_of_equal_rewards_is_not_nan(batch: tuple[torch.Tensor, ...]) -> None:
    rounded_down = {"rows": 3, "rewards_chosen_sum": 3.0, "rewards_rejected_sum": 0.0, "rewards_square_sum": 3.0 - 1e-12}
    assert kto_metrics(sums_of(*batch) | rounded_down)["rewards_all_std"] == 0.0


def test_the_deviation_of_close_rewards_far_from_zero_is_accurate() -> None:
    torch.manual_seed(0)
    rows = 1000 + 0.01 * torch.randn(64)
    got = kto_metrics(sums_of(rows, rows, torch.ones(64), torch.ones(64, dtype=torch.bool)))
    assert got["rewards_all_std"] == pytest.approx((BETA * rows.double()).std().item(), rel=1e-3)


def mean_loss(sums: Mapping[str, float]) -> dict[str, float]:
    return {"loss": sums["loss_sum"] / sums["rows"]}


def test_adding_weighs_rows_not_batches() -> None:
    a, b = Metrics({"loss_sum": 4.0, "rows": 1}, mean_loss), Metrics({"loss_sum": 2.0, "rows": 3}, mean_loss)
    assert (a + b) == {"loss": 1.5}
    assert (a + b).sums == {"loss_sum": 6.0, "rows": 4}
    assert a == {"loss": 4.0}
    with pytest.raises(TypeError):
        a + {"loss": 1.0}  # type: ignore[operator]


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


def metrics_of(chosen: list[float], rejected: list[float], *, paired: bool = False) -> Metrics:
    def derive(sums: object) -> dict[str, float]:
        return {"loss": 0.0}

    chosen_N, rejected_N = (torch.tensor(values, dtype=torch.float64) for values in (chosen, rejected))
    return Metrics({"rows": 1}, derive, {"": Rewards(chosen_N=chosen_N, rejected_N=rejected_N, paired=paired)})


def test_batches_are_joined_before_the_auc() -> None:
    """The AUC of both batches is 1, of all their examples less."""
    one, two = metrics_of([1.0], [0.0]), metrics_of([3.0, 4.0], [2.0])
    assert one["auc"] == two["auc"] == 1.0
    assert (one + two)["auc"] == Metrics.total([two, one])["auc"] == 5 / 6
    assert "auc" not in metrics_of([1.0, 2.0], [])
    assert (metrics_of([1.0], []) + metrics_of([], [2.0]))["auc"] == 0.0
    assert "auc" not in metrics_of([1.0], [0.0], paired=True), "pairs have acc"


def test_log_ratios_within_rounding_errors_are_ties() -> None:
    """A few units in the last place of a log-prob are nothing; larger log-ratios stay as they are."""
    logps_N = torch.tensor([-150.0, -150.0, -150.0, -3.0, -1500.0])
    log_ratios_N = torch.tensor([3e-5, -1e-4, 1e-3, -1e-5, 1e-3])
    assert without_rounding_errors(log_ratios_N, logps_N).tolist() == pytest.approx([0.0, 0.0, 1e-3, -1e-5, 0.0])
    assert without_rounding_errors(logps_N, logps_N).tolist() == logps_N.tolist(), "of a loss without a reference"
    broken_N = torch.tensor([math.nan, -math.inf, 0.0])
    torch.testing.assert_close(without_rounding_errors(broken_N, broken_N), broken_N, equal_nan=True, rtol=0, atol=0)


def test_validation_sets_have_separate_aucs() -> None:
    parts = [("a", metrics_of([1.0], [0.0])), ("b", metrics_of([1.0], [2.0])), ("a", metrics_of([3.0, 4.0], [2.0]))]
    metrics = metrics_by_set(parts)
    assert metrics == {"a_loss": 0.0, "a_auc": 5 / 6, "b_loss": 0.0, "b_auc": 0.0}
    assert metrics.rewards["a"].by_class["desirable"].tolist() == [1.0, 3.0, 4.0]
    assert metrics_by_set([("", metrics_of([1.0], [0.0]))]) == {"loss": 0.0, "auc": 1.0}
