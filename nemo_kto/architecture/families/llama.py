"""Llama 1 to 3.x and models of the same architecture (SmolLM2, TinyLlama, Yi, ...), and SmolLM 3."""

from __future__ import annotations

from dataclasses import replace

from nemo_kto.architecture.families.mappings import DENSE
from nemo_kto.architecture.families.table import Family, no_rope_layers, window_by_layer_type

LLAMA = Family(
    name="llama",
    hf_architecture="LlamaForCausalLM",
    mappings=DENSE,
    flags={"qkv_bias": "attention_bias", "output_bias": "attention_bias", "mlp_bias": "mlp_bias"},
)
# without rotary embeddings in every fourth layer
SMOLLM3 = replace(
    LLAMA,
    name="smollm3",
    hf_architecture="SmolLM3ForCausalLM",
    windows=window_by_layer_type,
    rotates=no_rope_layers,
)
