"""Qwen 2 to 3.5, dense, with experts, with gated delta nets and with image input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.families.family import (
    GRID_VISION,
    INTERNVL_VISION,
    NO_TOKENS,
    PACKED,
    TP2,
    Activations,
    FamilyTests,
    KTOStep,
    Model,
    OwnCode,
    SharedPrompts,
    adapters,
    adapters_of_all,
    mrope,
    rope,
)

# fmt: off
# three value heads for each of three key heads, which is padded at TP2; the last layer has attention
_DELTA_NET: dict[str, Any] = {
    "initializer_range": 0.12,  # at 0.3 gated norms enlarge the rounding of transformers beyond the tolerance
    "head_dim": 16, "linear_num_key_heads": 3, "linear_num_value_heads": 9, "linear_key_head_dim": 12,
    "linear_value_head_dim": 16, "full_attention_interval": 2,
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
_QWEN2_VISION: dict[str, Any] = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 1}
_QWEN3_VISION: dict[str, Any] = {**GRID_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
_QWEN3_5_VISION: dict[str, Any] = {**GRID_VISION, "num_position_embeddings": 16}
_TINY_DELTA_NET: dict[str, Any] = {  # three value heads for each of two key heads
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 12,
    "linear_value_head_dim": 8, "full_attention_interval": 2,
}
_TINY_EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": [1],
}
_WIDE_EXPERTS: dict[str, Any] = {"num_experts": 8, "moe_intermediate_size": 160, "shared_expert_intermediate_size": 320}
_WIDE_DELTA_NET: dict[str, Any] = {"head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 64}
_FOUR_HEADS: dict[str, Any] = {"linear_num_key_heads": 4, "linear_num_value_heads": 12}  # for two times two ranks
_EVERY_LAYER = adapters_of_all("Qwen3_5ForCausalLM")
TESTS = FamilyTests(
    tiny={
        "qwen2": {"tie_word_embeddings": True},
        "qwen3": {"tie_word_embeddings": True, "head_dim": 16},
        "qwen3_5_text": {"tie_word_embeddings": True, **_TINY_DELTA_NET},
        "qwen3_next": {
            "tie_word_embeddings": False, **_TINY_DELTA_NET, **_TINY_EXPERTS, "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [],
        },
        "qwen2_moe": {"tie_word_embeddings": False, "shared_expert_intermediate_size": 48, **_TINY_EXPERTS},
        "qwen3_moe": {"tie_word_embeddings": True, "head_dim": 16, **_TINY_EXPERTS},
    },
    models={
        "qwen2": Model(
            "qwen2", {"rope_parameters": rope(1e6)},
            lora=adapters("q_proj", "o_proj", "up_proj", layers=(2, 3), rslora=True, dora=True), quick_lora=True,
        ),
        "qwen2-tied-window": Model(
            "qwen2", {
                "rope_parameters": rope(1e5), "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 5,
                "max_window_layers": 2,
            }, quick=True,
        ),
        "mimo-7b": Model(
            "mimo", {"rope_parameters": rope(1e5)}, quick=True, own_code=OwnCode("qwen2", "MiMoForCausalLM"),
            mtp_layers=("model.mtp_layers.0.input_proj.weight", "model.mtp_layers.1.self_attn.q_proj.bias"),
        ),
        "qwen3.5-text": Model(
            "qwen3_5_text", {
                **_DELTA_NET, "rope_parameters": rope(1e6, partial_rotary_factor=0.5), "tie_word_embeddings": True,
                **NO_TOKENS,
            }, quick=True, lora=adapters("all", "in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", alpha=0.5),
            quick_lora=True,
        ),
        "qwen3": Model(
            "qwen3", {"rope_parameters": rope(1e6), "head_dim": 16}, quick=True,
            lora=adapters("k_proj", "mlp", alpha=16, layers=(2,)),
        ),
        "qwen3-tied-bias": Model(
            "qwen3", {"rope_parameters": rope(1e5), "head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}
        ),
        "qwen2-moe": Model(
            "qwen2_moe",
            {**_EXPERTS, "rope_parameters": rope(1e5), "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
            kind="mixture", quick=True, lora=adapters("q_proj", "mlp"), adapted_experts=3 * 8 * 3,
        ),
        "qwen2-moe-window": Model(
            "qwen2_moe", {
                **_EXPERTS, "rope_parameters": rope(1e6), "shared_expert_intermediate_size": 12, "norm_topk_prob": True,
                "qkv_bias": False, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3,
                "tie_word_embeddings": True,
            }, kind="mixture",
        ),
        "qwen3-next": Model(
            "qwen3_next", {
                **_DELTA_NET, **_EXPERTS, "rope_parameters": rope(1e6, partial_rotary_factor=0.25),
                "shared_expert_intermediate_size": 24, "mlp_only_layers": [1], "attention_bias": True, **NO_TOKENS,
            }, kind="mixture", quick=True, lora=adapters("all", "in_proj_qkvz", "in_proj_ba", "out_proj"),
            adapted_experts=3 * 8 * 3,
        ),
        "qwen3.5-moe-text": Model(
            "qwen3_5_moe_text", {
                **_DELTA_NET, **_EXPERTS, "rope_parameters": rope(1e6, partial_rotary_factor=0.5),
                "shared_expert_intermediate_size": 24, **NO_TOKENS,
            }, kind="mixture", quick=True, lora=adapters("in_proj_b", "q_proj", "mlp"), adapted_experts=4 * 8 * 3,
        ),
        "qwen3-moe": Model(
            "qwen3_moe", {**_EXPERTS, "rope_parameters": rope(1e6), "norm_topk_prob": True}, kind="mixture",
            lora=adapters("mlp", rank=3, alpha=2, layers=(2, 3), rslora=True), quick_lora=True, adapted_experts=2 * 8 * 3,
        ),
        "qwen3-moe-dense-layers": Model(
            "qwen3_moe", {
                **_EXPERTS, "rope_parameters": rope(1e5), "head_dim": 16, "attention_bias": True, "decoder_sparse_step": 2,
                "mlp_only_layers": [3], "tie_word_embeddings": True,
            }, kind="mixture", quick=True, lora=adapters("q_proj", "mlp", dropout=0.25, experts=False),
        ),
        "qwen2-vl": Model.wrapped("qwen2_vl", mrope(1, 1, 2), _QWEN2_VISION),
        "internvl3": Model.wrapped(
            "internvl", {"model_type": "qwen2", "rope_parameters": rope(1e5)}, INTERNVL_VISION, tie_word_embeddings=False
        ),
        "internvl3.5": Model.wrapped(
            "internvl", {"model_type": "qwen3", "rope_parameters": rope(1e5)}, INTERNVL_VISION, tie_word_embeddings=False
        ),
        "internvl3.5-moe": Model.wrapped(
            "internvl", {"model_type": "qwen3_moe", "rope_parameters": rope(1e5), **_EXPERTS}, INTERNVL_VISION,
            tie_word_embeddings=False,
        ),
        "qwen2.5-vl": Model.wrapped("qwen2_5_vl", mrope(1, 1, 2), {**GRID_VISION, "fullatt_block_indexes": [0]}),
        "qwen3-vl": Model.wrapped("qwen3_vl", mrope(2, 1, 1), _QWEN3_VISION, tie_word_embeddings=True),
        "qwen3.5": Model.wrapped("qwen3_5", mrope(1, 1, 0, **_DELTA_NET), _QWEN3_5_VISION),
        "qwen3.5-moe": Model.wrapped(
            "qwen3_5_moe", mrope(1, 1, 0, **_DELTA_NET, **_EXPERTS, shared_expert_intermediate_size=24), _QWEN3_5_VISION
        ),
        "qwen3-vl-moe": Model.wrapped("qwen3_vl_moe", mrope(2, 1, 1, **_EXPERTS), _QWEN3_VISION),
    },
    gradients={
        "qwen2": KTOStep("qwen2", quick=("dp2", "pp2_vp2")),
        "qwen3_5": KTOStep(
            "qwen3_5_text", {**_FOUR_HEADS, "linear_num_value_heads": 8},
            quick=("cp2_tp2_sequence_parallel", "tp2_pp2_sequence_parallel"),
        ),
        "qwen3_next": KTOStep(
            "qwen3_next", {"mlp_only_layers": [0, 1, 2, 3], **_FOUR_HEADS}, quick=("micro_batch_4", "packed_cp2")
        ),
    },
    shared_prompts={
        "states": SharedPrompts("qwen3_5_text", answers=2, with_prompts=True, quick=True),
        "states_packed": SharedPrompts("qwen3_5_text", answers=2, limits=PACKED),
        "states_tp2_pp2": SharedPrompts("qwen3_5_text", world_size=4, layout={"pipeline": 2, **TP2}),
        "states_recompute_lora": SharedPrompts("qwen3_5_text", layout={"recompute": "full"}, answers=2, lora=True),
        "states_and_experts": SharedPrompts(
            "qwen3_next", world_size=2, layout={**TP2, "expert": 2, "expert_tensor": 1}, answers=2, quick=True
        ),
    },
    wide={
        "qwen2_moe": {**_WIDE_EXPERTS, "mlp_only_layers": []},
        "qwen3_next": {**_WIDE_EXPERTS, **_WIDE_DELTA_NET},
        "qwen3_5_text": _WIDE_DELTA_NET,
    },
    activations=[
        Activations("qwen2_moe", lora=adapters("all", rank=4), quick=True),
        Activations("qwen2_moe", lora=adapters("all", rank=4, experts=False), quick=True),
        Activations("qwen3_5_text", quick=True),
        Activations("qwen3", dtype="bfloat16"),
        Activations("qwen3", {"packed": True, "tensor": 2}, dtype="bfloat16", lora=adapters("all", rank=4)),
        Activations("qwen2_moe", dtype="bfloat16", lora=adapters("all", rank=4, dropout=0.1)),
        Activations("qwen3_5_text", TP2, lora=_EVERY_LAYER),
        Activations("qwen3_5_text", {"packed": True, "tensor": 2}, dtype="bfloat16", lora=replace(_EVERY_LAYER, dora=True)),
        Activations("qwen3_next"),
        Activations("qwen3_5_text", {"context": 2}),
        Activations("qwen3_next", {"packed": True, "context": 2}, lora=adapters("all", rank=4)),
    ],
    trajectories={"qwen3": {}},
)
