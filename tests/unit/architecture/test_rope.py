from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from nemo_kto.architecture.families import FAMILIES
from nemo_kto.architecture.rope import longest_sequence, read_rope
from nemo_kto.layers.layer_settings import Rope
from nemo_kto.layers.rope_tables import RopeTable
from tests.helpers.messages import Message, raises

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LONGROPE = {
    "short_factor": [1.0 + 0.1 * pair for pair in range(64)],
    "long_factor": [2.0 + pair for pair in range(64)],
    "original_max_position_embeddings": 512,
}


def of_theta(theta: float, head_dim: int = 8) -> Rope:
    return read_rope({"rope_theta": theta, "hidden_size": head_dim, "num_attention_heads": 1})


@pytest.mark.parametrize(
    ("settings", "attention_factor"),
    [
        ({"rope_type": "default", "rope_theta": 5e5}, 1.0),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 1.0),
        ({"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, 1.0),
        ({"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3, "original_max_position_embeddings": 512}, 1.0),
        (
            {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512},
            0.1 * math.log(4) + 1,
        ),
        ({"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 8, "attention_factor": 0.5}, 0.5),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, 1.0),
        # the context became 2048 / 512 = 4 times longer
        ({"rope_type": "longrope", "rope_theta": 1e4, **LONGROPE}, math.sqrt(1 + math.log(4) / math.log(512))),
    ],
)
def test_frequencies_equal_those_of_a_transformers_model(settings: dict[str, Any], attention_factor: float) -> None:
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=4, head_dim=128, max_position_embeddings=2048, rope_parameters=dict(settings)
    )
    expected, rope = LlamaRotaryEmbedding(config), read_rope(config.to_dict())
    assert torch.equal(rope.inverse_frequencies(), expected.inv_freq)
    assert rope.attention_factor == expected.attention_scaling == pytest.approx(attention_factor)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 64}, ("max_position_embeddings", 64)),
        ({}, ("max_position_embeddings", None)),
        (
            {"max_position_embeddings": 64, "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 16}},
            ("original_max_position_embeddings", 16),
        ),
        # where Phi-3 has it
        (
            {"max_position_embeddings": 64, "original_max_position_embeddings": 8, "rope_scaling": {"type": "longrope"}},
            ("original_max_position_embeddings", 8),
        ),
        # transformers reads yarn as longrope in Phi-3
        (
            {"model_type": "phi3", "original_max_position_embeddings": 8, "rope_scaling": {"type": "yarn"}},
            ("original_max_position_embeddings", 8),
        ),
        (
            {
                "model_type": "gemma3_text",
                "max_position_embeddings": 64,
                "rope_parameters": {"full_attention": {"factor": 2.0}},
            },
            ("max_position_embeddings", 64),
        ),
        (
            {"model_type": "llama", "max_position_embeddings": 64, "rope_scaling": {"type": "yarn"}},
            ("max_position_embeddings", 64),
        ),
    ],
)
def test_longest_sequence(config: dict[str, Any], expected: tuple[str, int | None]) -> None:
    families = {family.name: family for family in FAMILIES.values()}
    family = families[config.get("model_type", "llama")]
    assert longest_sequence(family.rope(family.renewed(config), "full_attention")) == expected


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_transformers_frequencies_change_only_beyond_the_longest_sequence(kind: str) -> None:
    more = LONGROPE if kind == "longrope" else {"factor": 4.0}
    settings = {"rope_type": kind, "rope_theta": 1e4, **more}
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=4, head_dim=128, max_position_embeddings=600, rope_parameters=settings
    )
    embedding, (_, longest) = LlamaRotaryEmbedding(config), longest_sequence(config.to_dict())
    assert longest == (512 if kind == "longrope" else 600)
    ours, same = read_rope(config.to_dict()).inverse_frequencies(), []
    for length in (longest, longest + 1):
        embedding(torch.zeros(1), torch.arange(length)[None])
        same.append(torch.equal(embedding.inv_freq, ours))
    assert same == [True, False]


def test_the_attention_factor_scales_the_scores() -> None:
    """Cosines and sines of queries and of keys have it in transformers, so that it is there twice."""
    assert Rope(frequencies=(1.0,)).softmax_scale(64) is None
    assert Rope(frequencies=(1.0,), attention_factor=1.5).softmax_scale(64) == 1.5 * 1.5 / 8


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


@pytest.mark.parametrize(
    ("config", "theta", "factor"),
    [
        ({"rope_theta": 5e5}, 5e5, 1.0),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, 1.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, 1.0),
        # an older transformers adds its default to a newer file
        ({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, 1.0),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}}, 1e4, 2.0),
    ],
)
def test_old_and_new_forms(config: dict[str, Any], theta: float, factor: float) -> None:
    rope = read_rope({**config, "hidden_size": 32, "num_attention_heads": 4})
    assert rope.frequencies == pytest.approx([theta ** -(pair / 4) / factor for pair in range(4)], rel=1e-6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "proportional", "factor": 2.0}},
            Message("llama3", "proportional"),
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            Message("all", "set"),
        ),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear"}}, Message("rope", "linear", "factor")),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
            Message("llama3", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "rope_theta": 1e4}},
            Message("longrope", "long_factor", "original_max_position_embeddings"),
        ),
        ({}, Message("default", "rope_theta")),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            Message("partial_rotary_factor", "1.0", "0.5"),
        ),
    ],
)
def test_unsupported_ropes_are_refused(config: dict[str, Any], message: Message) -> None:
    with raises(ValueError, *message.parts):
        read_rope({**config, "hidden_size": 32, "num_attention_heads": 4})
