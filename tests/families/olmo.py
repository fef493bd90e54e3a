"""OLMo 2 and 3, EXAONE 4."""

from __future__ import annotations

from tests.families.family import (
    NINE_HEADS,
    NO_TOKENS,
    PACKED,
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
    },
    models={
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
    activations=[
        Activations("olmo2", {"tensor": 2}),
        Activations("exaone4", {"packed": True}),
    ],
    trajectories={"olmo2": {}},
)
