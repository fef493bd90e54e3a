"""Qwen 2 and 2.5, dense: biases on query, key and value, and on nothing else."""

from __future__ import annotations

from nemo_kto.models.families.dense import DENSE_MAPPINGS
from nemo_kto.models.families.table import Family, window_by_layer_type

QWEN2 = Family(
    name="qwen2",
    hf_architecture="Qwen2ForCausalLM",
    mappings=DENSE_MAPPINGS,
    flags={"qkv_bias": True},
    windows=window_by_layer_type,
)
