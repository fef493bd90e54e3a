"""Llama 4: chunked attention in layers with RoPE, temperature scaling in others, routed and shared experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nemo_kto.architecture.config_fields import ABSENT, Count, Indices, ModelFields, Positive
from nemo_kto.architecture.family import CHUNKED_LAYERS, ExpertFields, Family, Temperature
from nemo_kto.architecture.mappings import DENSE, LLAVA, joined_experts, shared_expert, with_experts
from nemo_kto.architecture.param_mapping import Split

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Llama4Fields(ModelFields):
    intermediate_size_mlp: Count = ABSENT
    moe_layers: Indices | None = None
    interleave_moe_layer_step: Count = ABSENT
    use_qk_norm: bool = ABSENT
    attention_chunk_size: Count | None = None
    attn_temperature_tuning: bool = ABSENT
    floor_scale: Count = ABSENT
    attn_scale: Positive = ABSENT


def _temperature(config: PretrainedConfig) -> Temperature | None:
    tuned = config.attn_temperature_tuning
    return Temperature(floor=config.floor_scale, scale=config.attn_scale) if tuned else None


_BLOCK = "feed_forward"
_MLPS = tuple(
    replace(mapping, hf_names={name.replace(".mlp.", f".{_BLOCK}."): shape for name, shape in mapping.hf_names.items()})
    for mapping in DENSE
)
LLAMA4 = Family(
    name="llama4_text",
    hf_architecture="Llama4ForCausalLM",
    published="Llama 4, text model",
    mappings=with_experts(_MLPS, (*joined_experts(_BLOCK, Split.GATED), *shared_expert(_BLOCK))),
    fields=Llama4Fields,
    flags={"qkv_bias": "attention_bias", "output_bias": "attention_bias", "rotated_norm": "use_qk_norm"},
    window=CHUNKED_LAYERS,
    no_rope_layers=True,
    interleaved_rotary=True,
    temperature=_temperature,
    own_head_dim=True,
    dense_width="intermediate_size_mlp",
    experts=ExpertFields(
        shared_ffn_hidden_size="intermediate_size",
        normalized=False,
        sparse_layers="moe_layers",
        sparse_step="interleave_moe_layer_step",
        shared_gate=False,
        weighs_input=True,
    ),
)
LLAMA4_VISION = replace(
    LLAMA4,
    name="llama4",
    hf_architecture="Llama4ForConditionalGeneration",
    published="Llama 4 Scout, Maverick",
    text_type=LLAMA4.name,
    ties_in_text=True,
    **{**LLAVA, "module_prefix": "language_model.model."},
)
