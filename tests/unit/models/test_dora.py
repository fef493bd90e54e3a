"""DoRA: row norms of a weight with its adapter, and the effect of magnitudes."""

from __future__ import annotations

import pytest
import torch

from nemo_kto.models.lora import lora_layers
from nemo_kto.models.lora.lora_layers import Change, RowNorms, row_norms

OUT, IN, RANK, SCALE = 7, 24, 3, 1.5


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("left", [1.0, 1e-2], ids=["usual", "the adapter nearly cancels the weight"])
@pytest.mark.parametrize("rows", [256, 3], ids=["at once", "some rows at a time"])
def test_norms_equal_those_of_the_sum(rows: int, left: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_layers, "_ROWS", rows)
    full_b, lora_a = draw(OUT, RANK, seed=1), draw(RANK, IN, seed=2)
    weight = left * draw(OUT, IN, seed=3) - (1 - left) * SCALE * full_b @ lora_a
    expected = (weight.double() + SCALE * full_b.double() @ lora_a.double()).norm(dim=1)
    norms = row_norms(weight, full_b, lora_a, SCALE)
    torch.testing.assert_close(norms.base.double(), weight.double().norm(dim=1), rtol=1e-6, atol=0)
    # a sum that is left over has the rounding of what was summed
    torch.testing.assert_close(norms.adapted.double(), expected, rtol=1e-6 / left, atol=0)


def test_norms_are_computed_in_fp32() -> None:
    weight, full_b, lora_a = (draw(*shape, seed=4).bfloat16() for shape in ((OUT, IN), (OUT, RANK), (RANK, IN)))
    expected = (weight.float() + SCALE * full_b.float() @ lora_a.float()).norm(dim=1)
    torch.testing.assert_close(row_norms(weight, full_b, lora_a, SCALE).adapted, expected, rtol=1e-6, atol=0)


def test_the_effect_of_a_magnitude() -> None:
    """m / ||W + s B A|| - 1; nothing of rows without a magnitude, and of rows of zeros, whose gradient is zero too."""
    norms = RowNorms(torch.tensor([4.0, 4.0, 4.0, 0.0]), torch.tensor([5.0, 4.0, 5.0, 0.0]))
    moved = torch.tensor([2.0, 0.0, 2.0, 1.0], requires_grad=True)
    change = Change.of(norms, torch.tensor([True, True, False, True])).at(moved)
    torch.testing.assert_close(change.detach(), torch.tensor([(4 + 2) / 5 - 1, 0.0, 0.0, 0.0]))
    change.sum().backward()
    assert moved.grad is not None
    torch.testing.assert_close(moved.grad, torch.tensor([1 / 5, 1 / 4, 0.0, 0.0]))


def test_bf16_keeps_small_updates() -> None:
    """Changes below 0.4 % of a magnitude in bf16 would be rounded away."""
    norms = RowNorms(torch.tensor([3.0]), torch.tensor([3.0]))
    change = Change.of(norms, torch.tensor([True])).at(torch.tensor([3e-4], dtype=torch.bfloat16))
    torch.testing.assert_close(change, torch.tensor([1e-4]), rtol=2**-8, atol=0)
    assert torch.tensor([3.0]).bfloat16() + torch.tensor([3e-4]).bfloat16() == 3.0
