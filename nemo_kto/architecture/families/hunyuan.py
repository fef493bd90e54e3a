"""Hunyuan: norms of queries and keys after RoPE."""

from __future__ import annotations

from nemo_kto.architecture.family import Family
from nemo_kto.architecture.mappings import DENSE
from nemo_kto.architecture.mixers.softmax_attention import NORMS_AFTER_ROPE

HUNYUAN_DENSE = Family(
    name="hunyuan_v1_dense",
    hf_architecture="HunYuanDenseV1ForCausalLM",
    published="Hunyuan 0.5B to 7B",
    mappings=DENSE + NORMS_AFTER_ROPE,
    flags={
        "qkv_bias": "attention_bias",
        "output_bias": "attention_bias",
        "qk_norm": True,
        "qk_norm_after_rope": True,
    },
)
