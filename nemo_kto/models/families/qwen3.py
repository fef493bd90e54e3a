"""Qwen 3, dense: a norm on every query and key head, and a head size of its own."""

from __future__ import annotations

from nemo_kto.models.families.dense import DENSE_MAPPINGS, QK_NORM_MAPPINGS
from nemo_kto.models.families.table import Family, window_by_layer_type

QWEN3 = Family(
    name="qwen3",
    hf_architecture="Qwen3ForCausalLM",
    mappings=DENSE_MAPPINGS + QK_NORM_MAPPINGS,
    flags={"qk_norm": True, "qkv_bias": "attention_bias", "output_bias": "attention_bias"},
    windows=window_by_layer_type,
)
