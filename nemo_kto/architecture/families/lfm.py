"""LFM2 and LFM2.5: gated short convolutions and in some layers attention; dense, or with experts in all but some layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from nemo_kto.architecture.config_fields import ABSENT, Count, Indices, ModelFields, OrZero, PartCount, Positive, Switch
from nemo_kto.architecture.family import ExpertFields, Family, check_constants
from nemo_kto.architecture.mappings import DENSE, correction_bias, renamed, separate_experts, with_experts, with_final_norm
from nemo_kto.mixers import SOFTMAX_ATTENTION, SequenceMixer, ShortConvolution
from nemo_kto.mixers.mixer import round_up
from nemo_kto.mixers.param_mapping import Shape
from nemo_kto.mixers.short_convolution import SHORT_CONVOLUTION_WEIGHTS
from nemo_kto.mixers.softmax_attention import qk_norms
from nemo_kto.utils.fields import file_errors

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class LfmFields(ModelFields):
    """Fields of config.json; those of blocks determine the width of the MLP in dense models."""

    norm_eps: Positive = ABSENT
    conv_L_cache: Annotated[Count, Ge(2)] = ABSENT
    conv_bias: Switch = ABSENT
    full_attn_idxs: Indices | None = None
    tie_embedding: Switch = ABSENT
    block_ff_dim: Count = ABSENT
    block_auto_adjust_ff_dim: Switch = ABSENT
    block_ffn_dim_multiplier: Positive = ABSENT
    block_multiple_of: Count = ABSENT
    num_dense_layers: OrZero = ABSENT
    num_experts: PartCount = ABSENT
    moe_intermediate_size: Count = ABSENT
    norm_topk_prob: Switch = ABSENT
    routed_scaling_factor: Positive = ABSENT


_BLOCK = ("block_ff_dim", "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of", "intermediate_size")


def _renewed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with the present name for tied embeddings."""
    tied = {"tie_word_embeddings": config["tie_embedding"]} if "tie_embedding" in config else {}
    return {name: value for name, value in config.items() if name != "tie_embedding"} | tied


def _dense_renewed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same with the width of the MLP that Lfm2MLP of transformers computes, by its defaults."""
    given = {name: config[name] for name in _BLOCK if name in config}
    if file_errors(LfmFields, given):
        return _renewed(config)
    width = given.get("block_ff_dim", given.get("intermediate_size", 12288))
    if given.get("block_auto_adjust_ff_dim", True):
        width = int(given.get("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
        width = round_up(width, given.get("block_multiple_of", 256))
    others = {name: value for name, value in _renewed(config).items() if name not in _BLOCK}
    return {**others, "intermediate_size": width, "block_auto_adjust_ff_dim": False}


def _expert_renewed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields as :func:`_renewed`; transformers has no default for the kinds of layers of these models."""
    if config.get("layer_types") is None:
        raise ValueError("layer_types must name the kind of each layer, got none; add it")
    return _renewed(config)


def _mixers(config: PretrainedConfig) -> tuple[SequenceMixer, ...]:
    check_constants(config, {"conv_bias": False})
    convolution = ShortConvolution(
        channels=config.hidden_size,
        # any divisor of the channels: it determines how many ranks can share them
        groups=math.gcd(config.hidden_size, config.num_attention_heads),
        kernel=config.conv_L_cache,
    )
    return tuple(SOFTMAX_ATTENTION if kind == "full_attention" else convolution for kind in config.layer_types)


def _expert_mixers(config: PretrainedConfig) -> tuple[SequenceMixer, ...]:
    check_constants(config, {"use_expert_bias": True})
    return _mixers(config)


_MLP: dict[str, dict[str, Shape]] = {
    "mlp.linear_fc1.weight": {f"feed_forward.{name}.weight": ("ffn", "hidden") for name in ("w1", "w3")},
    "mlp.linear_fc2.weight": {"feed_forward.w2.weight": ("hidden", "ffn")},
}
_LAYER: dict[str, dict[str, Shape]] = {
    "input_layernorm.weight": {"operator_norm.weight": ("hidden",)},
    "pre_mlp_layernorm.weight": {"ffn_norm.weight": ("hidden",)},
    "self_attention.linear_proj.weight": {"self_attn.out_proj.weight": ("hidden", "query")},
    "self_attention.q_layernorm.weight": {"self_attn.q_layernorm.weight": ("head",)},
    "self_attention.k_layernorm.weight": {"self_attn.k_layernorm.weight": ("head",)},
}
_MAPPINGS = with_final_norm(renamed(DENSE + qk_norms("head", "head"), {**_LAYER, **_MLP}), "model.embedding_norm.weight")
LFM2 = Family(
    name="lfm2",
    hf_architecture="Lfm2ForCausalLM",
    published="LFM2 and LFM2.5 350M to 2.6B",
    mappings=_MAPPINGS + SHORT_CONVOLUTION_WEIGHTS,
    fields=LfmFields,
    flags={"qk_norm": True},
    norm_epsilon="norm_eps",
    module_names={
        "self_attn.out_proj": "o_proj", "conv.out_proj": "out_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj",
    },
    window=("", "conv"),
    layer_pattern="full_attn_idxs",
    own=("conv_L_cache", "conv_bias", "tie_embedding", *_BLOCK),
    renewed=_dense_renewed,
    mixers=_mixers,
)  # fmt: skip
LFM2_MOE = replace(
    LFM2,
    name="lfm2_moe",
    hf_architecture="Lfm2MoeForCausalLM",
    published="LFM2-8B-A1B, LFM2-24B-A2B, LFM2.5-8B-A1B",
    mappings=with_experts(
        LFM2.mappings,
        (
            *separate_experts("feed_forward", gate="w1", up="w3", down="w2"),
            correction_bias("feed_forward.expert_bias", "experts"),
        ),
    ),
    layer_pattern="",
    own=("conv_L_cache", "conv_bias", "tie_embedding", "use_expert_bias"),
    renewed=_expert_renewed,
    mixers=_expert_mixers,
    experts=ExpertFields(
        number="num_experts",
        ffn_hidden_size="moe_intermediate_size",
        first_layer="num_dense_layers",
        normalized="norm_topk_prob",
        scale="routed_scaling_factor",
        sigmoid=True,
        correction=(-1,),
        added_sum=1e-6,
        router_in_fp32=False,
    ),
)
