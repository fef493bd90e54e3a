"""OLMoE, OLMo 2 and 3, EXAONE 4."""

from __future__ import annotations

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
    rope,
    yarn,
)

# fmt: off
TESTS = FamilyTests(
    tiny={
        "exaone4": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
        "olmo2": {"tie_word_embeddings": False},
        "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32, "clip_qkv": 1.2},
    },
    models={
        "olmoe-1b": Model(
            "olmoe", {
                "rope_parameters": rope(5e5), "num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 16,
                "clip_qkv": 1.2, **NO_TOKENS,
            }, "mixture", quick=True, lora=adapters("all"), adapted_experts=4 * 8 * 3,
        ),
        "olmo2": Model("olmo2", {"rope_parameters": rope(5e5), **NO_TOKENS}, lora=adapters("all")),
        "olmo2-tied-odd-heads-bias": Model(
            "olmo2", {
                **NINE_HEADS, "hidden_size": 36, "rope_parameters": rope(1e5), "attention_bias": True,
                "tie_word_embeddings": True, **NO_TOKENS,
            }, quick=True,
        ),
        "olmo3": Model(
            "olmo3", {
                "rope_parameters": {
                    "full_attention": yarn(5e5), "sliding_attention": rope(5e5),
                }, "sliding_window": 7, **NO_TOKENS,
            }, quick=True,
        ),
        "exaone4": Model("exaone4", {"rope_parameters": rope(1e6), "sliding_window": 7, **NO_TOKENS}, quick=True),
        "exaone4-no-window": Model(
            "exaone4",
            {"rope_parameters": rope(1e6), "sliding_window": None, "layer_types": ["full_attention"] * 4, **NO_TOKENS},
        ),
    },
    gradients={
        "exaone4": KTOStep("exaone4", {"sliding_window": 7}, quick=("packed_cp2",)),
        "olmo2": KTOStep("olmo2", quick=("tp2",)),
    },
    shared_prompts={"norms_after_attention": SharedPrompts("exaone4", limits=PACKED, quick=True)},
    wide={"olmoe": {"intermediate_size": 160}},
    activations=[
        Activations("olmoe"),
        Activations("olmoe", TP2, dtype="bfloat16"),
        Activations("olmo2", {"tensor": 2}),
        Activations("exaone4", {"packed": True}),
    ],
    trajectories={"olmo2": {}},
)
