"""Gemma 2 and 3."""

from __future__ import annotations

from typing import Any

from tests.families.family import (
    NO_TOKENS,
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
TESTS = FamilyTests(
    tiny={
        "gemma2": {
            "head_dim": 16, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0,
        },
        "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 12, "sliding_window": 16, "sliding_window_pattern": 2},
    },
    models={
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
    },
    gradients={"gemma2": KTOStep("gemma2", quick=("tp2",))},
    shared_prompts={
        "windows_and_soft_caps": SharedPrompts("gemma2"),
        "windows": SharedPrompts("gemma3_text"),
    },
    activations=[
        Activations("gemma3_text", {"tensor": 2}, lora=adapters("all", rank=4), quick=True),
        Activations("gemma2", TP2, dtype="bfloat16", lora=adapters("all", rank=4)),
    ],
    trajectories={
        "gemma2": {"sliding_window": 16, **SLIDING},
        "gemma3_text": SLIDING,
    },
)
