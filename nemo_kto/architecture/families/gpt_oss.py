"""gpt-oss: sinks in the softmax of each head, biases everywhere, a clamped SwiGLU, a window in every second layer."""

from __future__ import annotations

from nemo_kto.architecture.families.fields import ABSENT, ModelFields, Positive
from nemo_kto.architecture.families.mappings import DENSE, HF, MCORE, joined_experts, without
from nemo_kto.architecture.families.table import SLIDING_LAYERS, ExpertFields, Family, ParamMapping, Split


class GptOssFields(ModelFields):
    swiglu_alpha: Positive = ABSENT
    swiglu_limit: Positive = ABSENT


_SINKS = ParamMapping(
    mcore_name=MCORE + "self_attention.core_attention.softmax_offset",
    hf_names={HF + "self_attn.sinks": ("heads",)},
    split=Split.HEAD_NUMBERS,
)
GPT_OSS = Family(
    name="gpt_oss",
    hf_architecture="GptOssForCausalLM",
    mappings=(*without(DENSE, "mlp."), _SINKS, *joined_experts("mlp", Split.INTERLEAVED, biases=True)),
    fields=GptOssFields,
    flags={"qkv_bias": "attention_bias", "output_bias": "attention_bias", "sinks": True, "expert_bias": True},
    numbers={"swiglu_alpha": "swiglu_alpha", "swiglu_limit": "swiglu_limit"},
    window=SLIDING_LAYERS,
    own_head_dim=True,
    mxfp4=True,
    experts=ExpertFields(),
)
