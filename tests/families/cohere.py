"""Command A."""

from __future__ import annotations

from tests.families.family import NO_TOKENS, PACKED, Activations, FamilyTests, KTOStep, Model, SharedPrompts, adapters, rope

# fmt: off
TESTS = FamilyTests(
    tiny={"cohere2": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2, "logit_scale": 0.5}},
    models={
        "cohere2": Model(
            "cohere2", {
                "rope_parameters": rope(5e4), "sliding_window": 7, "logit_scale": 0.3, "tie_word_embeddings": True,
                **NO_TOKENS,
            }, quick=True, lora=adapters("all"),
        ),
    },
    gradients={"cohere2": KTOStep("cohere2", quick=("cp2",))},
    shared_prompts={"parallel": SharedPrompts("cohere2", limits=PACKED, quick=True)},
    activations=[Activations("cohere2", {"tensor": 2})],
)
