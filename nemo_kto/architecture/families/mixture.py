"""Mixture-of-experts families: the attention of a dense family, with experts in place of its MLPs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nemo_kto.architecture.families.dense import LLAMA, MISTRAL, QWEN2, QWEN3
from nemo_kto.architecture.families.table import (
    Experts,
    Family,
    Layers,
    ParamMapping,
    Split,
    Temperature,
    chunks_by_layer_type,
    no_rope_layers,
    window_by_layer_type,
    window_everywhere,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_MCORE = "decoder.layers.{layer}.mlp."
_EXPERT = _MCORE + "experts.local_experts.{expert}."


def _expert_mappings(block: str, *, gate: str, up: str, down: str) -> tuple[ParamMapping, ...]:
    """Return the mappings of the router and the experts of a layer.

    Args:
        block: name of the mixture-of-experts block in the file, such as ``mlp``.
        gate, up, down: names of an expert's projections.
    """
    block = f"model.layers.{{layer}}.{block}."
    expert = block + "experts.{expert}."
    wide, narrow = ("expert_ffn", "hidden"), ("hidden", "expert_ffn")
    return (
        ParamMapping(
            mcore_name=_MCORE + "router.weight",
            hf_names={block + "gate.weight": ("experts", "hidden")},
            split=Split.REPLICATED,
            layers=Layers.SPARSE,
        ),
        ParamMapping(
            mcore_name=_EXPERT + "linear_fc1.weight",
            hf_names={f"{expert}{gate}.weight": wide, f"{expert}{up}.weight": wide},
            split=Split.GATED,
            layers=Layers.SPARSE,
        ),
        ParamMapping(
            mcore_name=_EXPERT + "linear_fc2.weight",
            hf_names={f"{expert}{down}.weight": narrow},
            split=Split.ROW_PARALLEL,
            layers=Layers.SPARSE,
        ),
    )


def _shared_mappings() -> tuple[ParamMapping, ...]:
    """Return the mappings of a layer's shared expert."""
    block = "model.layers.{layer}.mlp."
    wide = ("shared_ffn", "hidden")
    return (
        ParamMapping(
            mcore_name=_MCORE + "shared_experts.linear_fc1.weight",
            hf_names={f"{block}shared_expert.{part}_proj.weight": wide for part in ("gate", "up")},
            split=Split.GATED,
            layers=Layers.SPARSE,
        ),
        ParamMapping(
            mcore_name=_MCORE + "shared_experts.linear_fc2.weight",
            hf_names={block + "shared_expert.down_proj.weight": ("hidden", "shared_ffn")},
            split=Split.ROW_PARALLEL,
            layers=Layers.SPARSE,
        ),
    )


def _joined_mappings(split: Split, *, biases: bool = False) -> tuple[ParamMapping, ...]:
    """Return the mappings of router and experts for files that join a layer's experts in one tensor [experts, in, out].

    Args:
        split: arrangement of gate and up projection in their tensor.
        biases: the router and the experts have biases.
    """
    block = "model.layers.{layer}.mlp."
    gate_and_up, down = ("expert_gate_and_up", "hidden"), ("hidden", "expert_ffn")  # of one expert, in our orientation
    parts: dict[str, tuple[str, tuple[str, ...], Split]] = {
        _MCORE + "router.weight": ("router.weight", ("experts", "hidden"), Split.REPLICATED),
        _EXPERT + "linear_fc1.weight": ("experts.gate_up_proj", gate_and_up, split),
        _EXPERT + "linear_fc2.weight": ("experts.down_proj", down, Split.ROW_PARALLEL),
    }
    if biases:
        parts |= {
            _MCORE + "router.logit_bias": ("router.bias", ("experts",), Split.REPLICATED),
            _EXPERT + "linear_fc1.bias": ("experts.gate_up_proj_bias", gate_and_up[:1], split),
            _EXPERT + "linear_fc2.bias": ("experts.down_proj_bias", down[:1], Split.REPLICATED),
        }
    return tuple(
        ParamMapping(
            mcore_name=ours,
            hf_names={block + theirs: shape},
            split=split,
            layers=Layers.SPARSE,
            transposed=ours.startswith(_EXPERT) and len(shape) == 2,
        )
        for ours, (theirs, shape, split) in parts.items()
    )


_SINKS = ParamMapping(
    mcore_name="decoder.layers.{layer}.self_attention.core_attention.softmax_offset",
    hf_names={"model.layers.{layer}.self_attn.sinks": ("heads",)},
    split=Split.HEAD_NUMBERS,
)
_SHARED_GATE = ParamMapping(
    mcore_name=_MCORE + "shared_experts.gate_weight",
    hf_names={"model.layers.{layer}.mlp.shared_expert_gate.weight": (1, "hidden")},
    split=Split.REPLICATED,
    layers=Layers.SPARSE,
)


def _with_experts(family: Family, mappings: tuple[ParamMapping, ...]) -> tuple[ParamMapping, ...]:
    """Return the mappings of a dense family, with its MLPs limited to the dense layers, and those of the experts."""
    dense = (
        replace(mapping, layers=Layers.DENSE) if mapping.mcore_name.startswith(_MCORE) else mapping
        for mapping in family.mappings
    )
    return (*dense, *mappings)


def _without_mlp(family: Family) -> tuple[ParamMapping, ...]:
    """Return the mappings of a dense family except for its MLPs."""
    return tuple(mapping for mapping in family.mappings if not mapping.mcore_name.startswith(_MCORE))


def _under(block: str, mappings: tuple[ParamMapping, ...]) -> tuple[ParamMapping, ...]:
    """Return the same mappings for files in which an MLP is named ``block`` instead of ``mlp``."""
    return tuple(
        replace(mapping, hf_names={name.replace(".mlp.", f".{block}."): shape for name, shape in mapping.hf_names.items()})
        for mapping in mappings
    )


def _experts_everywhere(config: PretrainedConfig) -> Experts:
    """Return experts of width ``intermediate_size`` in every layer."""
    return Experts(
        number=config.num_local_experts,
        per_token=config.num_experts_per_tok,
        ffn_hidden_size=config.intermediate_size,
        normalized=True,
        layers=(True,) * config.num_hidden_layers,
    )


def _qwen_experts(config: PretrainedConfig) -> Experts:
    """Return experts in every ``decoder_sparse_step``-th layer except ``mlp_only_layers``, counted from 0."""
    step, dense = config.decoder_sparse_step, set(config.mlp_only_layers or ())
    return Experts(
        number=config.num_experts,
        per_token=config.num_experts_per_tok,
        ffn_hidden_size=config.moe_intermediate_size,
        normalized=bool(config.norm_topk_prob),
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(config.num_hidden_layers)),
        shared_ffn_hidden_size=getattr(config, "shared_expert_intermediate_size", 0),
    )


def _llama4_experts(config: PretrainedConfig) -> Experts:
    """Return experts in ``moe_layers``, from 0, which transformers derives from ``interleave_moe_layer_step`` if needed."""
    return Experts(
        number=config.num_local_experts,
        per_token=config.num_experts_per_tok,
        ffn_hidden_size=config.intermediate_size,
        normalized=False,
        layers=tuple(layer in config.moe_layers for layer in range(config.num_hidden_layers)),
        shared_ffn_hidden_size=config.intermediate_size,
        shared_gate=False,
        weighs_input=True,
    )


def _llama4_temperature(config: PretrainedConfig) -> Temperature | None:
    tuned = config.attn_temperature_tuning
    return Temperature(floor=config.floor_scale, scale=config.attn_scale) if tuned else None


_QWEN_EXPERTS = _expert_mappings("mlp", gate="gate_proj", up="up_proj", down="down_proj")
# gpt-oss: sinks in the softmax of each head, biases everywhere, a clamped SwiGLU, a sliding window in every second layer.
GPT_OSS = Family(
    name="gpt_oss",
    hf_architecture="GptOssForCausalLM",
    mappings=(*_without_mlp(LLAMA), _SINKS, *_joined_mappings(Split.INTERLEAVED, biases=True)),
    flags={"qkv_bias": "attention_bias", "output_bias": "attention_bias", "sinks": True, "expert_bias": True},
    numbers={"swiglu_alpha": "swiglu_alpha", "swiglu_limit": "swiglu_limit"},
    defaults={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    windows=window_by_layer_type,
    own_head_dim=True,
    mxfp4=True,
    experts=_experts_everywhere,
)
# Llama 4 text models: chunked attention in the layers with RoPE, attention temperature scaling in those without; one routed
# expert per token, and a shared expert.
LLAMA4 = Family(
    name="llama4_text",
    hf_architecture="Llama4ForCausalLM",
    mappings=_under("feed_forward", _with_experts(LLAMA, (*_joined_mappings(Split.GATED), *_shared_mappings()))),
    flags={"qkv_bias": "attention_bias", "output_bias": "attention_bias", "rotated_norm": "use_qk_norm"},
    windows=chunks_by_layer_type,
    chunked=True,
    rotates=no_rope_layers,
    interleaved_rotary=True,
    temperature=_llama4_temperature,
    own_head_dim=True,
    dense_width="intermediate_size_mlp",
    experts=_llama4_experts,
)
# Mistral with experts in every layer.
MIXTRAL = Family(
    name="mixtral",
    hf_architecture="MixtralForCausalLM",
    mappings=_with_experts(MISTRAL, _expert_mappings("block_sparse_moe", gate="w1", up="w3", down="w2")),
    windows=window_everywhere,
    experts=_experts_everywhere,
)
# Qwen 1.5 and 2 with narrow experts and a shared expert.
QWEN2_MOE = Family(
    name="qwen2_moe",
    hf_architecture="Qwen2MoeForCausalLM",
    mappings=_with_experts(QWEN2, (*_QWEN_EXPERTS, *_shared_mappings(), _SHARED_GATE)),
    flags={"qkv_bias": "qkv_bias"},
    windows=window_by_layer_type,
    experts=_qwen_experts,
)
# Qwen 3 with many narrow experts, in some models not in every layer.
QWEN3_MOE = Family(
    name="qwen3_moe",
    hf_architecture="Qwen3MoeForCausalLM",
    mappings=_with_experts(QWEN3, _QWEN_EXPERTS),
    flags=QWEN3.flags,
    windows=window_everywhere,
    experts=_qwen_experts,
)
