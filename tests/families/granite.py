"""Granite 3 and 4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.families.family import (
    NO_TOKENS,
    TP2,
    Activations,
    FamilyTests,
    KTOStep,
    Model,
    SharedPrompts,
    adapters,
    adapters_of_all,
    rope,
    yarn,
)

# fmt: off
# two heads in one group; no RoPE; the largest steps are limited, as sums of large decays are rounded beyond the tolerance
_GRANITE_HYBRID: dict[str, Any] = {
    **NO_TOKENS, "initializer_range": 0.12, "shared_intermediate_size": 40, "mamba_n_heads": 2, "mamba_expand": 1,
    "mamba_d_head": "auto", "mamba_d_state": 12, "time_step_limit": [0.0, 1.5], "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 0.5, "tie_word_embeddings": True,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
}
_TINY_GRANITE_HYBRID: dict[str, Any] = {  # three heads in each of two groups; attention without RoPE in one layer
    "layer_types": ["mamba", "mamba", "attention", "mamba"], "mamba_n_heads": 6, "mamba_d_head": "auto", "mamba_expand": 3,
    "mamba_n_groups": 2, "mamba_d_state": 12, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32,
    "shared_intermediate_size": 48,
}
_TINY_FACTORS: dict[str, Any] = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0,
}
_EVERY_LAYER = adapters_of_all("GraniteMoeHybridForCausalLM")
TESTS = FamilyTests(
    tiny={
        "granite": _TINY_FACTORS,
        "granitemoehybrid": {**_TINY_FACTORS, **_TINY_GRANITE_HYBRID},
    },
    models={
        "granite": Model(
            "granite", {
                "rope_parameters": yarn(1e5), "attention_bias": True, "embedding_multiplier": 3.0,
                "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 3.0, "tie_word_embeddings": True,
                **NO_TOKENS,
            }, quick=True, lora=adapters("all"),
        ),
        "granite-hybrid": Model(
            "granitemoehybrid", {**_GRANITE_HYBRID, "num_local_experts": 0, "num_experts_per_tok": 0}, quick=True,
            lora=adapters("in_proj", "out_proj", "q_proj", "gate_up_proj", "down_proj", alpha=1, dora=True), quick_lora=True,
        ),
        # as Granite 4.0 Micro
        "granite-hybrid-attention": Model(
            "granitemoehybrid", {
                **_GRANITE_HYBRID, "layer_types": ["attention"] * 4, "rope_parameters": rope(1e5),
                "position_embedding_type": "rope", "attention_bias": True, "num_local_experts": 0,
            }, quick=True,
        ),
        "granite-hybrid-moe": Model(
            "granitemoehybrid", {
                **_GRANITE_HYBRID, "tie_word_embeddings": False, "mamba_n_heads": 4, "mamba_n_groups": 2,
                "num_local_experts": 8, "num_experts_per_tok": 3,
            }, kind="mixture", quick=True, lora=adapters("in_proj", "out_proj", "v_proj", "gate_up_proj", "down_proj"),
            quick_lora=True,
        ),
    },
    gradients={
        "granite": KTOStep("granite", quick=("pp2",)),
        "granite_hybrid": KTOStep(
            "granitemoehybrid", {"num_local_experts": 0, "mamba_n_heads": 12, "mamba_n_groups": 4},
            quick=("packed_cp2", "tp2_pp2_sequence_parallel"),
        ),
        "granite_hybrid_attention": KTOStep(
            "granitemoehybrid",
            {"num_local_experts": 0, "layer_types": ["attention"] * 4, "position_embedding_type": "rope"},
            quick=("cp2_tp2_sequence_parallel",),
        ),
    },
    shared_prompts={
        "mamba_in_layers_with_experts_ep2": SharedPrompts(
            "granitemoehybrid", world_size=2, layout={"expert": 2}, answers=2, with_prompts=True
        ),
    },
    wide={
        "granitemoehybrid": {
            "num_hidden_layers": 8, "layer_types": ["mamba", "attention"] * 4, "mamba_d_state": 48, "intermediate_size": 160,
            "shared_intermediate_size": 320,
        },
    },
    activations=[
        Activations("granite", lora=adapters("all", rank=4)),
        Activations("granitemoehybrid"),
        Activations("granitemoehybrid", TP2, dtype="bfloat16", lora=_EVERY_LAYER),
        Activations("granitemoehybrid", lora=replace(_EVERY_LAYER, dora=True)),
    ],
)
