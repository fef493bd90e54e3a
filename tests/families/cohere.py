"""Command R, R+ and A."""

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
)

# fmt: off
TESTS = FamilyTests(
    tiny={
        "cohere": {"logit_scale": 0.5, "use_qk_norm": True},
        "cohere2": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2, "logit_scale": 0.5},
    },
    models={
        "command-r": Model(
            "cohere", {"rope_parameters": rope(5e4), "logit_scale": 0.3, "tie_word_embeddings": True, **NO_TOKENS},
            quick=True, lora=adapters("all"),
        ),
        "command-r-plus": Model(
            "cohere", {
                **NINE_HEADS, "hidden_size": 36, "use_qk_norm": True, "rope_parameters": rope(5e4), "logit_scale": 0.3,
                "tie_word_embeddings": True, **NO_TOKENS,
            }, quick=True,
        ),
        "cohere2": Model(
            "cohere2", {
                "rope_parameters": rope(5e4), "sliding_window": 7, "logit_scale": 0.3, "tie_word_embeddings": True,
                **NO_TOKENS,
            }, quick=True, lora=adapters("all"),
        ),
    },
    gradients={"command-r": KTOStep("cohere", quick=("tp2",)), "cohere2": KTOStep("cohere2", quick=("cp2",))},
    shared_prompts={
        "parallel_everywhere": SharedPrompts("cohere", limits=PACKED),
        "parallel": SharedPrompts("cohere2", limits=PACKED, quick=True),
    },
    activations=[
        Activations("cohere"),
        Activations("cohere", TP2, dtype="bfloat16", lora=adapters("all", rank=4)),
        Activations("cohere2", {"tensor": 2}),
    ],
)
