"""DeepSeek V3, R1, Moonlight and Kimi K2: latent attention, experts chosen by sigmoid scores in groups."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from annotated_types import MultipleOf

from nemo_kto.architecture.config_fields import ABSENT, Count
from nemo_kto.architecture.families.glm import GLM4_MOE, GlmMoeFields
from nemo_kto.architecture.mappings import without
from nemo_kto.architecture.mixers import LatentAttention
from nemo_kto.architecture.mixers.latent_attention import WEIGHTS

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class LatentAttentionFields(GlmMoeFields):
    """Fields of config.json with the sizes of latent attention."""

    kv_lora_rank: Count = ABSENT
    q_lora_rank: Count | None = None
    qk_nope_head_dim: Count = ABSENT
    qk_rope_head_dim: Annotated[Count, MultipleOf(2)] = ABSENT
    v_head_dim: Count = ABSENT
    rope_interleave: bool = ABSENT


def _mixers(config: PretrainedConfig) -> tuple[LatentAttention, ...]:
    heads = config.num_attention_heads
    if (groups := config.num_key_value_heads) != heads:
        text = f"num_key_value_heads must be num_attention_heads, {heads}, for latent attention"
        raise ValueError(f"{text}, got {groups}; correct it")
    if config.attention_bias:
        raise ValueError("attention_bias must be false for latent attention, got true; choose another model")
    mixer = LatentAttention(
        heads=heads,
        query_rank=config.q_lora_rank,
        key_value_rank=config.kv_lora_rank,
        plain_dim=config.qk_nope_head_dim,
        rotated_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        interleaved=getattr(config, "rope_interleave", True),
    )
    return (mixer,) * config.num_hidden_layers


def _scale(config: PretrainedConfig) -> float:
    """Return the factor on the scores, which grows with that of YaRN if ``mscale_all_dim`` is given."""
    rope = config.rope_parameters
    stretch = rope.get("factor", 1.0) if rope["rope_type"] != "default" else 1.0
    mscale = 0.1 * (rope.get("mscale_all_dim") or 0.0) * math.log(max(stretch, 1.0)) + 1.0
    return float(mscale**2 / config.qk_head_dim**0.5)


DEEPSEEK_V3 = replace(
    GLM4_MOE,
    name="deepseek_v3",
    hf_architecture="DeepseekV3ForCausalLM",
    mappings=(*without(GLM4_MOE.mappings, "self_attention."), *WEIGHTS),
    fields=LatentAttentionFields,
    flags={},
    numbers={
        "head_dim": lambda config: max(config.qk_head_dim, config.v_head_dim),
        "attention_multiplier": _scale,
    },
    own_head_dim=True,
    partial_rotary=False,
    mixers=_mixers,
)
