"""Falcon-H1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.families.family import (
    NO_TOKENS,
    PACKED,
    TP2,
    Activations,
    FamilyTests,
    KTOStep,
    Model,
    SharedPrompts,
    adapters,
    adapters_of_all,
    rope,
)

# fmt: off
_FACTORS: dict[str, Any] = {
    "embedding_multiplier": 2.5, "lm_head_multiplier": 0.4, "key_multiplier": 0.7, "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.6, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8,
    "ssm_multipliers": [0.5, 0.9, 1.4, 0.7, 0.6], "mlp_multipliers": [0.75, 1.5],
}
# three heads in each of two groups, and one group, which is padded at TP2; large steps are limited, as in Granite's models
_HEADS: dict[str, Any] = {
    "mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 12,
    "time_step_limit": [0.0, 1.0],
}
_ONE_GROUP = {
    **_HEADS, "mamba_d_ssm": None, "mamba_expand": 1, "mamba_n_heads": 2, "mamba_d_head": "auto", "mamba_n_groups": 1,
}
_NORMED = {"mamba_rms_norm": True, "mamba_norm_before_gate": False}
_EVERY_LAYER = adapters_of_all("FalconH1ForCausalLM")
TESTS = FamilyTests(
    tiny={"falcon_h1": {**_FACTORS, **_HEADS}},
    models={
        "falcon-h1": Model(
            "falcon_h1", {
                **_FACTORS, **_HEADS, "initializer_range": 0.15, "time_step_limit": [0.0, 4.0], "head_dim": 10,
                "rope_parameters": rope(1e11), **NO_TOKENS,
            }, quick=True, lora=adapters("in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "mlp"), quick_lora=True,
        ),
        "falcon-h1-norms": Model(
            "falcon_h1", {
                **_FACTORS, **_ONE_GROUP, **_NORMED, "initializer_range": 0.15, "rope_parameters": rope(1e5),
                "tie_word_embeddings": True, **NO_TOKENS,
            }, quick=True, lora=adapters("in_proj", "q_proj", "mlp", alpha=1, dora=True), quick_lora=True,
        ),
    },
    gradients={
        "falcon_h1": KTOStep(
            "falcon_h1", {"mamba_d_ssm": 96, "mamba_n_heads": 12, "mamba_n_groups": 4},
            quick=("packed_cp2", "tp2_pp2_sequence_parallel"),
        ),
        "falcon_h1_norms": KTOStep(
            "falcon_h1", {**_ONE_GROUP, **_NORMED}, quick=("tp2",),
            layouts=("one_rank", "packed", "recompute", "tp2", "pp2"),
        ),
    },
    shared_prompts={
        "attention_beside_mamba": SharedPrompts("falcon_h1", answers=2, with_prompts=True, quick=True),
        "attention_beside_mamba_tp2": SharedPrompts(
            "falcon_h1", world_size=2, layout={**TP2, "pipeline": 1}, answers=2, limits=PACKED
        ),
    },
    wide={
        "falcon_h1": {
            "num_hidden_layers": 8, "mamba_d_ssm": 256, "mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 48,
        },
    },
    activations=[
        Activations("falcon_h1", quick=True),
        Activations("falcon_h1", TP2, dtype="bfloat16", lora=_EVERY_LAYER),
        Activations("falcon_h1", {"packed": True, "context": 2}, lora=replace(_EVERY_LAYER, dora=True)),
    ],
)
