"""Llama 1 to 3.x and what shares its architecture (SmolLM2, TinyLlama, Yi, ...)."""

from __future__ import annotations

from nemo_kto.models.families.dense import DENSE_MAPPINGS
from nemo_kto.models.families.table import Family

LLAMA = Family(
    name="llama",
    hf_architecture="LlamaForCausalLM",
    mappings=DENSE_MAPPINGS,
    flags={"qkv_bias": "attention_bias", "output_bias": "attention_bias", "mlp_bias": "mlp_bias"},
)
