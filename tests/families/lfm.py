"""LFM2, dense and with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.families.family import (
    NINE_HEADS,
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
_LAYERS = {"layer_types": ["conv", "full_attention", "conv", "conv"]}
_ALTERNATING = {"layer_types": ["conv", "full_attention"] * 2}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "num_dense_layers": 1}
_TINY_EXPERTS = {**_EXPERTS, "moe_intermediate_size": 32}
_EVERY_LAYER = adapters_of_all("Lfm2ForCausalLM")
TESTS = FamilyTests(
    tiny={
        "lfm2": {**_LAYERS, "block_multiple_of": 16, "tie_word_embeddings": False},
        "lfm2_moe": {**_LAYERS, **_TINY_EXPERTS},
    },
    models={
        "lfm2": Model(
            "lfm2", {
                **_LAYERS, "block_multiple_of": 12, "conv_L_cache": 4, "rope_parameters": rope(1e5), **NO_TOKENS,
            }, quick=True, lora=adapters("in_proj", "q_proj", "o_proj", "up_proj", "down_proj"), quick_lora=True,
        ),
        # as older files; nine groups of four channels, which are padded at TP2
        "lfm2-odd-groups": Model(
            "lfm2", {
                **NINE_HEADS, "hidden_size": 36, "full_attn_idxs": [2], "block_ff_dim": 40, "tie_embedding": False,
                "block_auto_adjust_ff_dim": False, "rope_parameters": rope(1e6), **NO_TOKENS,
            }, quick=True, lora=adapters("out_proj", "gate_proj", alpha=1, dora=True), quick_lora=True,
        ),
        "lfm2-moe": Model(
            "lfm2_moe", {
                **_LAYERS, **_EXPERTS, "rope_parameters": rope(1e5), "routed_scaling_factor": 1.5, **NO_TOKENS,
            }, kind="mixture", quick=True, lora=adapters("in_proj", "out_proj", "q_proj", "o_proj", "mlp"), quick_lora=True,
            adapted_experts=3 * 8 * 3,
        ),
    },
    gradients={
        "lfm2": KTOStep("lfm2", quick=("packed_cp2", "tp2_pp2_sequence_parallel", "cp2_tp2_sequence_parallel")),
    },
    shared_prompts={
        "short_convolutions": SharedPrompts("lfm2", answers=2, with_prompts=True, quick=True),
        "short_convolutions_packed": SharedPrompts("lfm2", answers=2, limits=PACKED),
        "short_convolutions_tp2_ep2": SharedPrompts(
            "lfm2_moe", world_size=2, layout={**TP2, "expert": 2, "expert_tensor": 1}, answers=2
        ),
    },
    wide={"lfm2": _ALTERNATING, "lfm2_moe": {**_ALTERNATING, "moe_intermediate_size": 160, "num_dense_layers": 0}},
    activations=[
        Activations("lfm2", quick=True),
        Activations("lfm2", TP2, dtype="bfloat16", lora=_EVERY_LAYER),
        Activations("lfm2", {"packed": True, "context": 2}, lora=replace(_EVERY_LAYER, dora=True)),
        Activations("lfm2_moe"),
    ],
    trajectories={"lfm2": {}},
)
