"""Nemotron-H and Nemotron 3."""

from __future__ import annotations

import math
from typing import Any

from tests.families.family import (
    NO_TOKENS,
    PACKED,
    TINY_ROUTED,
    TP2,
    Activations,
    FamilyTests,
    KTOStep,
    Model,
    SharedPrompts,
    adapters,
)

# fmt: off
# two heads in each of three groups, which are padded at TP2; time steps of 0.3 and more, which no limit changes
_MAMBA: dict[str, Any] = {
    **NO_TOKENS, "initializer_range": 0.12, "head_dim": 16, "mamba_num_heads": 6, "n_groups": 3, "mamba_head_dim": 8,
    "ssm_state_size": 12, "time_step_min": 1e-30, "time_step_max": 1.0, "time_step_floor": 0.3,
}
_TINY_MAMBA: dict[str, Any] = {  # three heads in each of two groups; time steps of 0.3 and more, which no limit changes
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "head_dim": 16,
    "moe_shared_expert_intermediate_size": 48, "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2,
    "ssm_state_size": 12, "time_step_min": 1e-30, "time_step_max": 1.0, "time_step_floor": 0.3,
}
TESTS = FamilyTests(
    tiny={"nemotron_h": {"tie_word_embeddings": False, **TINY_ROUTED, **_TINY_MAMBA}},
    models={
        "nemotron-h": Model(
            "nemotron_h", {**_MAMBA, "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
            quick=True, lora=adapters("in_proj", "out_proj", "q_proj", "o_proj", "up_proj", "down_proj", alpha=0.5),
            quick_lora=True,
        ),
        # transformers raises steps to time_step_min, which is the smallest of time_step_limit here
        "nemotron-h-moe": Model(
            "nemotron_h", {
                **_MAMBA, "time_step_min": 0.5, "time_step_limit": [0.5, math.inf],
                "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
                "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
                "moe_shared_expert_intermediate_size": 24, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7,
            }, kind="mixture", quick=True, lora=adapters("in_proj", "v_proj", "up_proj", "down_proj"), quick_lora=True,
        ),
    },
    gradients={
        "nemotron_h": KTOStep(
            "nemotron_h", {
                "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
                "mamba_num_heads": 12, "n_groups": 4,
            }, quick=("packed_cp2", "pp2_uneven", "tp2_pp2_sequence_parallel"),
        ),
    },
    shared_prompts={
        "mamba": SharedPrompts("nemotron_h", answers=2, with_prompts=True, quick=True),
        "mamba_packed": SharedPrompts("nemotron_h", answers=2, limits=PACKED),
        "mamba_tp2_ep2": SharedPrompts(
            "nemotron_h", world_size=2, layout={**TP2, "expert": 2, "expert_tensor": 1}, answers=2
        ),
        "mamba_pp2": SharedPrompts("nemotron_h", world_size=2, layout={"pipeline": 2}, answers=2),
        "mamba_recompute_lora": SharedPrompts("nemotron_h", layout={"recompute": "full"}, answers=2, lora=True),
    },
    wide={
        "nemotron_h": {
            "num_hidden_layers": 8, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 2,
            "head_dim": 32, "mamba_head_dim": 40, "ssm_state_size": 48, "moe_intermediate_size": 160,
            "moe_shared_expert_intermediate_size": 320,
        },
    },
    activations=[
        Activations("nemotron_h", quick=True),
        Activations("nemotron_h", TP2, lora=adapters("all", "in_proj", "out_proj", rank=4)),
        Activations("nemotron_h", {"recompute": "selective"}),
        Activations(
            "nemotron_h", {"packed": True}, dtype="bfloat16", lora=adapters("all", "in_proj", "out_proj", rank=4, dora=True)
        ),
    ],
)
