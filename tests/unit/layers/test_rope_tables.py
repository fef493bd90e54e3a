"""RoPE and attention temperature scaling: formulas, packed sequences, and context-parallel ranks.

That the temperature is transformers' is seen in the logits of Llama 4 (tests/parity/test_huggingface.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from nemo_kto.architecture.rope import read_rope
from nemo_kto.layers.layer_settings import Rope, Temperature
from nemo_kto.layers.packing import local_token_indices
from nemo_kto.layers.rope_tables import RopeTable, TemperatureTable


def of_theta(theta: float, head_dim: int = 8) -> Rope:
    return read_rope({"rope_theta": theta, "hidden_size": head_dim, "num_attention_heads": 1})


@pytest.mark.parametrize("in_table", [False, True])
def test_the_attention_factor_is_in_the_table_or_in_the_scale(in_table: bool) -> None:
    rope, heads_sbhd = of_theta(1e4), torch.randn(4, 1, 2, 12, requires_grad=True)  # of 12 channels 4 are not rotated
    scaled = replace(rope, attention_factor=1.5, factor_in_table=in_table)
    assert scaled.softmax_scale(16) == (None if in_table else 1.5 * 1.5 / 4)
    assert scaled.softmax_scale(16, 25) == (1 / 5 if in_table else 1.5 * 1.5 / 5)
    plain, found = RopeTable(rope=rope).rotate(heads_sbhd), RopeTable(rope=scaled).rotate(heads_sbhd)
    factor = torch.tensor([1.5 if in_table else 1.0] * 8 + [1.0] * 4)
    torch.testing.assert_close(found, plain * factor)
    (grad,) = torch.autograd.grad(found, heads_sbhd, torch.ones_like(found))
    (plain_grad,) = torch.autograd.grad(plain, heads_sbhd, torch.ones_like(plain))
    torch.testing.assert_close(grad, plain_grad * factor)


def rotated_by_transformers(heads_sbhd: torch.Tensor) -> torch.Tensor:
    config = LlamaConfig(
        hidden_size=24, num_attention_heads=3, head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    heads_bhsd = heads_sbhd.permute(1, 2, 0, 3)
    cos, sin = LlamaRotaryEmbedding(config)(heads_bhsd, torch.arange(len(heads_sbhd))[None])
    return apply_rotary_pos_emb(heads_bhsd, heads_bhsd, cos, sin)[0].permute(2, 0, 1, 3)


def test_rotation_equals_transformers_forward_and_backward() -> None:
    torch.manual_seed(0)
    table = RopeTable(rope=of_theta(1e4))
    for length in (5, 9, 7):  # the table grows, and is used for shorter sequences
        wide = torch.randn(length, 2, 3, 12, requires_grad=True)
        heads_sbhd, grad = wide[..., 2:10], torch.randn(length, 2, 3, 8)  # keys are a part of a wider tensor
        expected, found = rotated_by_transformers(heads_sbhd), table.rotate(heads_sbhd)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        (expected_grad,), (found_grad,) = (torch.autograd.grad(out, wide, grad) for out in (expected, found))
        torch.testing.assert_close(found_grad, expected_grad, rtol=1e-6, atol=1e-6)


def test_interleaved_rotation_equals_complex_multiplication() -> None:
    """Transformers does the same for Llama 4; gradients are equal too, and each sequence of a row starts at zero."""
    from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

    angle_sc = torch.outer(torch.arange(9.0), of_theta(1e4).inverse_frequencies())
    turn_1sc = torch.polar(torch.ones_like(angle_sc), angle_sc)[None]
    table = RopeTable(rope=of_theta(1e4), interleaved=True)
    wide, grad = torch.randn(9, 2, 3, 12, requires_grad=True), torch.randn(9, 2, 3, 8)
    heads_sbhd = wide[..., 2:10]
    expected = apply_rotary_emb(heads_sbhd.transpose(0, 1), heads_sbhd.transpose(0, 1), turn_1sc)[0].transpose(0, 1)
    found = table.rotate(heads_sbhd)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    (expected_grad,), (found_grad,) = (torch.autograd.grad(out, wide, grad) for out in (expected, found))
    torch.testing.assert_close(found_grad, expected_grad, rtol=1e-6, atol=1e-6)
    half = heads_sbhd.detach().bfloat16()
    assert torch.equal(table.rotate(half), table.rotate(half.float()).bfloat16()), "in fp32, and rounded once"
    row = table.rotate(heads_sbhd, (5, 4))
    torch.testing.assert_close(row, torch.cat([table.rotate(part) for part in heads_sbhd.split((5, 4))]))


def test_positions_start_at_zero_for_each_packed_sequence() -> None:
    table, heads_sbhd = RopeTable(rope=of_theta(1e4)), torch.randn(9, 1, 2, 8)
    for lengths in ((2, 4, 3), (2, 4, 3), (8, 1)):
        parts = heads_sbhd.split(lengths)
        expected = torch.cat([rotated_by_transformers(part) for part in parts])
        torch.testing.assert_close(table.rotate(heads_sbhd, lengths), expected, rtol=1e-6, atol=1e-6)
    half = table.rotate(heads_sbhd.bfloat16(), (8, 1))
    assert half.dtype == torch.bfloat16, "the cached row is fp32"


def grown(queries: torch.Tensor, *arguments: tuple[int, ...], **shares: Any) -> list[float]:
    """By which factor each place of queries of ones grows."""
    table = TemperatureTable(temperature=Temperature(floor=3, scale=0.4))
    return table.scale(queries, *arguments, **shares)[:, 0, 0, 0].tolist()


def by_hand(*steps: int) -> Any:
    return pytest.approx([1 + 0.4 * math.log(1 + step) for step in steps], rel=1e-6)


def ones(tokens: int) -> torch.Tensor:
    return torch.ones(tokens, 1, 2, 4)


def test_the_scale_grows_at_each_multiple_of_the_floor() -> None:
    assert grown(ones(9)) == by_hand(0, 0, 1, 1, 1, 2, 2, 2, 3)


def test_temperature_starts_at_zero_for_each_packed_sequence() -> None:
    assert grown(ones(9), (4, 2, 3)) == by_hand(0, 0, 1, 1, 0, 0, 0, 0, 1)


def test_ranks_use_the_scales_of_their_tokens() -> None:
    lengths = (12, 4)
    whole = torch.tensor(grown(ones(16), lengths))
    for rank in range(2):
        assert grown(ones(8), lengths, rank=rank, size=2) == whole[local_token_indices(lengths, rank=rank, size=2)].tolist()


def test_the_dtype_is_kept_and_another_row_has_another_table() -> None:
    table = TemperatureTable(temperature=Temperature(floor=3, scale=0.4))
    assert table.scale(ones(5).bfloat16()).dtype == torch.bfloat16
    assert table.scale(ones(5), (2, 3))[:, 0, 0, 0].tolist() == by_hand(0, 0, 0, 0, 1)
    assert table.scale(ones(3))[:, 0, 0, 0].tolist() == by_hand(0, 0, 1)
