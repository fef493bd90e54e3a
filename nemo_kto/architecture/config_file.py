"""Validation of config.json in a Hugging Face folder: type and range of every field are checked before it is used.

Neither transformers nor megatron-core is imported, so that a command line can be checked without them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nemo_kto.architecture.families import Family, find_family
from nemo_kto.architecture.rope import check_rope_type
from nemo_kto.errors import UserError, show
from nemo_kto.utils.files import read_json, refuse_code

CONFIG = "config.json"
_REMEDY = "download the model again, or write it with save_pretrained"
_LARGEST = 2**31 - 1
_MAX_EXPERTS = 10_000
# Missing features of well-known unsupported models, by model_type.
_LACKING = {
    "deepseek_v2": "attention whose keys and values are compressed",
    "deepseek_v3": "attention whose keys and values are compressed",
}
# Mixture-of-experts models that normalise the weights of a token's experts to a sum of 1 without a field for it.
_NORMALIZED = ("gpt_oss", "mixtral")
_MAX_LAYERS = 10_000  # a far too large number would first have every one of its layers looked up in the files


class _Form(NamedTuple):
    """A requirement on a field: a test, and its description for messages."""

    holds: Callable[[Any], bool]
    text: str


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(largest: int = _LARGEST) -> _Form:
    return _Form(lambda value: type(value) is int and 1 <= value <= largest, f"an integer from 1 to {largest}")


_POSITIVE = _Form(lambda value: _is_number(value) and 0 < value < math.inf, "a positive, finite number")
_POSITIVES = _Form(
    lambda value: isinstance(value, list) and all(map(_POSITIVE.holds, value)), "a list of positive, finite numbers"
)
_FLAG = _Form(lambda value: isinstance(value, bool), "true or false")
_STRING = _Form(lambda value: isinstance(value, str), "a string")
_STRINGS = _Form(lambda value: isinstance(value, list) and all(isinstance(part, str) for part in value), "a list of strings")
_FLAGS = _Form(lambda value: isinstance(value, list) and all(part in (0, 1) for part in value), "a list of 0 and 1")
_INDICES = _Form(
    lambda value: isinstance(value, list) and all(type(part) is int and part >= 0 for part in value),
    "a list of integers from 0",
)
_MAPPING = _Form(lambda value: isinstance(value, dict), "an object")
_FIELDS = {
    "architectures": _STRINGS, "model_type": _STRING, "hidden_act": _STRING, "hidden_activation": _STRING,
    "layer_types": _STRINGS, "no_rope_layers": _FLAGS, "no_rope_layer_interval": _count(),
    "hidden_size": _count(), "intermediate_size": _count(), "vocab_size": _count(), "max_position_embeddings": _count(),
    "num_local_experts": _count(_MAX_EXPERTS), "num_experts": _count(_MAX_EXPERTS), "num_experts_per_tok": _count(),
    "moe_intermediate_size": _count(), "decoder_sparse_step": _count(), "mlp_only_layers": _INDICES, "norm_topk_prob": _FLAG,
    "shared_expert_intermediate_size": _count(), "qkv_bias": _FLAG,
    "intermediate_size_mlp": _count(), "interleave_moe_layer_step": _count(), "moe_layers": _INDICES, "use_qk_norm": _FLAG,
    "attention_chunk_size": _count(), "attn_temperature_tuning": _FLAG, "floor_scale": _count(), "attn_scale": _POSITIVE,
    "num_hidden_layers": _count(_MAX_LAYERS), "num_attention_heads": _count(), "num_key_value_heads": _count(),
    "original_max_position_embeddings": _count(), "head_dim": _count(), "sliding_window": _count(),
    "swiglu_alpha": _POSITIVE, "swiglu_limit": _POSITIVE,
    "rms_norm_eps": _POSITIVE, "rope_theta": _POSITIVE, "rope_local_base_freq": _POSITIVE,
    "query_pre_attn_scalar": _POSITIVE, "attn_logit_softcapping": _POSITIVE, "final_logit_softcapping": _POSITIVE,
    "tie_word_embeddings": _FLAG, "attention_bias": _FLAG, "mlp_bias": _FLAG, "use_sliding_window": _FLAG,
    "use_bidirectional_attention": _FLAG, "is_encoder_decoder": _FLAG,
    "rope_scaling": _MAPPING, "rope_parameters": _MAPPING, "quantization_config": _MAPPING,
}  # fmt: skip
_ROPE_FIELDS = {
    **dict.fromkeys(
        (
            "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor", "attention_factor",
            "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings",
        ),
        _POSITIVE,
    ),
    "short_factor": _POSITIVES, "long_factor": _POSITIVES, "truncate": _FLAG,
    "full_attention": _MAPPING, "sliding_attention": _MAPPING,
}  # fmt: skip
# Fields with a default in transformers, which may be null or absent; null in any other field is an error.
_MAY_BE_NULL = {
    "architectures", "layer_types", "no_rope_layers", "num_key_value_heads", "head_dim", "sliding_window",
    "attention_chunk_size", "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention",
    *(name for name, form in _FIELDS.items() if form in (_MAPPING, _INDICES)),
}  # fmt: skip


def read_config_file(folder: Path) -> tuple[dict[str, Any], Family]:
    """Return the content of a folder's config.json and the model family it names.

    Raises:
        UserError: there is no config.json, or it does not describe a supported model; lists every problem.
    """
    path = folder / CONFIG
    if not os.path.exists(path):
        raise UserError(
            f"{folder} must be a Hugging Face model folder, but it has no {CONFIG}; download it or correct the path"
        )
    config = read_json(path, remedy=_REMEDY)
    refuse_code(path, config)
    if wrong := [*_wrong_forms(_without_unused_window(config), _FIELDS), *_wrong_rope(config)]:
        raise UserError(f"{path}: {'; '.join(wrong)}; {_REMEDY}")
    try:
        _refuse_other_kinds(config)
        family = find_family(next(iter(config.get("architectures") or []), ""))
        _refuse_unsupported(config, family)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    return config, family


def _wrong_forms(config: Mapping[str, Any], forms: Mapping[str, _Form], where: str = "") -> Iterator[str]:
    for name, form in forms.items():
        value = config.get(name)
        may_be_absent = name not in config or (value is None and (where or name in _MAY_BE_NULL))
        if not may_be_absent and not form.holds(value):
            yield f"{where}{name} must be {form.text}, got {show(value)}"


def _without_unused_window(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration without a window of 0, which transformers writes for Qwen2-MoE models without a window."""
    if config.get("use_sliding_window") is False and config.get("sliding_window") == 0:
        return {name: value for name, value in config.items() if name != "sliding_window"}
    return config


def _wrong_rope(config: Mapping[str, Any]) -> Iterator[str]:
    for section in ("rope_scaling", "rope_parameters"):
        if isinstance(settings := config.get(section), dict):
            yield from _wrong_forms(settings, _ROPE_FIELDS, f"{section}.")
            for layer_type, inner in settings.items():
                if isinstance(inner, dict):
                    yield from _wrong_forms(inner, _ROPE_FIELDS, f"{section}.{layer_type}.")


def _refuse_other_kinds(config: Mapping[str, Any]) -> None:
    """Raise a ValueError for kinds of models that cannot be trained, with a clearer message than the family lookup's."""
    if config.get("is_encoder_decoder"):
        message = f"an encoder-decoder model ({config.get('model_type')}) cannot be trained"
        raise ValueError(f"{message}: a response must be the continuation of its prompt; choose a decoder-only model")
    if lacking := _LACKING.get(str(config.get("model_type"))):
        raise ValueError(
            f"a {config['model_type']} model cannot be trained: this program lacks {lacking}; choose another model"
        )
    if "vision_config" in config or "audio_config" in config:
        message = f"a model of images or sounds ({config.get('model_type')}) cannot be trained, only text models"
        raise ValueError(f"{message}; choose another, or save its language model with save_pretrained as a model of its own")


def _refuse_unsupported(config: Mapping[str, Any], family: Family) -> None:
    """Raise a ValueError for a property that this program's model does not support."""
    if config.get("model_type") != family.name:
        got = config.get("model_type")
        raise ValueError(f"model_type must be {family.name!r} for {family.hf_architecture}, got {got!r}; {_REMEDY}")
    if (quantization := config.get("quantization_config")) is not None:
        method = quantization.get("quant_method", "unknown")
        if method != "mxfp4" or not family.mxfp4:
            message = f"the weights must not be quantized, got quant_method {method!r}"
            raise ValueError(f"{message}; start from the unquantized model")
    check_rope_type(config)
    name, activation = family.activation
    if (got := config.get(name, activation)) != activation:
        raise ValueError(f"{name} must be {activation!r}, got {got!r}; choose another model")
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(cap) is not None and cap not in family.numbers.values():
            raise ValueError(f"{cap} must be null for {family.name}, got {config[cap]}; choose another model")
    if config.get("use_bidirectional_attention"):
        message = "use_bidirectional_attention must be false, got true: no token sees what comes after it"
        raise ValueError(f"{message}; choose another model")
    if config.get("mlp_bias") and "mlp_bias" in family.flags.values() and not config.get("attention_bias"):
        raise ValueError(
            "mlp_bias=true with attention_bias=false is not supported: megatron-core's bias on the MLP brings one on qkv; "
            "choose another model"
        )
    types, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if types is not None and layers is not None and len(types) != layers:
        raise ValueError(f"layer_types must name one type for each of the {layers} layers, got {len(types)}; {_REMEDY}")
    rotating = config.get("no_rope_layers")
    if rotating is not None and layers is not None and len(rotating) < layers:
        raise ValueError(f"no_rope_layers must have a 0 or 1 for each of {layers} layers, got {len(rotating)}; {_REMEDY}")
    _check_heads(config, family)
    if family.experts is not None:
        _check_experts(config)


def _check_experts(config: Mapping[str, Any]) -> None:
    number, chosen = number_of_experts(config), config.get("num_experts_per_tok")
    if number is not None and chosen is not None and chosen > number:
        raise ValueError(f"num_experts_per_tok must be at most the number of experts, {number}, got {chosen}; {_REMEDY}")
    if config.get("model_type") == "llama4_text" and (chosen or 1) > 1:
        raise ValueError(
            f"num_experts_per_tok must be 1 for llama4_text, got {chosen}: megatron-core multiplies what an expert gets by "
            "its weight only where a token has one expert; choose another model"
        )
    if chosen == 1 and config.get("norm_topk_prob", config.get("model_type") in _NORMALIZED):
        raise ValueError(
            "num_experts_per_tok must be at least 2 where the weights of a token's experts are normalized, got 1, whose "
            "weight would be 1 whatever the router says; choose another model"
        )


def number_of_experts(config: Mapping[str, Any]) -> int | None:
    """Return the number of experts per layer in a config.json; None for a dense model or if the field is absent."""
    number: int | None = config.get("num_local_experts", config.get("num_experts"))
    return number


def layers_with_experts(config: Mapping[str, Any], layers: int) -> set[int]:
    """Return the numbers, from 0, of the layers of a mixture-of-experts model that have experts, from its config.json."""
    if (listed := config.get("moe_layers")) is not None:
        return {layer for layer in listed if layer < layers}
    step = config.get("decoder_sparse_step", config.get("interleave_moe_layer_step", 1))
    dense = config.get("mlp_only_layers") or ()
    return {layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0}


def _check_heads(config: Mapping[str, Any], family: Family) -> None:
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    hidden, width = config.get("hidden_size"), config.get("head_dim")
    if heads and groups and heads % groups:
        raise ValueError(
            f"num_attention_heads must be divisible by num_key_value_heads, got {heads} and {groups}; {_REMEDY}"
        )
    if heads and hidden and not width and not family.own_head_dim:
        if hidden % heads:
            raise ValueError(f"hidden_size must be divisible by num_attention_heads, got {hidden} and {heads}; {_REMEDY}")
        width = hidden // heads
    if width and width % 2:
        raise ValueError(f"head_dim must be even, because rotary embeddings turn pairs of channels, got {width}; {_REMEDY}")
