"""Command R and A."""

from __future__ import annotations

from tests.families.family import NO_TOKENS, PACKED, Activations, FamilyTests, KTOStep, Model, SharedPrompts, adapters, rope

# fmt: off
TESTS = FamilyTests(
    tiny={
        "cohere": {"logit_scale": 0.5},
        "cohere2": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2, "logit_scale": 0.5},
    },
    models={
        "command-r": Model(
            "cohere", {"rope_parameters": rope(5e4), "logit_scale": 0.3, "tie_word_embeddings": True, **NO_TOKENS},
            quick=True, lora=adapters("all"),
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
    activations=[Activations("cohere"), Activations("cohere2", {"tensor": 2})],
)
