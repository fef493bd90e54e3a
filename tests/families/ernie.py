"""ERNIE 4.5."""

from __future__ import annotations

from tests.families.family import NO_TOKENS, Activations, FamilyTests, KTOStep, Model, SharedPrompts, adapters, rope

# fmt: off
TESTS = FamilyTests(
    tiny={"ernie4_5": {"tie_word_embeddings": False, "head_dim": 16, "use_bias": True}},
    models={
        "ernie4-5": Model(
            "ernie4_5", {"rope_parameters": rope(5e5), "head_dim": 16, "use_bias": True, **NO_TOKENS}, quick=True
        ),
        "ernie4-5-moe": Model(
            "ernie4_5_moe", {
                "rope_parameters": rope(1e5), "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 16,
                "moe_layer_end_index": 2, **NO_TOKENS,
            }, kind="mixture", quick=True, lora=adapters("mlp"), adapted_experts=2 * 8 * 3,
            mtp_layers=("model.mtp_block.0.mlp.up_proj.weight", "model.mtp_emb_norm.0.weight"),
            correction_bias_in="mlp.moe_statics",
        ),
    },
    gradients={"ernie4_5": KTOStep("ernie4_5", quick=("cp2",))},
    shared_prompts={"neighbouring_channels": SharedPrompts("ernie4_5")},
    activations=[Activations("ernie4_5", {"context": 2})],
)
