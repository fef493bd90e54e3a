from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from nemo_kto.models.rope import Rope, RotaryTable, read_rope

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
        {
            "rope_type": "llama3",
            "rope_theta": 1e5,
            **LLAMA3,
            "factor": 32.0,
            "low_freq_factor": 2.0,
            "high_freq_factor": 3.0,
        },
        {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3, "original_max_position_embeddings": 512},
    ],
)
def test_frequencies_are_those_of_transformers(settings: dict[str, Any]) -> None:
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, head_dim=128, rope_parameters=dict(settings))
    expected, attention_factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, "cpu")
    assert attention_factor == 1.0
    torch.testing.assert_close(read_rope(config.to_dict()).inverse_frequencies(128), expected, rtol=1e-6, atol=0)


def rotated_by_transformers(heads_sbhd: torch.Tensor) -> torch.Tensor:
    config = LlamaConfig(
        hidden_size=24, num_attention_heads=3, head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    heads_bhsd = heads_sbhd.permute(1, 2, 0, 3)
    cos, sin = LlamaRotaryEmbedding(config)(heads_bhsd, torch.arange(len(heads_sbhd))[None])
    return apply_rotary_pos_emb(heads_bhsd, heads_bhsd, cos, sin)[0].permute(2, 0, 1, 3)


def test_heads_are_rotated_as_by_transformers_forward_and_backward() -> None:
    torch.manual_seed(0)
    table = RotaryTable(rope=Rope(theta=1e4), head_dim=8)
    for length in (5, 9, 7):  # the table grows, and serves what is shorter
        wide = torch.randn(length, 2, 3, 12, requires_grad=True)
        heads_sbhd, grad = wide[..., 2:10], torch.randn(length, 2, 3, 8)  # keys are a part of a wider tensor
        expected, found = rotated_by_transformers(heads_sbhd), table.rotate(heads_sbhd)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        (expected_grad,), (found_grad,) = (torch.autograd.grad(out, wide, grad) for out in (expected, found))
        torch.testing.assert_close(found_grad, expected_grad, rtol=1e-6, atol=1e-6)


def test_rotated_heads_keep_their_dtype() -> None:
    table, heads_sbhd = RotaryTable(rope=Rope(theta=1e4), head_dim=8), torch.randn(4, 1, 2, 8)
    rotated = table.rotate(heads_sbhd)
    half = table.rotate(heads_sbhd.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), rotated, rtol=2e-2, atol=2e-2)
    assert torch.equal(table.rotate(heads_sbhd), rotated), "the table is fp32 again"


def test_default_frequencies() -> None:
    expected = torch.tensor([1.0, 1 / 10.0, 1 / 100.0, 1 / 1000.0])
    torch.testing.assert_close(Rope(theta=1e4).inverse_frequencies(8), expected)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_theta": 5e5}, Rope(theta=5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, Rope(theta=5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, Rope(theta=1e6)),
        # what an older transformers makes of a newer file: its own default beside the real value
        ({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, Rope(theta=1e6)),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}}, Rope(theta=1e4, kind="linear", factor=2.0)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": 32.0}},
            Rope(theta=5e5, kind="llama3", factor=32.0),
        ),
    ],
)
def test_old_and_new_forms(config: dict[str, Any], expected: Rope) -> None:
    assert read_rope(config) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "the rope type must be one of default, linear, llama3, got 'dynamic'",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "got 'yarn'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "the same for all layers, got one set for each of full",
        ),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' needs factor"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
            "needs low_freq_factor, high_freq_factor, original_max_position_embeddings",
        ),
        ({}, "rope type 'default' needs rope_theta"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor must be 1.0, got 0.5",
        ),
    ],
)
def test_what_is_not_supported_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_rope(config)
