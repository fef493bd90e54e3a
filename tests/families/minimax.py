"""MiniMax M3."""

from __future__ import annotations

from typing import Any

from tests.families.family import NO_TOKENS, FamilyTests, Model, OwnCode, rope

# fmt: off
_FIELDS: dict[str, Any] = {
    "num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"], "dense_intermediate_size": 40,
    "intermediate_size": 24, "shared_intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 3,
    "rope_parameters": rope(1e5, partial_rotary_factor=0.5), "routed_scaling_factor": 1.5, "swiglu_limit": 1.5,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "index_n_heads": 2, "index_head_dim": 8,
    "index_block_size": 8, "index_topk_blocks": 4, "head_dim": 8,
}
_MOE = ".block_sparse_moe."
TESTS = FamilyTests(
    models={
        "minimax-m3-text": Model(
            "minimax_m3", {**_FIELDS, **NO_TOKENS}, kind="mixture", quick=True, correction_bias_in="block_sparse_moe",
            own_code=OwnCode(
                "minimax_m3_vl_text", "MiniMaxM3ForCausalLM",
                weights={
                    ".mlp.gate.e_score": f"{_MOE}e_score", ".mlp.gate.weight": f"{_MOE}gate.weight",
                    ".mlp.shared_experts.": f"{_MOE}shared_experts.", ".self_attn.indexer.": ".self_attn.index_",
                },
                split={
                    ".mlp.experts.gate_up_proj": tuple(f"{_MOE}experts.{{}}.{name}.weight" for name in ("w1", "w3")),
                    ".mlp.experts.down_proj": (f"{_MOE}experts.{{}}.w2.weight",),
                    ".gate_up_proj.": (".gate_proj.", ".up_proj."),
                },
            ),
        ),
        "minimax-m3": Model.wrapped(
            "minimax_m3_vl", _FIELDS,
            {
                "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                "patch_size": 4,
            },
            projector_hidden_size=32, image_token_index=256,
        ),
    },
)
