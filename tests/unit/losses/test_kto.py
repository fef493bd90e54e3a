"""KTO, APO-zero and BCO against closed forms and manual values, and the reference point z0."""

from __future__ import annotations

import doctest
import math
from functools import partial
from typing import Any

import pytest
import torch

from nemo_kto.losses import kto
from nemo_kto.losses.kto import (
    LOSSES,
    apo_zero_unpaired_losses,
    bco_losses,
    kl_reference_point,
    kl_sums,
    kto_losses,
    reward_sums,
)
from nemo_kto.losses.loss import Loss
from nemo_kto.losses.sequence import sequence_sums

WEIGHTS = {"desirable_weight": 1.3, "undesirable_weight": 0.7}
ONES: dict[str, Any] = {"desirable_weight": 1.0, "undesirable_weight": 1.0}


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def losses_by_name(name: str, *, anchor: torch.Tensor | None = None, **options: Any) -> Any:
    loss, anchor = LOSSES[name], torch.tensor(0.0) if anchor is None else anchor
    given = {} if loss.anchor is None else {loss.anchor: anchor}
    return partial(loss.function, **{"beta": 0.1, **WEIGHTS, **given, **options})


def test_docstring_examples() -> None:
    result = doctest.testmod(kto)
    assert result.failed == 0
    assert result.attempted > 0


def test_the_name_table() -> None:
    assert {
        "kto": Loss(function=kto_losses),
        "apo_zero_unpaired": Loss(function=apo_zero_unpaired_losses),
        "bco": Loss(function=bco_losses),
    } == LOSSES
    assert [loss.options for loss in LOSSES.values()] == [{}, {}, {}]
    assert [loss.anchor for loss in LOSSES.values()] == ["z0", None, "delta"]


def test_kto_equals_its_closed_form() -> None:
    ratios, desirable, z0, beta = [2.0, -3.0, 0.5, -1.0], [1, 1, 0, 0], 0.8, 0.3
    expected = [
        1.3 * (1 - sigmoid(beta * (2.0 - z0))),
        1.3 * (1 - sigmoid(beta * (-3.0 - z0))),
        0.7 * (1 - sigmoid(beta * (z0 - 0.5))),
        0.7 * (1 - sigmoid(beta * (z0 + 1.0))),
    ]
    losses = kto_losses(torch.tensor(ratios), torch.tensor(desirable), z0=torch.tensor(z0), beta=beta, **WEIGHTS)
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-6, atol=0)


def test_apo_zero_equals_its_closed_form() -> None:
    ratios, desirable, beta = [2.0, -3.0, 0.5, -1.0], [1, 1, 0, 0], 0.3
    expected = [
        1.3 * (1 - sigmoid(beta * 2.0)),
        1.3 * (1 - sigmoid(beta * -3.0)),
        0.7 * sigmoid(beta * 0.5),
        0.7 * sigmoid(beta * -1.0),
    ]
    losses = apo_zero_unpaired_losses(torch.tensor(ratios), torch.tensor(desirable), beta=beta, **WEIGHTS)
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-6, atol=0)


def test_bco_equals_its_closed_form() -> None:
    ratios, desirable, delta, beta = [2.0, -3.0, 0.5, -1.0], [1, 1, 0, 0], 0.4, 0.3
    expected = [
        -1.3 * math.log(sigmoid(beta * 2.0 - delta)),
        -1.3 * math.log(sigmoid(beta * -3.0 - delta)),
        -0.7 * math.log(sigmoid(-(beta * 0.5 - delta))),
        -0.7 * math.log(sigmoid(-(beta * -1.0 - delta))),
    ]
    losses = bco_losses(torch.tensor(ratios), torch.tensor(desirable), delta=torch.tensor(delta), beta=beta, **WEIGHTS)
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_at_policy_equal_to_reference(name: str) -> None:
    desirable, constant = torch.tensor([1, 0, 0, 1, 0]), math.log(2) if name == "bco" else 0.5
    losses = losses_by_name(name)(torch.zeros(5), desirable)
    assert losses.mean().item() == pytest.approx(constant * (2 * 1.3 + 3 * 0.7) / 5, abs=1e-6)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("label", [0, 1])
def test_one_class_only(name: str, label: int) -> None:
    ratios = torch.tensor([1.0, -2.0, 0.0])
    losses = losses_by_name(name)
    alone, among_others = losses(ratios, torch.full((3,), label)), losses(ratios.repeat(2), torch.tensor([1] * 3 + [0] * 3))
    assert torch.equal(alone, among_others[:3] if label else among_others[3:])
    assert losses(ratios[:0], torch.zeros(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("name", LOSSES)
def test_a_better_answer_lowers_the_loss(name: str) -> None:
    ratios = torch.linspace(-5, 5, 11)
    desirable, undesirable = torch.ones(11), torch.zeros(11)
    assert (losses_by_name(name)(ratios, desirable).diff() < 0).all()
    assert (losses_by_name(name)(ratios, undesirable).diff() > 0).all()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("size", [1e3, 1e30])
def test_extreme_inputs_stay_finite(name: str, size: float) -> None:
    ratios = torch.tensor([size, -size, size, -size], requires_grad=True)
    losses = losses_by_name(name, anchor=torch.tensor(size), **ONES)(ratios, torch.tensor([1, 1, 0, 0]))
    losses.sum().backward()
    assert ratios.grad is not None
    assert losses.isfinite().all()
    assert ratios.grad.isfinite().all()
    assert (losses >= 0).all()
    assert (losses <= (2 * size if name == "bco" else 1)).all()


def test_a_small_loss_is_accurate() -> None:
    """1 - sigmoid(x) in fp32 is 0 from x = 17 on, and 6 % wrong at 14."""
    losses = losses_by_name("kto", beta=1.0, **ONES)(torch.tensor([14.0, 30.0]), torch.tensor([1, 1]))
    torch.testing.assert_close(losses, torch.tensor([sigmoid(-14.0), sigmoid(-30.0)]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_in_float64(name: str) -> None:
    torch.manual_seed(0)
    logps_T = torch.randn(12, dtype=torch.float64, requires_grad=True)
    sequence_T, desirable = torch.arange(12) // 3, torch.tensor([1, 0, 1, 0])

    def from_tokens(logps: torch.Tensor) -> torch.Tensor:
        ratios = sequence_sums(logps, sequence_T, 4, average=False) + 0.3
        return losses_by_name(name, anchor=torch.tensor(0.4, dtype=torch.float64))(ratios, desirable)

    assert torch.autograd.gradcheck(from_tokens, (logps_T,))


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_equals_the_closed_form(name: str) -> None:
    ratios = torch.tensor([0.5, 0.5], requires_grad=True)
    losses_by_name(name, beta=2.0)(ratios, torch.tensor([1, 0])).sum().backward()
    good, bad = (sigmoid(-1.0), sigmoid(1.0)) if name == "bco" else [sigmoid(1.0) * (1 - sigmoid(1.0))] * 2
    torch.testing.assert_close(ratios.grad, torch.tensor([-1.3 * 2.0 * good, 0.7 * 2.0 * bad]), rtol=1e-5, atol=0)


def test_no_gradient_through_z0() -> None:
    kl_ratios = torch.tensor([1.0, 2.0], requires_grad=True)
    z0 = kl_reference_point(kl_ratios.sum(), torch.tensor(2))
    assert z0.item() == 1.5
    assert not z0.requires_grad

    ratios, anchor = torch.zeros(2, requires_grad=True), torch.tensor(1.5, requires_grad=True)
    kto_losses(ratios, torch.tensor([1, 0]), z0=anchor, beta=0.1, **ONES).sum().backward()
    assert anchor.grad is None
    assert ratios.grad is not None


def test_no_gradient_through_delta() -> None:
    ratios, delta = torch.zeros(2, requires_grad=True), torch.tensor(1.5, requires_grad=True)
    bco_losses(ratios, torch.tensor([1, 0]), delta=delta, beta=0.1, **ONES).sum().backward()
    assert delta.grad is None
    assert ratios.grad is not None


def test_reward_sums_exclude_invalid_rows_and_are_accurate() -> None:
    ratios = torch.tensor([2.0**24, float("nan"), 1.0, 1.0])  # in fp32 2**24 + 1 is 2**24
    sums = reward_sums(ratios, torch.tensor([True, False, True, True]), beta=0.5)
    assert (sums["reward_sum"].item(), sums["reward_rows"].item()) == (2**23 + 1, 3)


def test_z0_is_clamped_once_after_the_sum() -> None:
    parts = [torch.tensor([-5.0, -3.0]), torch.tensor([4.0]), torch.tensor([1.0, 2.0, 7.0])]  # micro-batches, or ranks
    sums = [kl_sums(part, torch.ones(len(part), dtype=torch.bool)) for part in parts]
    total, count = (torch.stack([s[name] for s in sums]).sum() for name in ("kl_sum", "kl_rows"))
    assert kl_reference_point(total, count).item() == 1.0  # 6 / 6; clamped parts would give (0 + 4 + 10 / 3) / 3
    assert kl_reference_point(-total, count).item() == 0.0


def test_z0_without_rows_is_zero() -> None:
    sums = kl_sums(torch.tensor([float("nan"), 3.0]), torch.tensor([False, False]))
    assert kl_reference_point(sums["kl_sum"], sums["kl_rows"]).item() == 0.0


def test_a_broken_row_is_not_hidden() -> None:
    sums = kl_sums(torch.tensor([float("nan"), 3.0]), torch.tensor([True, True]))
    assert kl_reference_point(sums["kl_sum"], sums["kl_rows"]).isnan()


def test_kl_sums_exclude_invalid_rows() -> None:
    sums = kl_sums(torch.tensor([1.0, float("nan"), 2.0, 100.0]), torch.tensor([True, False, True, False]))
    assert (sums["kl_sum"].item(), sums["kl_rows"].item()) == (3.0, 2)
