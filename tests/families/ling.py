"""Ling 2.0 and Ring 2.0."""

from __future__ import annotations

from tests.families.family import NO_TOKENS, ROUTED, FamilyTests, Model, OwnCode, rope

# fmt: off
_CODE = OwnCode(
    "glm4_moe", "BailingMoeV2ForCausalLM",
    fields={"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts", "attention_bias": "use_qkv_bias"},
    weights={
        "model.embed_tokens.": "model.word_embeddings.", ".self_attn.o_proj.": ".attention.dense.",
        ".self_attn.q_norm.": ".attention.query_layernorm.", ".self_attn.k_norm.": ".attention.key_layernorm.",
        ".e_score_correction_bias": ".expert_bias",
    },
    fused=(tuple(f".self_attn.{name}_proj." for name in "qkv"), ".attention.query_key_value."),
)
TESTS = FamilyTests(
    models={
        "ling2": Model(
            "bailing_moe", {
                **ROUTED, "rope_parameters": rope(1e5, partial_rotary_factor=0.5), "head_dim": 16, "use_qk_norm": True,
                "attention_bias": True, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7,
                "num_nextn_predict_layers": 0, **NO_TOKENS,
            }, kind="mixture", quick=True, correction_bias_in="mlp.gate", own_code=_CODE,
            mtp_layers=("model.layers.4.eh_proj.weight", "model.layers.4.mlp.gate.expert_bias"),
        ),
    },
)
