"""Validation of config.json in a Hugging Face folder: type and range of every field are checked before it is used.

Neither transformers nor megatron-core is imported, so that a command line can be checked without them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from nemo_kto.architecture.config_fields import ModelFields, read_quantization
from nemo_kto.architecture.families import FAMILIES, MULTIMODAL, ExpertFields, Family
from nemo_kto.architecture.rope import rope_type
from nemo_kto.errors import UserError, either, printable, show
from nemo_kto.utils.field_errors import file_errors
from nemo_kto.utils.files import read_json, refuse_code

CONFIG = "config.json"
PAGE = "docs/reference/supported.md"
_REMEDY = "download the model again, or write it with save_pretrained"
# Parts that this program lacks, by the beginning of the fields of config.json that describe them.
LACKING = {
    "index_topk": "attention to keys that an indexer chooses, which is trained by a loss of its own",
    "hc_": "hyper-connections, several residual streams that each layer mixes",
    "linear_": "linear attention other than that of Qwen3-Next",
    "mamba_": "Mamba layers other than those of Nemotron-H and Granite 4",
    "ssm_": "Mamba layers other than those of Nemotron-H and Granite 4",
    "conv_L_cache": "short convolutions",
    "hidden_size_per_layer_input": "embeddings for each layer",
    "n_embd": "learned absolute positions",
}
_OUTER = ("architectures", "model_type", "is_encoder_decoder", "tie_word_embeddings", "quantization_config")


def read_config_file(folder: Path) -> tuple[dict[str, Any], Family]:
    """Return the fields of the text model in a folder's config.json, and the model family that it names.

    Raises UserError if there is no config.json, or it does not describe a supported model; lists every problem.
    """
    path = folder / CONFIG
    if not os.path.exists(path):
        raise UserError(
            f"{folder} must be a Hugging Face model folder, but it has no {CONFIG}; download it or correct the path"
        )
    config = read_json(path, remedy=_REMEDY)
    names = config.get("architectures")
    hf_architecture = str(names[0]) if isinstance(names, list) and names else ""
    try:
        family, text = FAMILIES.get(hf_architecture), config
        outer = {name: value for name, value in config.items() if name in _OUTER}
        of_images = [row for row in MULTIMODAL if row.hf_architecture == hf_architecture]
        wrong = file_errors(ModelFields, outer) if of_images else []
        if of_images and not wrong:
            family, text = _text_model(config, of_images)
        fields = ModelFields if family is None else family.fields
        given = {name: value for name, value in text.items() if name in fields.model_fields}
        if given.get("use_sliding_window") is False and given.get("sliding_window") == 0:
            del given["sliding_window"]  # transformers writes 0 for Qwen2-MoE models without a window
        if family is not None and family.chunked and given.get("no_rope_layers") == []:
            del given["no_rope_layers"]  # published Llama 4, for the default
        wrong = wrong or file_errors(fields, given)
        if wrong:
            raise ValueError(f"{'; '.join(wrong)}; {_REMEDY}")
        if family is None:
            refuse_code(path, config)  # transformers has the classes of known families, and their code is not used
            raise ValueError(_why_unknown(config, hf_architecture))
        _refuse_unsupported(config, given, family)
        _check_layers_and_heads(given, family)
        if (experts := family.experts_of(given)) is not None:
            _check_experts(given, experts, family.name)
        text = family.renewed(text)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    ties = text if family.ties_in_text else config
    return {**text, **({name: ties[name] for name in ("tie_word_embeddings",) if name in ties})}, family


def _text_model(config: Mapping[str, Any], rows: Sequence[Family]) -> tuple[Family, dict[str, Any]]:
    """Return the family of a model with image input, one of ``rows``, and the fields of its text model."""
    text = config.get("text_config")
    if text is None and rows[0].flat_config:
        text = {**config, "model_type": rows[0].text_type}
    if not isinstance(text, dict):
        got = "none" if text is None else show(text)
        raise ValueError(f"text_config must be an object with the text model of {rows[0].name}, got {got}; {_REMEDY}")
    types = {kind: row for row in rows for kind in (row.text_type, *row.aliases)}
    if (kind := text.get("model_type")) not in types:
        wanted = f"{either([*types])} for {rows[0].hf_architecture}"
        raise ValueError(f"model_type in text_config must be {wanted}, got {show(kind)}; {_REMEDY}")
    return types[kind], text


def _why_unknown(config: Mapping[str, Any], hf_architecture: str) -> str:
    """Return why a model of no known family cannot be trained: a part that this program lacks, and the nearest family."""
    kind, text = str(config.get("model_type")), config.get("text_config")
    if config.get("is_encoder_decoder"):
        message = f"an encoder-decoder model ({kind}) cannot be trained: a response must be the continuation of its prompt"
        return f"{message}; choose a decoder-only model"
    fields = {**(text if isinstance(text, dict) else {}), **config}
    lacking = [why for start, why in LACKING.items() if any(name.startswith(start) and fields[name] for name in fields)]
    if "audio_config" in config or ("vision_config" in config and not lacking):
        lacking.append("a table of its weights, of which those of images or sounds are not trained")
    lacks = ", ".join(dict.fromkeys(lacking)) or "a table of its weights"
    known = {family.name: family.hf_architecture for family in (*FAMILIES.values(), *MULTIMODAL)}
    near = [f"the nearest is {known[name]}" for name in get_close_matches(kind, known, n=1, cutoff=0.5)]
    got = f"{printable(hf_architecture, 100)!r} (model_type {printable(kind, 100)!r}), for which this program lacks {lacks}"
    return f"the architecture must be one of the families in {', '.join([PAGE, *near])}; got {got}; choose another model"


def _refuse_unsupported(config: Mapping[str, Any], text: Mapping[str, Any], family: Family) -> None:
    """Raise a ValueError for features that are not supported, of a whole configuration or the fields of its text model."""
    aliases = () if family.text_type else family.aliases
    if (kind := config.get("model_type")) not in (family.name, *aliases):
        raise ValueError(f"model_type must be {family.name!r} for {family.hf_architecture}, got {kind!r}; {_REMEDY}")
    quantization = read_quantization(config)
    if quantization is not None and quantization.method == "mxfp4" and not family.mxfp4:
        message = f"quantization_config must not be mxfp4 for {family.name}, got quant_method 'mxfp4'"
        raise ValueError(f"{message}; start from the unquantized model")
    config = text
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
    for name, size in (("head_dim", width), ("qk_rope_head_dim", config.get("qk_rope_head_dim"))):
        if size and size % 2:
            raise ValueError(f"{name} must be even, because RoPE rotates pairs of channels, got {size}; {_REMEDY}")


def _check_experts(config: Mapping[str, Any], fields: ExpertFields, family: str) -> None:
    number, chosen = config.get(fields.number), fields.per_token(config)
    if number is not None and chosen is not None and chosen > number:
        raise ValueError(f"{fields.chosen} must be at most the number of experts, {number}, got {chosen}; {_REMEDY}")
    groups, allowed = config.get(fields.groups) or 1, config.get(fields.chosen_groups) or 1
    if number is not None and (number % groups or (groups > 1 and number < 2 * groups) or allowed > groups):
        raise ValueError(
            f"{fields.groups} must divide the {number} experts into groups of at least 2, and {fields.chosen_groups} "
            f"of them are chosen, got {groups} and {allowed}; {_REMEDY}"
        )
    if number is not None and chosen is not None and chosen > number // groups * allowed:
        raise ValueError(
            f"{fields.chosen} must be at most the {number // groups * allowed} experts of {fields.chosen_groups} "
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
            f"{fields.chosen} must be at least 2 if the router probabilities of a token's experts are normalized, got 1, "
            "for which they would always be 1; choose another model"
        )
