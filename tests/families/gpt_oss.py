"""gpt-oss."""

from __future__ import annotations

from tests.families.family import (
    INTERNVL_VISION,
    NINE_HEADS,
    Activations,
    FamilyTests,
    Model,
    SharedPrompts,
    adapters,
    rope,
    yarn,
)

# fmt: off
TESTS = FamilyTests(
    tiny={
        "gpt_oss": {
            "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "swiglu_limit": 1.0,
        },
    },
    models={
        "gpt-oss": Model(
            "gpt_oss", {
                "rope_parameters": yarn(1e5, beta_fast=4.0, truncate=False), "head_dim": 16, "num_local_experts": 4,
                "num_experts_per_tok": 2, "sliding_window": 7,
                "swiglu_limit": 1.5,  # gates and up projections of these weights reach it
            }, kind="mixture", quick=True, lora=adapters("attention"),
        ),
        "gpt-oss-odd-heads-no-attention-bias": Model(
            "gpt_oss", {
                **NINE_HEADS, "rope_parameters": rope(1e5), "head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 3,
                "sliding_window": 5,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
                "swiglu_alpha": 1.1, "attention_bias": False, "tie_word_embeddings": True,
            }, kind="mixture",
        ),
        "gpt-oss-mxfp4": Model(
            "gpt_oss", {
                "hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.15, "rope_parameters": rope(1e5),
                "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
            }, kind="quantized",
        ),
        "internvl3.5-gpt-oss": Model.wrapped(
            "internvl", {
                "model_type": "gpt_oss", "rope_parameters": rope(1e5), "num_local_experts": 4, "num_experts_per_tok": 2,
                "sliding_window": 7,
            }, INTERNVL_VISION, tie_word_embeddings=False,
        ),
    },
    shared_prompts={"windows_and_sinks": SharedPrompts("gpt_oss", quick=True)},
    wide={"gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 3}},
    activations=[
        Activations("gpt_oss", quick=True),
        Activations("gpt_oss", {"packed": True, "context": 2}, lora=adapters(rank=8, alpha=8)),
    ],
)
