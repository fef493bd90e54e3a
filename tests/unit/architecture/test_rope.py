from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nemo_kto.architecture.families import FAMILIES
from nemo_kto.architecture.rope import longest_sequence, read_rope
from nemo_kto.layers.layer_settings import Rope
from tests.helpers.messages import Message, raises

LONGEST, ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LONGROPE = {
    "short_factor": [1.0 + 0.1 * pair for pair in range(64)],
    "long_factor": [2.0 + pair for pair in range(64)],
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("settings", "attention_factor"),
    [
        ({"rope_type": "default", "rope_theta": 5e5}, 1.0),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 1.0),
        ({"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, 1.0),
        ({"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3, "original_max_position_embeddings": 512}, 1.0),
        ({"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, ORIGINAL: 512}, 0.1 * math.log(4) + 1),
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
        ({LONGEST: 64}, (LONGEST, 64)),
        ({}, (LONGEST, None)),
        ({LONGEST: 64, "rope_scaling": {"type": "longrope", ORIGINAL: 16}}, (ORIGINAL, 16)),
        # where Phi-3 has it
        ({LONGEST: 64, ORIGINAL: 8, "rope_scaling": {"type": "longrope"}}, (ORIGINAL, 8)),
        # transformers reads yarn as longrope in Phi-3
        ({"model_type": "phi3", ORIGINAL: 8, "rope_scaling": {"type": "yarn"}}, (ORIGINAL, 8)),
        ({"model_type": "gemma3_text", LONGEST: 64, "rope_parameters": {"full_attention": {"factor": 2.0}}}, (LONGEST, 64)),
        ({"model_type": "llama", LONGEST: 64, "rope_scaling": {"type": "yarn"}}, (LONGEST, 64)),
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
        ({"rope_theta": 1e4, "rope_scaling": {"type": "spiral", "factor": 2.0}}, Message("llama3", "spiral")),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, Message("all", "set")),
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
