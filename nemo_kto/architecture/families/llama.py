"""Llama 1 to 4, and models like Llama 3: SmolLM, Seed-OSS, Mistral, Mixtral, MiniMax M2, Phi 3 to 4, Apertus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nemo_kto.architecture.config_fields import ABSENT, Count, Indices, ModelFields, Positive, Switch
from nemo_kto.architecture.family import CHUNKED_LAYERS, SLIDING, SLIDING_LAYERS, ExpertFields, Family
from nemo_kto.architecture.mappings import (
    DENSE,
    GATE_UP,
    LLAVA,
    correction_bias,
    joined_experts,
    renamed,
    separate_experts,
    shared_expert,
    with_experts,
    without,
)
from nemo_kto.layers.layer_settings import Temperature
from nemo_kto.mixers.param_mapping import HF, MCORE, ParamMapping, Split, replicated
from nemo_kto.mixers.softmax_attention import qk_norms

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class SeedOssFields(ModelFields):
    attention_out_bias: Switch = ABSENT


class Llama4Fields(ModelFields):
    intermediate_size_mlp: Count = ABSENT
    moe_layers: Indices | None = None
    interleave_moe_layer_step: Count = ABSENT
    use_qk_norm: Switch = ABSENT
    attention_chunk_size: Count | None = None
    attn_temperature_tuning: Switch = ABSENT
    floor_scale: Count = ABSENT
    attn_scale: Positive = ABSENT


class MiniMaxFields(ModelFields):
    rotary_dim: Count = ABSENT


def _llama4_temperature(config: PretrainedConfig) -> Temperature | None:
    tuned = config.attn_temperature_tuning
    return Temperature(floor=config.floor_scale, scale=config.attn_scale) if tuned else None


def _ministral_temperature(config: PretrainedConfig) -> Temperature | None:
    rope = config.rope_parameters
    if missing := [name for name in (_BETA, _ORIGINAL) if rope.get(name) is None]:
        raise ValueError(f"rope_parameters must have {' and '.join(missing)}; add what is missing")
    return Temperature(floor=rope[_ORIGINAL], scale=rope[_BETA], first=0, with_rope=True) if rope[_BETA] else None


def _phi3_renewed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with the present name of the RoPE type; older files call it su or yarn."""
    renewed = dict(config)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := config.get(name), dict):
            renewed[name] = {key: "longrope" if value in ("su", "yarn") else value for key, value in rope.items()}
    return renewed


_BETA, _ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"
LLAMA = Family(
    name="llama",
    hf_architecture="LlamaForCausalLM",
    published="Llama 1 to 3.3, SmolLM2, DeepSeek-R1-Distill-Llama",
    mappings=DENSE,
    flags={"qkv_bias": "attention_bias", "output_bias": "attention_bias", "mlp_bias": "mlp_bias"},
)
# without rotary embeddings in every fourth layer
SMOLLM3 = replace(
    LLAMA,
    name="smollm3",
    hf_architecture="SmolLM3ForCausalLM",
    published="SmolLM3",
    window=SLIDING_LAYERS,
    window_switch="use_sliding_window",
    no_rope_layers=True,
)
# the bias of the attention's output is set separately
SEED_OSS = replace(
    LLAMA,
    name="seed_oss",
    hf_architecture="SeedOssForCausalLM",
    published="Seed-OSS-36B",
    fields=SeedOssFields,
    flags={**LLAMA.flags, "output_bias": "attention_out_bias"},
    own_head_dim=True,
)
# a sliding window in every layer if ``sliding_window`` is set; Mixtral: the same with experts
MISTRAL = Family(
    name="mistral",
    hf_architecture="MistralForCausalLM",
    published="Mistral 7B, Nemo, Large 2, Small 3",
    mappings=DENSE,
    window=SLIDING,
)
# YaRN, and queries that grow with the position
MINISTRAL3 = replace(
    MISTRAL,
    name="ministral3",
    hf_architecture="Ministral3ForCausalLM",
    published="Ministral 3, text model",
    temperature=_ministral_temperature,
    rope_own=(_BETA, _ORIGINAL),
    own_head_dim=True,
)
MISTRAL_VISION = replace(
    MISTRAL,
    name="mistral3",
    hf_architecture="Mistral3ForConditionalGeneration",
    published="Mistral Small 3.1, 3.2",
    text_type=MISTRAL.name,
    **LLAVA,
)
MINISTRAL3_VISION = replace(
    MINISTRAL3,
    name=MISTRAL_VISION.name,
    hf_architecture=MISTRAL_VISION.hf_architecture,
    published="Ministral 3 3B, 8B, 14B",
    text_type=MINISTRAL3.name,
    **LLAVA,
)
MIXTRAL = Family(
    name="mixtral",
    hf_architecture="MixtralForCausalLM",
    published="Mixtral 8x7B, 8x22B",
    mappings=with_experts(DENSE, separate_experts("block_sparse_moe", gate="w1", up="w3", down="w2")),
    module_names={"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"},
    window=SLIDING,
    experts=ExpertFields(),
)
# experts in every layer chosen by sigmoid scores, norms over all heads, a part of each head rotated
MINIMAX_M2 = Family(
    name="minimax_m2",
    hf_architecture="MiniMaxM2ForCausalLM",
    published="MiniMax-M2, M2.1, M2.5",
    mappings=(
        *MIXTRAL.mappings,
        *qk_norms("query", "key_value"),
        correction_bias("block_sparse_moe.e_score_correction_bias", "experts"),
    ),
    fields=MiniMaxFields,
    own=("rotary_dim",),
    module_names=MIXTRAL.module_names,
    flags={"qk_norm": True, "all_heads_norm": True},
    partial_rotary=True,
    own_head_dim=True,
    experts=ExpertFields(sigmoid=True, correction=(-1,), router_in_fp32=False),
)
# fused tensors, Mistral's window, and in some models a rotation of a part of each head
PHI3 = Family(
    name="phi3",
    hf_architecture="Phi3ForCausalLM",
    published="Phi-3 mini, medium, Phi-3.5 mini, Phi-4, Phi-4-mini",
    mappings=renamed(
        DENSE, {"self_attention.linear_qkv.weight": {"self_attn.qkv_proj.weight": ("query_key_value", "hidden")}, **GATE_UP}
    ),
    window=SLIDING,
    renewed=_phi3_renewed,
    partial_rotary=True,
)
# Llama 4: chunked attention in layers with RoPE, temperature scaling in others, routed and shared experts
_BLOCK = "feed_forward"
_LLAMA4_MLPS = tuple(
    replace(mapping, hf_names={name.replace(".mlp.", f".{_BLOCK}."): shape for name, shape in mapping.hf_names.items()})
    for mapping in DENSE
)
LLAMA4 = Family(
    name="llama4_text",
    hf_architecture="Llama4ForCausalLM",
    published="Llama 4, text model",
    mappings=with_experts(_LLAMA4_MLPS, (*joined_experts(_BLOCK, Split.GATED), *shared_expert(f"{_BLOCK}.shared_expert"))),
    fields=Llama4Fields,
    flags={"qkv_bias": "attention_bias", "output_bias": "attention_bias", "rotated_norm": "use_qk_norm"},
    window=CHUNKED_LAYERS,
    no_rope_layers=True,
    interleaved_rotary=True,
    temperature=_llama4_temperature,
    own=("attn_temperature_tuning", "floor_scale", "attn_scale"),
    # published files have an empty list for the default
    renewed=lambda config: {name: value for name, value in config.items() if (name, value) != ("no_rope_layers", [])},
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
# an MLP without a gate, whose activation xIELU has two trained numbers in each layer
APERTUS = Family(
    name="apertus",
    hf_architecture="ApertusForCausalLM",
    published="Apertus 8B, 70B",
    mappings=(
        *without(DENSE, "input_layernorm.", "pre_mlp_layernorm.", "mlp.linear_fc1."),
        *qk_norms("head", "head"),
        replicated("input_layernorm.weight", "attention_layernorm.weight", "hidden"),
        replicated("pre_mlp_layernorm.weight", "feedforward_layernorm.weight", "hidden"),
        ParamMapping(
            mcore_name=f"{MCORE}mlp.linear_fc1.weight",
            hf_names={f"{HF}mlp.up_proj.weight": ("ffn", "hidden")},
            split=Split.COLUMN_PARALLEL,
        ),
        *(replicated(f"mlp.activation_func.{name}", f"mlp.act_fn.{name}", 1) for name in ("alpha_p", "alpha_n")),
    ),
    flags={"qk_norm": True, "qkv_bias": "attention_bias", "output_bias": "attention_bias"},
    activation=("hidden_act", "xielu"),
    gated_mlp=False,
    untrained={"constants of xIELU": r"{model}layers\.\d+\.mlp\.act_fn\.(beta|eps)$"},
    constants={".mlp.act_fn.beta": 0.5, ".mlp.act_fn.eps": -1e-6},  # as in ``layers.mlp.XIELU``
)
