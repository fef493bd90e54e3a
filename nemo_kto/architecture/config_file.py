"""Validation of config.json in a Hugging Face folder: type and range of every field are checked before it is used.

Neither transformers nor megatron-core is imported, so that a command line can be checked without them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_kto.architecture.config_fields import ModelFields
from nemo_kto.architecture.families import FAMILIES, ExpertFields, Family
from nemo_kto.architecture.rope import rope_type
from nemo_kto.errors import UserError
from nemo_kto.utils.field_errors import file_errors
from nemo_kto.utils.files import read_json, refuse_code

CONFIG = "config.json"
_REMEDY = "download the model again, or write it with save_pretrained"
# Missing features of well-known unsupported models, by model_type.
_LACKING = dict.fromkeys(("deepseek_v2", "deepseek_v3"), "attention whose keys and values are compressed")


def read_config_file(folder: Path) -> tuple[dict[str, Any], Family]:
    """Return the content of a folder's config.json and the model family it names.

    Raises UserError if there is no config.json, or it does not describe a supported model; lists every problem.
    """
    path = folder / CONFIG
    if not os.path.exists(path):
        raise UserError(
            f"{folder} must be a Hugging Face model folder, but it has no {CONFIG}; download it or correct the path"
        )
    config = read_json(path, remedy=_REMEDY)
    refuse_code(path, config)
    names = config.get("architectures")
    hf_architecture = str(names[0]) if isinstance(names, list) and names else ""
    family = FAMILIES.get(hf_architecture)
    fields = ModelFields if family is None else family.fields
    given = {name: value for name, value in config.items() if name in fields.model_fields}
    if given.get("use_sliding_window") is False and given.get("sliding_window") == 0:
        del given["sliding_window"]  # transformers writes 0 for Qwen2-MoE models without a window
    if wrong := file_errors(fields, given):
        raise UserError(f"{path}: {'; '.join(wrong)}; {_REMEDY}")
    try:
        _refuse_other_kinds(config)
        if family is None:
            raise ValueError(
                f"the architecture must be one of {', '.join(FAMILIES)}, got {hf_architecture!r}; choose another model"
            )
        _refuse_unsupported(given, family)
        _check_layers_and_heads(given, family)
        if family.experts is not None:
            _check_experts(given, family.experts, family.name)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    return config, family


def _refuse_other_kinds(config: Mapping[str, Any]) -> None:
    """Raise a ValueError for kinds of models that cannot be trained, with a clearer message than the family lookup's."""
    kind = config.get("model_type")
    if config.get("is_encoder_decoder"):
        message = f"an encoder-decoder model ({kind}) cannot be trained: a response must be the continuation of its prompt"
        raise ValueError(f"{message}; choose a decoder-only model")
    if lacking := _LACKING.get(str(kind)):
        raise ValueError(f"a {kind} model cannot be trained: this program lacks {lacking}; choose another model")
    if "vision_config" in config or "audio_config" in config:
        message = f"a model of images or sounds ({kind}) cannot be trained, only text models"
        raise ValueError(f"{message}; choose a checkpoint of a text model")


def _refuse_unsupported(config: Mapping[str, Any], family: Family) -> None:
    if (kind := config.get("model_type")) != family.name:
        raise ValueError(f"model_type must be {family.name!r} for {family.hf_architecture}, got {kind!r}; {_REMEDY}")
    if (quantization := config.get("quantization_config")) is not None:
        method = quantization.get("quant_method", "unknown")
        if method != "mxfp4" or not family.mxfp4:
            message = f"the weights must not be quantized, got quant_method {method!r}"
            raise ValueError(f"{message}; start from the unquantized model")
    for layer_type in ("sliding_attention", "full_attention"):
        rope_type(family.rope(config, layer_type))
    name, activation = family.activation
    if (got := config.get(name, activation)) != activation:
        raise ValueError(f"{name} must be {activation!r}, got {got!r}; choose another model")
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(cap) is not None and cap not in family.numbers.values():
            raise ValueError(f"{cap} must be null for {family.name}, got {config[cap]}; choose another model")
    if config.get("use_bidirectional_attention"):
        message = "use_bidirectional_attention must be false, got true: only causal attention is supported"
        raise ValueError(f"{message}; choose another model")


def _check_layers_and_heads(config: Mapping[str, Any], family: Family) -> None:
    types, layers, rotates = config.get("layer_types"), config.get("num_hidden_layers"), config.get("no_rope_layers")
    if types is not None and layers is not None and len(types) != layers:
        raise ValueError(f"layer_types must name one type for each of the {layers} layers, got {len(types)}; {_REMEDY}")
    if rotates is not None and layers is not None and len(rotates) < layers:
        raise ValueError(f"no_rope_layers must have a 0 or 1 for each of {layers} layers, got {len(rotates)}; {_REMEDY}")
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
        raise ValueError(f"head_dim must be even, because RoPE rotates pairs of channels, got {width}; {_REMEDY}")


def _check_experts(config: Mapping[str, Any], fields: ExpertFields, family: str) -> None:
    number, chosen = config.get(fields.number), config.get(fields.per_token)
    if number is not None and chosen is not None and chosen > number:
        raise ValueError(f"{fields.per_token} must be at most the number of experts, {number}, got {chosen}; {_REMEDY}")
    groups, allowed = config.get(fields.groups) or 1, config.get(fields.groups_per_token) or 1
    if number is not None and (number % groups or (groups > 1 and number < 2 * groups) or allowed > groups):
        raise ValueError(
            f"{fields.groups} must divide the {number} experts into groups of at least 2, and {fields.groups_per_token} "
            f"of them are chosen, got {groups} and {allowed}; {_REMEDY}"
        )
    if number is not None and chosen is not None and chosen > number // groups * allowed:
        raise ValueError(
            f"{fields.per_token} must be at most the {number // groups * allowed} experts of {fields.groups_per_token} "
            f"groups, got {chosen}; {_REMEDY}"
        )
    if fields.weighs_input and (chosen or 1) > 1:
        raise ValueError(
            f"num_experts_per_tok must be 1 for {family}, got {chosen}: megatron-core scales the input of an expert by "
            "its router probability only if each token has one expert; choose another model"
        )
    normalized = fields.normalized
    if chosen == 1 and (config.get(normalized) if isinstance(normalized, str) else normalized):
        raise ValueError(
            "num_experts_per_tok must be at least 2 if the router probabilities of a token's experts are normalized, got 1, "
            "for which they would always be 1; choose another model"
        )
