"""Validation of config.json in a Hugging Face folder: type and range of every field are checked before it is used.

Neither transformers nor megatron-core is imported, so that a command line can be checked without them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_kto.architecture.config_fields import ModelFields, quantization_settings, read_quantization
from nemo_kto.architecture.families import FAMILIES, MULTIMODAL, ExpertFields, Family
from nemo_kto.architecture.rope import rope_type
from nemo_kto.errors import UserError, either, printable, show
from nemo_kto.utils.fields import file_errors, names
from nemo_kto.utils.files import read_json

CONFIG = "config.json"
PAGE = "docs/reference/supported.md"
_DOWNLOAD = "download the model again, or write it with save_pretrained"
_REMEDY = "correct it, or choose another model"
# Parts that this program lacks, by the beginning of the fields of config.json that describe them.
LACKING = {
    "index_topk": "attention to keys that an indexer chooses, which is trained by a loss of its own",
    "sparse_attention_config": "attention to blocks of keys that an indexer chooses",
    "hc_": "hyper-connections, several residual streams that each layer mixes",
    "linear_": "linear attention other than that of Qwen3-Next",
    "mamba_": "Mamba layers other than those of Nemotron-H, Granite 4 and Falcon-H1",
    "ssm_": "Mamba layers other than those of Nemotron-H, Granite 4 and Falcon-H1",
    "moe_latent_size": "experts that process a projection of the hidden state",
    "routed_expert_hidden_size": "experts that process a projection of the hidden state",
    "block_configs": "layers of different widths, some without attention",
    "swa_": "sliding-window layers whose heads differ from those of the other layers",
    "input_jitter_noise": "routers that draw a token's experts at random while they are trained",
    "lm_head_bias": "a bias of the output layer",
    "hidden_size_per_layer_input": "embeddings for each layer",
    "n_embd": "learned absolute positions",
}
_MODELOPT = "hf_quant_config.json"
_OUTER = ("architectures", "model_type", "tie_word_embeddings", "quantization_config")
# Fields that transformers checks, or takes for others, also in models that do not use them.
_FOREIGN = {"layer_types", "mlp_layer_types", "rope_scaling", "rope_parameters", "head_dim", "qk_rope_head_dim"}
_FOREIGN |= {"num_local_experts", "num_experts_per_tok"}


def read_config_file(folder: Path) -> tuple[dict[str, Any], Family]:
    """Return the fields of the text model in a folder's config.json, and the model family that it names.

    They are the fields of the family's schema; those that the model does not use are left out if they are not valid.
    Raises UserError if there is no config.json, or it does not describe a supported model; lists every problem.
    """
    path = folder / CONFIG
    if not os.path.exists(path):
        remedy = other_format_of(folder) or "download it or correct the path"
        raise UserError(f"{folder} must be a Hugging Face model folder, but it has no {CONFIG}; {remedy}")
    config = read_config(folder)
    try:
        family, text_config = _family(config)
        _check_model_type(config, family)  # before the fields, as another model may have others
        fields, read = _checked_fields(text_config, family)
        _refuse_unsupported(config, read, family)
        if (other := other_format_of(folder)) is not None:
            raise ValueError(other)
        _check_layers_and_heads(read, family)
        if (experts := family.experts_of(read)) is not None:
            _check_experts(read, experts, family.name)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    if family.text_type and not family.ties_in_text:  # the whole model determines it
        of_text = bool(fields.pop("tie_word_embeddings", False)) and family.ties_in_either
        if of_text or "tie_word_embeddings" in config:
            fields["tie_word_embeddings"] = of_text or bool(config["tie_word_embeddings"])
    return fields, family


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json, with the description of quantized weights that ModelOpt writes in a file beside it.

    Raises UserError if one of them is not a JSON object.
    """
    config, described = read_json(folder / CONFIG, remedy=_DOWNLOAD), folder / _MODELOPT
    if quantization_settings(config) is not None or not described.exists():
        return config
    settings = read_json(described, remedy=_DOWNLOAD).get("quantization")
    if not isinstance(settings, dict) or "quant_algo" not in settings:
        raise UserError(f"{described}: quantization must be an object with quant_algo, got {show(settings)}; {_DOWNLOAD}")
    return {**config, "quantization_config": settings}


def other_format_of(folder: Path) -> str | None:
    """Return that a folder has weights in a form that is not read, with the remedy; None if no file shows this."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else [folder.name]
    gguf = [name for name in names if name.endswith(".gguf")]
    if gguf and not any(name.endswith(".safetensors") for name in names):
        return f"weights must be in safetensors files, got the GGUF file {printable(gguf[0], 80)}; start from such files"
    return None


def _family(config: Mapping[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Return the family that a config.json names, and the fields of its text model."""
    outer = {name: value for name, value in config.items() if name in _OUTER}
    if "architectures" in (wrong := file_errors(ModelFields, outer)):
        raise ValueError(f"{wrong['architectures']}; {_REMEDY}")
    hf_architecture = (config.get("architectures") or [""])[0]
    if (family := FAMILIES.get(hf_architecture)) is not None:
        return family, dict(config)
    if not hf_architecture:
        known = [row.hf_architecture for row in (*FAMILIES.values(), *MULTIMODAL) if config.get("model_type") == row.name]
        wanted = either([*dict.fromkeys(known)]) if known else "the class of a model"
        raise ValueError(f"architectures must name {wanted}, got none; add it, or choose another model")
    if not (of_images := [row for row in MULTIMODAL if row.hf_architecture == hf_architecture]):
        raise ValueError(_why_unknown(config, hf_architecture))
    if wrong:
        raise ValueError(f"{'; '.join(wrong.values())}; {_REMEDY}")
    return _text_model(config, of_images)


def _checked_fields(text: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of a text model that its family has, and those of them that the model is read by."""
    schema = family.fields.model_fields.keys()
    text = {name: value for name, value in _renamed(text, family).items() if name in schema | {*family.own}}
    wrong = file_errors(family.fields, text)
    if not wrong.keys() & family.deciding(text):
        text = family.renewed(text)
        read = family.reads(text)
        settings = {name for name in names(family.fields) if "." in name}  # of RoPE
        unread = (wrong.keys() | _FOREIGN | settings | {name for name in text if text[name] is None}) - read
        wrong = {key: message for key, message in wrong.items() if key in read}
        text = {name: _without(value, name, unread) for name, value in text.items() if name not in unread}
    if wrong:
        raise ValueError(f"{'; '.join(wrong.values())}; {_REMEDY}")
    text |= {name: value for name, value in family.fields.model_validate(text) if isinstance(text.get(name), int | list)}
    return text, {name: value for name, value in text.items() if name in read}


def _renamed(text: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the fields with the family's names of the numbers of experts, for which transformers accepts others too."""
    if (experts := family.experts) is None or family.one_part:  # the latter has dense models too, which read neither
        return dict(text)
    own = {"num_experts": experts.number, "num_local_experts": experts.number, "num_experts_per_tok": experts.chosen}
    return {own[name]: text[name] for name in own if name in text} | dict(text)


def _without(value: object, key: str, removed: Collection[str]) -> object:
    """Return a value of config.json, in whose objects the entries with the keys in ``removed`` are left out."""
    if not isinstance(value, dict) or not any(name.startswith(f"{key}.") for name in removed):
        return value
    inner = {f"{key}.{name}": (name, each) for name, each in value.items()}
    return {name: _without(each, path, removed) for path, (name, each) in inner.items() if path not in removed}


def _text_model(config: Mapping[str, Any], rows: Sequence[Family]) -> tuple[Family, dict[str, Any]]:
    """Return the family of a model with image input, one of ``rows``, and the fields of its text model."""
    text = config.get("text_config")
    if text is None and rows[0].flat_config:
        text = {**config, "model_type": rows[0].text_type}
    if not isinstance(text, dict):
        got = "none" if text is None else show(text)
        raise ValueError(f"text_config must be an object with the text model of {rows[0].name}, got {got}; {_REMEDY}")
    types = {kind: row for row in rows for kind in (row.text_type, *row.aliases)}
    if not isinstance(kind := text.get("model_type"), str) or kind not in types:
        wanted = f"{either([*types])} for {rows[0].hf_architecture}"
        raise ValueError(f"model_type in text_config must be {wanted}, got {show(kind)}; {_REMEDY}")
    return types[kind], text


def _why_unknown(config: Mapping[str, Any], hf_architecture: str) -> str:
    """Return why a model of no known family cannot be trained: it is not supported, and parts that this program lacks."""
    kind, text = str(config.get("model_type")), config.get("text_config")
    if config.get("is_encoder_decoder"):
        message = f"an encoder-decoder model ({kind}) cannot be trained: a response must be the continuation of its prompt"
        return f"{message}; choose a decoder-only model"
    fields = {**(text if isinstance(text, dict) else {}), **config}
    lacking = [why for start, why in LACKING.items() if any(name.startswith(start) and fields[name] for name in fields)]
    if config.get("vision_config") is not None or config.get("audio_config") is not None:
        lacking.append("its kind of input with images or sounds")
    why = f": this program lacks {', '.join(dict.fromkeys(lacking))}" if lacking else ""
    got = f"{printable(hf_architecture, 100)!r} (model_type {printable(kind, 100)!r}), which is not supported{why}"
    return f"the architecture must be one of the families in {PAGE}, got {got}; choose another model"


def _check_model_type(config: Mapping[str, Any], family: Family) -> None:
    aliases = () if family.text_type else family.aliases
    if (kind := config.get("model_type")) not in (family.name, *aliases):
        raise ValueError(f"model_type must be {family.name!r} for {family.hf_architecture}, got {kind!r}; {_REMEDY}")


def _refuse_unsupported(config: Mapping[str, Any], text: Mapping[str, Any], family: Family) -> None:
    """Raise a ValueError for features that are not supported, of a whole configuration or the fields of its text model."""
    quantization = read_quantization(config)
    if quantization is not None and quantization.method == "mxfp4" and not family.mxfp4:
        message = f"quantization_config must not be mxfp4 for {family.name}, got quant_method 'mxfp4'"
        raise ValueError(f"{message}; start from the unquantized model")
    config = text
    for layer_type in ("sliding_attention", "full_attention") if "rope_theta" in family.reads(config) else ():
        rope_type(family.rope(config, layer_type))
    name, activation = family.activation
    if (got := config.get(name, activation)) != activation:
        raise ValueError(f"{name} must be {activation!r}, got {got!r}; choose another model")
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(cap) is not None and cap not in family.numbers.values():
            raise ValueError(f"{cap} must be null for {family.name}, got {config[cap]}; choose another model")
    if both := config.get("use_bidirectional_attention"):
        got = str(both).lower()
        message = f"use_bidirectional_attention must be false, got {got}: only causal attention is supported"
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
