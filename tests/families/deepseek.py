"""Models with latent attention: DeepSeek V2 to V3.2, Kimi, GLM 4.7 Flash and 5, Mistral Small 4."""

from __future__ import annotations

from typing import Any

from tests.families.family import (
    BY_TOKENS,
    NO_TOKENS,
    ROUTED,
    SEQUENCE,
    SHORT,
    TINY_ROUTED,
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
_DEEPSEEK: dict[str, Any] = {
    **ROUTED, **NO_TOKENS, "num_attention_heads": 5, "num_key_value_heads": 5, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "n_group": 4, "topk_group": 2,
    "rope_parameters": yarn(1e5, mscale=0.7, mscale_all_dim=1.3) | SHORT,
}
_V2: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4}
_TINY_LATENT: dict[str, Any] = {  # values narrower than keys
    "num_key_value_heads": 8, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_INDEXED: dict[str, Any] = {  # as many keys as the sequences have tokens
    **_DEEPSEEK, "q_lora_rank": 24, "index_topk": SEQUENCE, "index_head_dim": 8, "index_n_heads": 3,
}
_MLA = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "mlp")
TESTS = FamilyTests(
    tiny={
        "deepseek_v3": {"tie_word_embeddings": False, **TINY_ROUTED, **_TINY_LATENT},
        "glm_moe_dsa": {
            "tie_word_embeddings": False, **TINY_ROUTED, **_TINY_LATENT, "index_head_dim": 8, "index_n_heads": 2,
            "indexer_types": ["full", "shared", "full", "shared"],
        },
    },
    models={
        "deepseek-v3-dense": Model("deepseek_v3", {**_DEEPSEEK, "first_k_dense_replace": 4, "q_lora_rank": 24}),
        # five heads, which are padded at TP2; YaRN with both scales; values narrower than keys
        "deepseek-v3": Model(
            "deepseek_v3", {**_DEEPSEEK, "q_lora_rank": 24, "num_nextn_predict_layers": 0}, kind="mixture", quick=True,
            lora=adapters("q_a_proj", "q_b_proj", *_MLA, experts=False), quick_lora=True,
        ),
        "deepseek-v3-direct-queries": Model(
            "deepseek_v3", {
                **_DEEPSEEK, "v_head_dim": 20, "rope_parameters": yarn(1e5) | SHORT, "q_lora_rank": None,
                "rope_interleave": False, "num_nextn_predict_layers": 0,
            }, kind="mixture", lora=adapters("q_proj", *_MLA, layers=(1, 3)), adapted_experts=8 * 3,
        ),
        "deepseek-v2": Model(
            "deepseek_v2",
            {**_DEEPSEEK, **_V2, "q_lora_rank": 24, "topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0},
            kind="mixture", quick=True,
        ),
        "deepseek-v2-lite": Model(
            "deepseek_v2", {**_DEEPSEEK, **_V2, "n_group": 1, "topk_group": 1, "q_lora_rank": None}, kind="mixture"
        ),
        "deepseek-v3.2": Model("deepseek_v32", _INDEXED, kind="mixture", quick=True),
        "glm-5": Model(
            "glm_moe_dsa", {
                **_INDEXED, "rope_parameters": rope(1e5), "n_group": 1, "topk_group": 1, "v_head_dim": 16,
                "mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "num_nextn_predict_layers": 0,
                "indexer_types": ["full", "full", "shared", "shared"],
            }, kind="mixture", quick=True, lora=adapters("q_a_proj", "q_b_proj", *_MLA), adapted_experts=2 * 8 * 3,
            mtp_layers=("model.layers.4.eh_proj.weight", "model.layers.4.self_attn.indexer.wk.weight"),
        ),
        "glm4-moe-lite": Model(
            "glm4_moe_lite", {
                **_DEEPSEEK, "rope_parameters": rope(1e5), "n_group": 1, "topk_group": 1, "q_lora_rank": 24,
                "rms_norm_eps": 1e-3, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            }, kind="mixture",
        ),
        "mistral3-latents": Model.wrapped(
            "mistral3", {
                **_DEEPSEEK, "model_type": "mistral4", "head_dim": 12, "q_lora_rank": 24,
                "rope_parameters": yarn(1e5, llama_4_scaling_beta=0.3, mscale=1.0, mscale_all_dim=1.0) | SHORT,
            }, {**VISION, "model_type": "pixtral", "head_dim": 16},
        ),
        "kimi-k2.5": Model.wrapped(
            "kimi_k25", {
                **_DEEPSEEK, "model_type": "deepseek_v3", "head_dim": 4, "q_lora_rank": 24,
            }, {**VISION, "hidden_size": 32, "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 1},
            projection_hidden_size=32, tie_word_embeddings=False, image_token_id=256,
        ),
    },
    gradients={
        "deepseek_v3": KTOStep(
            "deepseek_v3", {"first_k_dense_replace": 4}, quick=("cp2_tp2_sequence_parallel", "tp2_pp2_sequence_parallel")
        ),
        "glm_moe_dsa": KTOStep("glm_moe_dsa", {"first_k_dense_replace": 4}, quick=("packed_cp2",)),
    },
    shared_prompts={
        "indexers": SharedPrompts("glm_moe_dsa", answers=2, with_prompts=True),
        "latents_tp2": SharedPrompts(
            "deepseek_v3", world_size=2, layout={**TP2, "recompute": "selective"}, answers=2, with_prompts=True, quick=True
        ),
        "latents_packed": SharedPrompts("deepseek_v3", limits=BY_TOKENS),
    },
    wide={
        "deepseek_v3": {
            "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 80,
            "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 40, "first_k_dense_replace": 4,
        },
    },
    activations=[
        Activations(
            "deepseek_v3", TP2,
            lora=adapters("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", rank=4), quick=True,
        ),
        Activations("deepseek_v3", {"packed": True}),
        Activations("deepseek_v3", {"packed": True, "context": 2, "tensor": 2}),
        Activations("deepseek_v3", {"recompute": "selective", "modules": ["core_attn"]}),
        Activations("deepseek_v3", TP2, dtype="bfloat16"),
    ],
)
