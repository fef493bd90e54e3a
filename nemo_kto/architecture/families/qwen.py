"""Qwen 1.5, 2, 2.5 and 3, dense and with experts, and with image input."""

from __future__ import annotations

from dataclasses import replace

from nemo_kto.architecture.config_fields import ABSENT, Count, Indices, ModelFields, PartCount
from nemo_kto.architecture.family import SLIDING, SLIDING_LAYERS, ExpertFields, Family
from nemo_kto.architecture.mappings import (
    DENSE,
    QWEN_VL,
    joined_experts,
    separate_experts,
    shared_expert,
    sparse,
    with_experts,
)
from nemo_kto.architecture.mixers.softmax_attention import qk_norms
from nemo_kto.architecture.param_mapping import Split


class QwenMoeFields(ModelFields):
    """Fields of config.json; layers have experts except ``mlp_only_layers``, or every ``decoder_sparse_step``-th has."""

    num_experts: PartCount = ABSENT
    moe_intermediate_size: Count = ABSENT
    shared_expert_intermediate_size: Count = ABSENT
    decoder_sparse_step: Count = ABSENT
    mlp_only_layers: Indices | None = None
    norm_topk_prob: bool = ABSENT
    qkv_bias: bool = ABSENT


_EXPERT_FIELDS = ExpertFields(
    number="num_experts",
    ffn_hidden_size="moe_intermediate_size",
    normalized="norm_topk_prob",
    sparse_step="decoder_sparse_step",
    dense_layers="mlp_only_layers",
)
_EXPERTS = separate_experts("mlp", gate="gate_proj", up="up_proj", down="down_proj")
_SHARED_GATE = sparse("mlp.shared_experts.gate_weight", {"mlp.shared_expert_gate.weight": (1, "hidden")}, Split.REPLICATED)
# Qwen 2 and 2.5: biases only on query, key and value
QWEN2 = Family(
    name="qwen2",
    hf_architecture="Qwen2ForCausalLM",
    published="Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen",
    mappings=DENSE,
    flags={"qkv_bias": True},
    window=SLIDING_LAYERS,
)
# Qwen 1.5 and 2 with narrow experts and a shared expert
QWEN2_MOE = Family(
    name="qwen2_moe",
    hf_architecture="Qwen2MoeForCausalLM",
    published="Qwen1.5-MoE, Qwen2-57B-A14B",
    mappings=with_experts(DENSE, (*_EXPERTS, *shared_expert("mlp"), _SHARED_GATE)),
    fields=QwenMoeFields,
    flags={"qkv_bias": "qkv_bias"},
    window=SLIDING_LAYERS,
    experts=replace(_EXPERT_FIELDS, shared_ffn_hidden_size="shared_expert_intermediate_size"),
)
# Qwen 3: a norm on every query and key head, and a head size that is set separately
QWEN3 = Family(
    name="qwen3",
    hf_architecture="Qwen3ForCausalLM",
    published="Qwen3 0.6B to 32B",
    mappings=DENSE + qk_norms("head", "head"),
    flags={"qk_norm": True, "qkv_bias": "attention_bias", "output_bias": "attention_bias"},
    window=SLIDING_LAYERS,
    own_head_dim=True,
)
# Qwen 3 with many narrow experts, in some models not in every layer
QWEN3_MOE = Family(
    name="qwen3_moe",
    hf_architecture="Qwen3MoeForCausalLM",
    published="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
    mappings=with_experts(QWEN3.mappings, _EXPERTS),
    fields=QwenMoeFields,
    flags=QWEN3.flags,
    window=SLIDING,
    experts=_EXPERT_FIELDS,
)
QWEN2_5_VL = replace(
    QWEN2,
    name="qwen2_5_vl",
    hf_architecture="Qwen2_5_VLForConditionalGeneration",
    published="Qwen2.5-VL",
    text_type="qwen2_5_vl_text",
    flat_config=True,
    **QWEN_VL,
)
QWEN3_VL = replace(
    QWEN3,
    name="qwen3_vl",
    hf_architecture="Qwen3VLForConditionalGeneration",
    published="Qwen3-VL 2B to 32B",
    text_type="qwen3_vl_text",
    window=("", ""),
    **QWEN_VL,
)
# the experts of a layer are joined, in published files transposed; the weights of a token's experts always sum to 1
_JOINED = tuple(replace(each, transposed=False) for each in joined_experts("mlp", Split.GATED)[1:])
QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    name="qwen3_vl_moe",
    hf_architecture="Qwen3VLMoeForConditionalGeneration",
    published="Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B",
    mappings=with_experts(QWEN3.mappings, (_EXPERTS[0], *_JOINED)),
    text_type="qwen3_vl_moe_text",
    window=("", ""),
    experts=replace(_EXPERT_FIELDS, normalized=True),
    either_order=True,
    **QWEN_VL,
)
