"""Qwen 1.5, 2, 2.5, 3, 3 Next and 3.5 to 3.8, dense and with experts, and with image input, also in InternVL."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from nemo_kto.architecture.config_fields import ABSENT, Count, Indices, ModelFields, PartCount, Switch
from nemo_kto.architecture.family import LINEAR_LAYERS, SLIDING, SLIDING_LAYERS, ExpertFields, Family, with_required
from nemo_kto.architecture.mappings import (
    DENSE,
    INTERNVL,
    JOINED,
    MTP_LAYERS,
    QWEN_VL,
    renamed,
    separate_experts,
    shared_expert,
    sparse,
    with_experts,
)
from nemo_kto.mixers import SOFTMAX_ATTENTION, GatedDeltaNet, SequenceMixer
from nemo_kto.mixers.gated_delta_net import BY_HEAD, BY_KIND
from nemo_kto.mixers.param_mapping import Split
from nemo_kto.mixers.softmax_attention import QUERY_AND_GATE, qk_norms

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class QwenFields(ModelFields):
    """Fields of config.json; layers have experts except ``mlp_only_layers``, or every ``decoder_sparse_step``-th has."""

    num_experts: PartCount = ABSENT
    moe_intermediate_size: Count = ABSENT
    shared_expert_intermediate_size: Count = ABSENT
    decoder_sparse_step: Count = ABSENT
    mlp_only_layers: Indices | None = None
    norm_topk_prob: Switch = ABSENT
    qkv_bias: Switch = ABSENT
    # gated delta nets
    linear_num_key_heads: Count = ABSENT
    linear_num_value_heads: Count = ABSENT
    linear_key_head_dim: Count = ABSENT
    linear_value_head_dim: Count = ABSENT
    linear_conv_kernel_dim: Annotated[Count, Ge(2)] = ABSENT
    full_attention_interval: Count = ABSENT


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
    window_switch="use_sliding_window",
    layer_pattern="max_window_layers",
)
_GIVEN = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")
MIMO = replace(
    QWEN2,
    name="mimo",
    hf_architecture="MiMoForCausalLM",
    published="MiMo-7B",
    config_type=QWEN2.name,
    untrained=MTP_LAYERS,
    renewed=partial(with_required, names=(*_GIVEN, "max_position_embeddings", "rms_norm_eps", "rope_theta", "vocab_size")),
)
# Qwen 1.5 and 2 with narrow experts and a shared expert
QWEN2_MOE = Family(
    name="qwen2_moe",
    hf_architecture="Qwen2MoeForCausalLM",
    published="Qwen1.5-MoE, Qwen2-57B-A14B",
    mappings=with_experts(DENSE, (*_EXPERTS, *shared_expert("mlp.shared_expert"), _SHARED_GATE)),
    fields=QwenFields,
    flags={"qkv_bias": "qkv_bias"},
    window=SLIDING_LAYERS,
    window_switch="use_sliding_window",
    layer_pattern="max_window_layers",
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
    window_switch="use_sliding_window",
    layer_pattern="max_window_layers",
    own_head_dim=True,
)
# Qwen 3 with many narrow experts, in some models not in every layer
QWEN3_MOE = Family(
    name="qwen3_moe",
    hf_architecture="Qwen3MoeForCausalLM",
    published="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
    mappings=with_experts(QWEN3.mappings, _EXPERTS),
    fields=QwenFields,
    flags=QWEN3.flags,
    window=SLIDING,
    window_switch="use_sliding_window",
    experts=_EXPERT_FIELDS,
)
QWEN2_5_VL = replace(
    QWEN2,
    name="qwen2_5_vl",
    hf_architecture="Qwen2_5_VLForConditionalGeneration",
    published="Qwen2.5-VL",
    text_type="qwen2_5_vl_text",
    flat_config=True,
    ties_in_either=True,
    **QWEN_VL,
)
QWEN2_VL = replace(
    QWEN2_5_VL,
    name="qwen2_vl",
    hf_architecture="Qwen2VLForConditionalGeneration",
    published="Qwen2-VL",
    text_type="qwen2_vl_text",
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
QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    name="qwen3_vl_moe",
    hf_architecture="Qwen3VLMoeForConditionalGeneration",
    published="Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B",
    mappings=with_experts(QWEN3.mappings, (_EXPERTS[0], *JOINED)),
    text_type="qwen3_vl_moe_text",
    window=("", ""),
    experts=replace(_EXPERT_FIELDS, normalized=True),
    either_order=True,
    **QWEN_VL,
)

# files of transformers (-HF); older ones are of the class InternVLChatModel
INTERNVL_QWEN2 = replace(QWEN2, published="InternVL3-HF", text_type=QWEN2.name, **INTERNVL)
INTERNVL_QWEN3 = replace(QWEN3, published="InternVL3.5-HF 1B to 38B", text_type=QWEN3.name, **INTERNVL)
INTERNVL_QWEN3_MOE = replace(QWEN3_MOE, published="InternVL3.5-HF 30B-A3B, 241B-A28B", text_type=QWEN3_MOE.name, **INTERNVL)


def _mixers(config: PretrainedConfig) -> tuple[SequenceMixer, ...]:
    """Return attention, or a gated delta net where ``layer_types`` has linear attention."""
    delta_net = GatedDeltaNet(
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        kernel=config.linear_conv_kernel_dim,
    )
    return tuple(delta_net if kind == "linear_attention" else SOFTMAX_ATTENTION for kind in config.layer_types)


# Qwen 3.5 to 3.8: three gated delta nets, then attention with a gate on its output
_DELTA_NET: dict[str, Any] = {
    "fields": QwenFields,
    "flags": {**QWEN3.flags, "output_gate": True, "zero_centered_norm": True},
    "window": LINEAR_LAYERS,
    "layer_pattern": "full_attention_interval",
    "recurrent": tuple(name for name in QwenFields.model_fields if name.startswith("linear_")),
    "own_head_dim": True,
    "partial_rotary": True,
    "mixers": _mixers,
    "untrained": MTP_LAYERS,
}
_GATED = renamed(QWEN3.mappings, QUERY_AND_GATE)
QWEN3_5_TEXT = Family(
    name="qwen3_5_text",
    hf_architecture="Qwen3_5ForCausalLM",
    published="Qwen3.5 to Qwen3.8, dense, without image input",
    mappings=_GATED + BY_KIND,
    **_DELTA_NET,
)
_WRAPPED: dict[str, Any] = {**QWEN_VL, "untrained": {**QWEN_VL["untrained"], **MTP_LAYERS}}
QWEN3_5 = replace(
    QWEN3_5_TEXT,
    name="qwen3_5",
    hf_architecture="Qwen3_5ForConditionalGeneration",
    published="Qwen3.5 to Qwen3.8, dense",
    text_type="qwen3_5_text",
    **_WRAPPED,
)
_SHARED = (*shared_expert("mlp.shared_expert"), _SHARED_GATE)
QWEN3_NEXT = Family(
    name="qwen3_next",
    hf_architecture="Qwen3NextForCausalLM",
    published="Qwen3-Next-80B-A3B, Qwen3-Coder-Next",
    mappings=with_experts(_GATED + BY_HEAD, (*_EXPERTS, *_SHARED)),
    experts=replace(_EXPERT_FIELDS, shared_ffn_hidden_size="shared_expert_intermediate_size"),
    **_DELTA_NET,
)
QWEN3_5_MOE_TEXT = replace(
    QWEN3_NEXT,
    name="qwen3_5_moe_text",
    hf_architecture="Qwen3_5MoeForCausalLM",
    published="Qwen3.5 to Qwen3.8 with experts, without image input",
    mappings=with_experts(_GATED + BY_KIND, (*_EXPERTS, *_SHARED)),
    joined=JOINED,
    dense_width="moe_intermediate_size",
    experts=replace(_EXPERT_FIELDS, shared_ffn_hidden_size="shared_expert_intermediate_size", normalized=True),
)
QWEN3_5_MOE = replace(
    QWEN3_5_MOE_TEXT,
    name="qwen3_5_moe",
    hf_architecture="Qwen3_5MoeForConditionalGeneration",
    published="Qwen3.5 to Qwen3.8 with experts: 35B-A3B, 122B-A10B, 397B-A17B; not Qwen3.8-Flash-Next",
    text_type="qwen3_5_moe_text",
    **_WRAPPED,
)
