"""GLM-4 to 4.6 and dots.llm1."""

from __future__ import annotations

from dataclasses import replace

from tests.families.family import (
    GRID_VISION,
    NO_TOKENS,
    ROUTED,
    TINY_ROUTED,
    TP2,
    Activations,
    FamilyTests,
    KTOStep,
    Model,
    SharedPrompts,
    adapters,
    adapters_of_all,
    mrope,
    rope,
)

# fmt: off
_EVERY_LAYER = adapters_of_all("Glm4ForCausalLM")
TESTS = FamilyTests(
    tiny={
        "glm4": {"tie_word_embeddings": False, "head_dim": 16, "attention_bias": True},
        "glm4_moe": {"head_dim": 16, "use_qk_norm": True, **TINY_ROUTED},
    },
    models={
        "glm4": Model(
            "glm4", {"rope_parameters": rope(1e5, partial_rotary_factor=0.5), "head_dim": 16, **NO_TOKENS}, quick=True,
            lora=adapters("q_proj", "o_proj", "gate_up_proj", "down_proj"),
        ),
        "glm4-moe": Model(
            "glm4_moe", {
                **ROUTED, "rope_parameters": rope(1e5, partial_rotary_factor=0.5), "head_dim": 16, "use_qk_norm": True,
                "attention_bias": True, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7,
                "num_nextn_predict_layers": 0, **NO_TOKENS,
            }, kind="mixture", quick=True, lora=adapters("all"), adapted_experts=3 * 8 * 3,
            mtp_layers=("model.layers.4.eh_proj.weight", "model.layers.4.mlp.gate.e_score_correction_bias"),
            correction_bias_in="mlp.gate",
        ),
        "glm4v": Model.wrapped("glm4v", mrope(1, 1, 0, partial_rotary_factor=0.5), GRID_VISION),
        "glm4v-moe": Model.wrapped(
            "glm4v_moe", {**ROUTED, "head_dim": 16, "n_group": 4, "topk_group": 2, **mrope(1, 1, 2)}, GRID_VISION
        ),
        "dots1": Model(
            "dots1", {
                **ROUTED, "rope_parameters": rope(1e5), "n_shared_experts": 2, "sliding_window": 7, "max_window_layers": 2,
                "routed_scaling_factor": 2.5, "norm_topk_prob": False, **NO_TOKENS,
            }, kind="mixture", quick=True, correction_bias_in="mlp.gate",
        ),
    },
    gradients={"glm4": KTOStep("glm4", quick=("packed_cp2",))},
    shared_prompts={"part_of_each_head": SharedPrompts("glm4", quick=True)},
    wide={"glm4_moe": {"n_routed_experts": 8, "moe_intermediate_size": 160, "first_k_dense_replace": 0}},
    activations=[
        Activations("glm4", {"packed": True, "context": 2}),
        Activations("glm4", lora=replace(_EVERY_LAYER, rank=256, dora=True)),
        Activations("glm4_moe"),
        Activations("glm4_moe", TP2, dtype="bfloat16"),
    ],
)
