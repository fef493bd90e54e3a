"""Latent attention: DeepSeek V2 to V3.2 and R1, Moonlight, Kimi K2, GLM 4.7 Flash and 5, Mistral Small 4."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from nemo_kto.architecture.families.glm import GLM4_MOE
from nemo_kto.architecture.families.llama import MINISTRAL3
from nemo_kto.architecture.family import ExpertFields
from nemo_kto.architecture.mappings import JOINED, LLAVA, MTP_LAYERS, without
from nemo_kto.mixers import LatentAttention
from nemo_kto.mixers.mla import WEIGHTS

if TYPE_CHECKING:
    from transformers import PretrainedConfig


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
    stretch = (rope.get("factor") or 1.0) if rope["rope_type"] != "default" else 1.0
    mscale = 0.1 * (rope.get("mscale_all_dim") or 0.0) * math.log(max(stretch, 1.0)) + 1.0
    return float(mscale**2 / config.qk_head_dim**0.5)


def _v2_mixers(config: PretrainedConfig) -> tuple[LatentAttention, ...]:
    method, groups = config.topk_method, config.n_group or 1
    if method not in ("greedy", "group_limited_greedy") or (method == "greedy" and groups > 1):
        text = "topk_method must be group_limited_greedy, or greedy with n_group 1"
        raise ValueError(f"{text}, got {method!r} with {groups}; choose another model")
    if config.norm_topk_prob:
        raise ValueError("norm_topk_prob must be false for deepseek_v2, got true; choose another model")
    return _mixers(config)


def _indexed_mixers(config: PretrainedConfig) -> tuple[LatentAttention, ...]:
    # transformers ignores rope_interleave
    return tuple(replace(mixer, interleaved=True) for mixer in _mixers(config))


_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_interleave")
DEEPSEEK_V3 = replace(
    GLM4_MOE,
    name="deepseek_v3",
    hf_architecture="DeepseekV3ForCausalLM",
    published="DeepSeek V3, V3.1, R1, Moonlight, Kimi K2",
    aliases=("kimi_k2",),
    mappings=(*without(GLM4_MOE.mappings, "self_attention."), *WEIGHTS),
    flags={},
    own=("attention_bias", *_LATENT),
    rope_own=("mscale_all_dim",),
    numbers={"head_dim": lambda config: max(config.qk_head_dim, config.v_head_dim), "attention_multiplier": _scale},
    own_head_dim=True,
    partial_rotary=False,
    mixers=_mixers,
)
_EXPERTS = cast(ExpertFields, DEEPSEEK_V3.experts)
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="glm4_moe_lite",
    hf_architecture="Glm4MoeLiteForCausalLM",
    published="GLM 4.7 Flash",
    aliases=(),
    experts=replace(_EXPERTS, layer_kinds="mlp_layer_types", first_layer=""),
)
# an indexer chooses index_topk keys for each token, in some layers of GLM 5.2 those of an earlier layer
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="deepseek_v32",
    hf_architecture="DeepseekV32ForCausalLM",
    published="DeepSeek V3.2",
    aliases=(),
    own=tuple(name for name in DEEPSEEK_V3.own if name != "rope_interleave"),
    experts=replace(_EXPERTS, layer_kinds="mlp_layer_types"),
    chosen_keys="index_topk",
    renewed=lambda config: {"index_topk": 2048, **config},  # transformers' default
    untrained={**MTP_LAYERS, "indexers": r"{model}layers\.(?!{layers}\.)\d+\.self_attn\.indexer"},
    mixers=_indexed_mixers,
)
GLM_MOE_DSA = replace(
    DEEPSEEK_V32, name="glm_moe_dsa", hf_architecture="GlmMoeDsaForCausalLM", published="GLM-5, GLM-5.1, GLM-5.2"
)
# scores of experts are a softmax and never normalized, and there is no correction bias; a group counts by its best expert
DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    name="deepseek_v2",
    hf_architecture="DeepseekV2ForCausalLM",
    published="DeepSeek V2, V2.5, V2 Lite, Coder V2",
    aliases=(),
    mappings=without(DEEPSEEK_V3.mappings, "mlp.router.correction_bias"),
    experts=replace(_EXPERTS, normalized=False, sigmoid=False, correction=(), best_of_group=1),
    untrained={},
    mixers=_v2_mixers,
    own=(*DEEPSEEK_V3.own, "topk_method", "norm_topk_prob"),
)
# its text model may be called kimi_k2, and transformers has another name of the class
KIMI_K25 = replace(
    DEEPSEEK_V3,
    name="kimi_k25",
    hf_architecture="KimiK25ForConditionalGeneration",
    published="Kimi K2.5, K2.6, K2.7",
    text_type=DEEPSEEK_V3.name,
    **{**LLAVA, "untrained": {"vision tower": r"(model\.)?vision_tower\.", "projector": r"(model\.)?mm_projector\."}},
)
KIMI_K25_OF_TRANSFORMERS = replace(
    KIMI_K25, hf_architecture="Kimi_K25ForConditionalGeneration", published="Kimi K2.5, as transformers writes it"
)
# experts are joined; queries grow with the position; published in the place of Mistral 3's text model
MISTRAL4 = replace(
    DEEPSEEK_V3,
    name="mistral3",
    hf_architecture="Mistral3ForConditionalGeneration",
    published="Mistral Small 4",
    text_type="mistral4",
    aliases=(),
    mappings=(*without(DEEPSEEK_V2.mappings, "mlp.experts."), *JOINED),
    experts=replace(_EXPERTS, sigmoid=False, correction=(), router_in_fp32=False),
    temperature=MINISTRAL3.temperature,
    rope_own=MINISTRAL3.rope_own,
    **LLAVA,
)
