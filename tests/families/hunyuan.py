"""Hunyuan, dense and with experts."""

from __future__ import annotations

from tests.families.family import NO_TOKENS, Activations, FamilyTests, KTOStep, Model, SharedPrompts, adapters, rope

# fmt: off
TESTS = FamilyTests(
    tiny={
        "hunyuan_v1_dense": {"tie_word_embeddings": False, "head_dim": 16, "eod_token_id": None},
        "hunyuan_v1_moe": {"head_dim": 16, "eod_token_id": None, "num_experts": 8, "moe_topk": 3},
    },
    models={
        "hunyuan": Model(
            "hunyuan_v1_dense", {
                "rope_parameters": rope(1e4, rope_type="dynamic", factor=1.0, alpha=50.0), "head_dim": 16,
                "eod_token_id": None, **NO_TOKENS,
            }, quick=True,
        ),
        # the number of experts for a token is given for each layer
        "hunyuan-moe": Model(
            "hunyuan_v1_moe", {
                "rope_parameters": rope(1e4, rope_type="dynamic", factor=1.0, alpha=50.0), "head_dim": 16, "num_experts": 8,
                "moe_topk": [3] * 4, "eod_token_id": None, **NO_TOKENS,
            }, kind="mixture", quick=True, lora=adapters("all"), adapted_experts=4 * 8 * 3,
        ),
    },
    gradients={"hunyuan": KTOStep("hunyuan_v1_dense", quick=("cp2_tp2_sequence_parallel",))},
    shared_prompts={"norms_after_rope": SharedPrompts("hunyuan_v1_dense", quick=True)},
    activations=[
        Activations("hunyuan_v1_dense"),
        Activations("hunyuan_v1_moe", lora=adapters("all", rank=4)),
    ],
)
