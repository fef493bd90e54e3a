"""Phi 3, 3.5 and 4: Llama with fused tensors, Mistral's window, and in some models a rotation of a part of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_kto.architecture.families.mappings import DENSE, renamed
from nemo_kto.architecture.families.table import Family, window_everywhere


def _yarn_is_longrope(config: Mapping[str, Any], layer_type: str) -> Mapping[str, Any]:
    """Return the configuration with longrope in the place of yarn, as transformers reads it."""
    settings = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    if settings.get("rope_type", settings.get("type")) != "yarn":
        return config
    return {**config, "rope_scaling": None, "rope_parameters": {**settings, "rope_type": "longrope"}}


PHI3 = Family(
    name="phi3",
    hf_architecture="Phi3ForCausalLM",
    mappings=renamed(
        DENSE,
        {
            "self_attention.linear_qkv.weight": {"self_attn.qkv_proj.weight": ("query_key_value", "hidden")},
            "mlp.linear_fc1.weight": {"mlp.gate_up_proj.weight": ("gate_and_up", "hidden")},
        },
    ),
    windows=window_everywhere,
    rope=_yarn_is_longrope,
    partial_rotary=True,
)
