"""Hunyuan, dense and with experts: norms of queries and keys after RoPE."""

from __future__ import annotations

from dataclasses import replace

from nemo_kto.architecture.config_fields import ABSENT, Count, ModelFields, PartCount
from nemo_kto.architecture.family import ExpertFields, Family
from nemo_kto.architecture.mappings import DENSE, separate_experts, shared_expert, sparse, with_experts
from nemo_kto.mixers.param_mapping import Split
from nemo_kto.mixers.softmax_attention import NORMS_AFTER_ROPE


class HunyuanMoeFields(ModelFields):
    num_experts: PartCount = ABSENT
    moe_topk: Count | list[Count] = ABSENT


HUNYUAN_DENSE = Family(
    name="hunyuan_v1_dense",
    hf_architecture="HunYuanDenseV1ForCausalLM",
    published="Hunyuan 0.5B to 7B",
    mappings=DENSE + NORMS_AFTER_ROPE,
    flags={"qkv_bias": "attention_bias", "output_bias": "attention_bias", "qk_norm": True, "qk_norm_after_rope": True},
)
# experts in every layer, and a shared one of the same width without a gate
HUNYUAN_MOE = replace(
    HUNYUAN_DENSE,
    name="hunyuan_v1_moe",
    hf_architecture="HunYuanMoEV1ForCausalLM",
    published="Hunyuan-A13B",
    mappings=with_experts(
        HUNYUAN_DENSE.mappings,
        (
            sparse("mlp.router.weight", {"mlp.gate.wg.weight": ("experts", "hidden")}, Split.REPLICATED),
            *separate_experts("mlp", gate="gate_proj", up="up_proj", down="down_proj")[1:],
            *shared_expert("mlp.shared_mlp"),
        ),
    ),
    fields=HunyuanMoeFields,
    experts=ExpertFields(
        number="num_experts", chosen="moe_topk", shared_ffn_hidden_size="intermediate_size", shared_gate=False
    ),
)
