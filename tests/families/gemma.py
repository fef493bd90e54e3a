"""Gemma 1 to 4."""

from __future__ import annotations

from typing import Any

from tests.families.family import (
    NO_TOKENS,
    PACKED,
    TP2,
    VISION,
    Activations,
    FamilyTests,
    KTOStep,
    Model,
    SharedPrompts,
    adapters,
    rope,
    yarn,
)

# fmt: off
# the layers with a window, which differ between the first and the second stage
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]}
GEMMA4: dict[str, Any] = {
    "rope_parameters": {
        "full_attention": rope(5e5, rope_type="proportional", partial_rotary_factor=0.25), "sliding_attention": rope(2e3),
    },
    "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "final_logit_softcapping": 9.0, "sliding_window": 7, "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
EXPERTS4 = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32}
TESTS = FamilyTests(
    tiny={
        "gemma": {"head_dim": 16, "hidden_act": "gelu"},
        "gemma2": {
            "head_dim": 16, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0,
        },
        "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 12, "sliding_window": 16, "sliding_window_pattern": 2},
        "gemma4_text": {**GEMMA4, "global_head_dim": 32, "sliding_window": 16},
    },
    models={
        "gemma1": Model(
            "gemma", {"rope_parameters": rope(1e5), "head_dim": 16, "hidden_act": "gelu", **NO_TOKENS}, quick=True,
            lora=adapters("all"),
        ),
        # caps that the scores and logits of these weights reach, and a window in every second layer
        "gemma2": Model(
            "gemma2", {
                "rope_parameters": rope(5e5), "head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0,
                "final_logit_softcapping": 5.0, "sliding_window": 7, **NO_TOKENS,
            }, quick=True, lora=adapters("all"),
        ),
        "gemma2-untied-no-caps-bias": Model(
            "gemma2", {
                "rope_parameters": rope(1e5), "head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": None,
                "final_logit_softcapping": None, "sliding_window": 5,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
                "attention_bias": True, "tie_word_embeddings": False, **NO_TOKENS,
            },
        ),
        "gemma3": Model(
            "gemma3_text", {
                "rope_parameters": {
                    "full_attention": yarn(5e5), "sliding_attention": rope(2e3),
                }, "head_dim": 16, "query_pre_attn_scalar": 24, "final_logit_softcapping": 9.0, "sliding_window": 7,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
                **NO_TOKENS,
            }, quick=True, lora=adapters("q_proj", "mlp", layers=(2, 3)),
        ),
        "gemma3-vision": Model.wrapped(
            "gemma3",
            {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 24},
            VISION, mm_tokens_per_image=4, image_token_index=258,
        ),
        # keys of full layers that two tensor-parallel ranks cannot divide
        "gemma4-dense": Model(  # wider heads have sharper scores, whose gradients lose a digit more in fp32
            "gemma4_text", {**GEMMA4, "head_dim": 4, "global_head_dim": 8, **NO_TOKENS}, quick=True, lora=adapters("all"),
        ),
        "gemma4-experts": Model(
            "gemma4_text", {**GEMMA4, **NO_TOKENS, **EXPERTS4, "num_global_key_value_heads": 2}, "mixture", quick=True,
            lora=adapters("all"),
        ),
        "gemma4-12b": Model("gemma4_unified_text", {**GEMMA4, **NO_TOKENS}, quick=True, lora=adapters("all")),
        "gemma4-12b-vision": Model.wrapped(
            "gemma4_unified", {
                **GEMMA4, "head_dim": 8, "num_hidden_layers": 2, "layer_types": GEMMA4["layer_types"][:2],
                "use_bidirectional_attention": "vision", "pad_token_id": 254,
            },
            {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32},
            image_token_id=256, audio_config={"audio_embed_dim": 16},
        ),
        "gemma4-vision": Model.wrapped(
            "gemma4", {
                **GEMMA4, **EXPERTS4, "head_dim": 8, "num_hidden_layers": 2, "layer_types": GEMMA4["layer_types"][:2],
                "use_bidirectional_attention": "vision", "pad_token_id": 254,
            },
            {
                "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16,
                "num_key_value_heads": 2, "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 16,
                "standardize": True,
            }, image_token_id=256,
        ),
    },
    gradients={
        "gemma1": KTOStep("gemma", quick=("tp2",)),
        "gemma2": KTOStep("gemma2", quick=("tp2",)),
        "gemma4-dense": KTOStep("gemma4_text", quick=("tp2",)),
        "gemma4-experts": KTOStep("gemma4_text", EXPERTS4, layouts=(
            "packed", "recompute", "pp2", "packed_cp2", "tp2_pp2_sequence_parallel",
        )),
    },
    shared_prompts={
        "zero_centered_norms": SharedPrompts("gemma", limits=PACKED),
        "windows_and_soft_caps": SharedPrompts("gemma2"),
        "windows": SharedPrompts("gemma3_text"),
        "wide_heads": SharedPrompts("gemma4_text", quick=True),
        "wide_heads_of_ranks": SharedPrompts("gemma4_text", 2, TP2, limits=PACKED, lora=True),
    },
    # several groups on a rank, and windows that mask nothing
    wide={"gemma4_text": {**EXPERTS4, "moe_intermediate_size": 160, "num_global_key_value_heads": 4, "sliding_window": 128}},
    activations=[
        Activations("gemma", TP2),
        Activations("gemma3_text", {"tensor": 2}, lora=adapters("all", rank=4), quick=True),
        Activations("gemma2", TP2, dtype="bfloat16", lora=adapters("all", rank=4)),
        Activations("gemma4_text"),
        Activations("gemma4_text", TP2, lora=adapters("all", rank=4), quick=True),
        Activations("gemma4_text", TP2, dtype="bfloat16"),
    ],
    trajectories={
        "gemma2": {"sliding_window": 16, **SLIDING},
        "gemma3_text": SLIDING,
        "gemma4_text": {"global_head_dim": 16},
    },
)
