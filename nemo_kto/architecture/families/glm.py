"""GLM 4 (norms before and after attention and MLP), GLM 4.5 to 4.7 and dots.llm1 (experts chosen by sigmoid scores)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from nemo_kto.architecture.config_fields import ABSENT, Count, ModelFields, OrZero, PartCount, Positive, Switch
from nemo_kto.architecture.family import SLIDING_LAYERS, ExpertFields, Family
from nemo_kto.architecture.mappings import (
    DENSE,
    GATE_UP,
    MTP_LAYERS,
    QWEN_VL,
    correction_bias,
    renamed,
    separate_experts,
    shared_expert,
    with_experts,
)
from nemo_kto.mixers.param_mapping import replicated
from nemo_kto.mixers.softmax_attention import qk_norms


class GlmMoeFields(ModelFields):
    """Fields of config.json with experts and latent attention."""

    use_qk_norm: Switch = ABSENT
    n_routed_experts: PartCount = ABSENT
    n_shared_experts: OrZero | None = None
    n_group: OrZero | None = None
    topk_group: OrZero | None = None
    first_k_dense_replace: OrZero | None = None
    moe_intermediate_size: Count = ABSENT
    norm_topk_prob: Switch | None = None
    routed_scaling_factor: Positive = ABSENT
    mlp_layer_types: list[Literal["dense", "sparse"]] | None = None
    topk_method: str | None = None
    kv_lora_rank: Count = ABSENT
    q_lora_rank: Count | None = None
    qk_nope_head_dim: Count = ABSENT
    qk_rope_head_dim: Count = ABSENT
    v_head_dim: Count = ABSENT
    rope_interleave: Switch = ABSENT
    index_topk: Count = ABSENT


GLM4 = Family(
    name="glm4",
    hf_architecture="Glm4ForCausalLM",
    published="GLM-4-0414, GLM-Z1",
    mappings=(
        *renamed(DENSE, GATE_UP),
        replicated("post_attention_layernorm.weight", "post_self_attn_layernorm.weight", "hidden"),
        replicated("post_mlp_layernorm.weight", "post_mlp_layernorm.weight", "hidden"),
    ),
    flags={"qkv_bias": "attention_bias", "post_norm": True},
    partial_rotary=True,
    interleaved_rotary=True,
    own_head_dim=True,
)
# the text of GLM 4, whose queries, keys and values always have biases
GLM4V = replace(
    GLM4,
    name="glm4v",
    hf_architecture="Glm4vForConditionalGeneration",
    published="GLM-4.1V-9B, GLM-4.6V-Flash",
    text_type="glm4v_text",
    flags={**GLM4.flags, "qkv_bias": True},
    own_head_dim=False,
    ties_in_either=True,
    **QWEN_VL,
)
# the first layers have one MLP; a shared expert, and a correction bias for the choice of experts
GLM4_MOE = Family(
    name="glm4_moe",
    hf_architecture="Glm4MoeForCausalLM",
    published="GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7",
    mappings=with_experts(
        DENSE + tuple(replace(norm, required_flag="qk_norm") for norm in qk_norms("head", "head")),
        (
            *separate_experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
            *shared_expert("mlp.shared_experts"),
            correction_bias("mlp.gate.e_score_correction_bias", "experts"),
        ),
    ),
    fields=GlmMoeFields,
    flags={"qkv_bias": "attention_bias", "qk_norm": "use_qk_norm"},
    partial_rotary=True,
    experts=ExpertFields(
        number="n_routed_experts",
        ffn_hidden_size="moe_intermediate_size",
        shared_experts="n_shared_experts",
        shared_gate=False,
        normalized="norm_topk_prob",
        first_layer="first_k_dense_replace",
        sigmoid=True,
        correction=(-1,),
        groups="n_group",
        chosen_groups="topk_group",
        scale="routed_scaling_factor",
    ),
    untrained=MTP_LAYERS,
)
GLM4V_MOE = replace(
    GLM4_MOE,
    name="glm4v_moe",
    hf_architecture="Glm4vMoeForConditionalGeneration",
    published="GLM-4.5V, GLM-4.6V",
    text_type="glm4v_moe_text",
    flags={"qkv_bias": "attention_bias"},
    ties_in_either=True,
    **{**QWEN_VL, "untrained": {**QWEN_VL["untrained"], **MTP_LAYERS}},
)
DOTS1 = replace(
    GLM4_MOE,
    name="dots1",
    hf_architecture="Dots1ForCausalLM",
    published="dots.llm1",
    flags={"qkv_bias": "attention_bias", "output_bias": "attention_bias", "qk_norm": True},
    partial_rotary=False,
    untrained={},
    window=SLIDING_LAYERS,
    layer_pattern="max_window_layers",
)
