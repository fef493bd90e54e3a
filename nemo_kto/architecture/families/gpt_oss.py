"""gpt-oss: sinks in the softmax of each head, biases everywhere, a clamped SwiGLU, a window in every second layer."""

from __future__ import annotations

from dataclasses import replace

from nemo_kto.architecture.config_fields import ABSENT, ModelFields, Positive
from nemo_kto.architecture.family import SLIDING_LAYERS, ExpertFields, Family
from nemo_kto.architecture.mappings import DENSE, INTERNVL, joined_experts, without
from nemo_kto.mixers.param_mapping import Split
from nemo_kto.mixers.softmax_attention import SINKS


class GptOssFields(ModelFields):
    swiglu_alpha: Positive = ABSENT
    swiglu_limit: Positive = ABSENT


GPT_OSS = Family(
    name="gpt_oss",
    hf_architecture="GptOssForCausalLM",
    published="gpt-oss 20B, 120B",
    mappings=(*without(DENSE, "mlp."), SINKS, *joined_experts("mlp", Split.INTERLEAVED, biases=True)),
    fields=GptOssFields,
    flags={"qkv_bias": "attention_bias", "output_bias": "attention_bias", "sinks": True, "expert_bias": True},
    numbers={"swiglu_alpha": "swiglu_alpha", "swiglu_limit": "swiglu_limit"},
    window=SLIDING_LAYERS,
    own_head_dim=True,
    mxfp4=True,
    experts=ExpertFields(),
)
INTERNVL_GPT_OSS = replace(GPT_OSS, published="InternVL3.5-HF GPT-OSS-20B-A4B", text_type=GPT_OSS.name, **INTERNVL)
