"""AOT: the sum over any parts of the sorted pairs equals the sorted loss and its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nemo_kto.losses.loss import Loss
from nemo_kto.losses.preference import LOSSES, aot_losses, rank_partners
from tests.helpers.messages import raises

BETA, SMOOTHING, PAIRS = 0.3, 0.2, 7


def sorted_loss(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """As the paper has it: the sum over ranks."""
    logits = BETA * (first.sort().values - second.sort().values)
    return (-(1 - SMOOTHING) * F.logsigmoid(logits) - SMOOTHING * F.logsigmoid(-logits)).sum()


def values() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    first, second = (3 * torch.randn(PAIRS, dtype=torch.float64) for _ in range(2))
    return first.requires_grad_(), second.requires_grad_()


@pytest.mark.parametrize("split", [[7], [3, 4], [1] * 7], ids=str)
def test_parts_sum_to_the_sorted_loss_and_gradient(split: list[int]) -> None:
    first, second = values()
    given = zip(*(each.split(split) for each in (first, second, *rank_partners(first, second))), strict=True)
    options: dict[str, Any] = {"beta": BETA, "label_smoothing": SMOOTHING}
    parts = [aot_losses(a, b, first_partners_P=of_a, second_partners_P=of_b, **options) for a, b, of_a, of_b in given]
    ours, expected = torch.cat(parts).sum(), sorted_loss(first, second)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(loss, (first, second)) for loss in (ours, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)


def test_partners_have_the_same_rank() -> None:
    first, second = torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.tensor([9.0, 7.0, 8.0, 6.0])
    of_first, of_second = rank_partners(first, second)
    assert of_first.tolist() == [8.0, 6.0, 9.0, 7.0]
    assert of_second.tolist() == [2.0, 0.0, 0.5, -1.0]
    assert [each.shape for each in rank_partners(first[:0], second[:0])] == [(0,), (0,)]


def test_one_pair_is_dpo() -> None:
    """Its margins meet each other: beta (m - n) is beta h."""
    chosen, rejected, reference = torch.tensor([-3.0]), torch.tensor([-5.0]), torch.tensor([0.5])
    of_first, of_second = rank_partners(chosen - rejected, reference)
    ours = aot_losses(chosen - rejected, reference, beta=BETA, first_partners_P=of_first, second_partners_P=of_second)
    torch.testing.assert_close(ours, LOSSES["dpo"].function(chosen - reference, rejected, beta=BETA))


def test_a_sorting_loss_needs_a_reference() -> None:
    assert {name: loss.sorts for name, loss in LOSSES.items() if loss.sorts} == {"aot": "margins", "aot_unpaired": "answers"}
    assert all(LOSSES[name].looks_ahead == (name in ("aot", "aot_unpaired")) for name in LOSSES)
    with raises(ValueError, "log-ratios", "reference"):
        Loss(function=aot_losses, sorts="answers", needs_reference=False)
