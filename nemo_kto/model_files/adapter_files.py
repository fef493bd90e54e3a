"""Reading of an adapter folder in PEFT's format: its configuration, and the shapes of its tensors.

megatron-core is not imported, so that a command line can be checked without it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, Field

from nemo_kto.architecture.config_file import CONFIG
from nemo_kto.architecture.families import FAMILIES, MULTIMODAL
from nemo_kto.architecture.lora import (
    EMBEDDING,
    EMBEDDING_A,
    EMBEDDING_B,
    HUGGING_FACE_TARGETS,
    MAGNITUDE,
    MAX_ALPHA,
    NEMO_TARGETS,
    OTHER_MIXERS,
    LoRASettings,
    adaptable,
    hf_module,
)
from nemo_kto.errors import UserError, either, printable, show
from nemo_kto.model_files.safetensors_files import WRITTEN_BY, Shapes, read_header, tensor_shapes
from nemo_kto.utils.fields import file_errors
from nemo_kto.utils.files import file_inside, irregular, read_json

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def _tensor_pattern() -> re.Pattern[str]:
    """Return a pattern of the names of adapters of linear layers, as in the tables of all families."""
    prefix = "model.layers.{layer}."
    modules = {
        re.escape(name.removeprefix(prefix).removesuffix(".weight")).replace(r"\{expert\}", r"\d+")
        for family in FAMILIES.values()
        for mapping in adaptable(family)
        for name in mapping.hf_names
        if name.startswith(prefix) and hf_module(name) in HUGGING_FACE_TARGETS
    }
    ends = rf"(?:lora_[AB]\.weight|{MAGNITUDE})"
    return re.compile(rf"{_START}layers\.(?P<layer>\d+)\.(?:{'|'.join(sorted(modules))})\.{ends}")


MODULES = "base_model.model."  # of PEFT, before the names of transformers' modules; vLLM also reads names without it
# in a model with image input as transformers 5, 4 and a text model have it, and without the class that has the output layer
_MODELS = ("model.", "model.language_model.", "language_model.model.", "language_model.", "backbone.", "")
_START = rf"(?:{re.escape(MODULES)})?(?:{'|'.join(map(re.escape, _MODELS))})"
_BEGINNING = re.compile(rf"{_START}(?=layers\.|{EMBEDDING}\.|embeddings\.)")
_TENSOR = _tensor_pattern()
_EMBEDDING = re.compile(rf"{_START}(?:{EMBEDDING}|embeddings)\.({EMBEDDING_A}|{EMBEDDING_B})")
# transformers' name for the joined gate and up projections of experts, and peft's pattern for that name.
JOINED = "gate_up_proj"
JOINED_PATTERN = rf".*\.{JOINED}"
# Entries of PEFT's configuration that may have any value: read here, or without effect on trained adapters. Any other entry
# that is set asks for a feature that our adapters lack.
_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha",
    "lora_dropout", "megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "revision",
    "runtime_config", "target_modules", "target_parameters", "task_type",
    "use_dora", "use_rslora",
}  # fmt: skip
_MERGEABLE = ("LOHA", "LOKR", "IA3")  # types other than LoRA that inference merges into the model
# Remedies for tensors that are not supported, by a part of their names.
_REMEDIES = {
    ".experts.": "; experts need names of their own",
    f"{EMBEDDING}.base_layer": "; save adapters of an embedding with save_embedding_layers=False",
}


class _LoRA(BaseModel):
    """Fields of PEFT's configuration of LoRA with any features."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, defer_build=True)
    r: Annotated[int, Ge(1)]
    lora_alpha: Annotated[float, Gt(0), Le(MAX_ALPHA)]
    lora_dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    target_modules: str | list[str] | None = None
    use_dora: bool | None = None
    use_rslora: bool | None = None


class _TrainedLoRA(_LoRA):
    """The same of adapters that can be trained."""

    bias: Literal["none"] = "none"
    # others (PiSSA, OLoRA, ...) modify the base model and train on the result
    init_lora_weights: Annotated[
        bool | Literal["gaussian", "eva", "orthogonal"] | None,
        Field(description="an initialisation that leaves the base model unchanged"),
    ] = True


def read_adapter_settings(folder: str | Path) -> LoRASettings:
    """Return the settings of the adapter in a folder in PEFT's format.

    Raises UserError if there is none, it has unsupported features (all are listed), or a file is a link out of the folder.
    """
    folder = Path(folder)
    config, shapes = _read(folder)
    modules_of_layer: dict[int, set[str]] = defaultdict(set)
    for match in filter(None, map(_TENSOR.fullmatch, shapes)):
        modules_of_layer[int(match["layer"])].add(hf_module(match[0]))
    if problems := list(_refusals(config, shapes, modules_of_layer.values())):
        message = f"{folder}: adapters must be LoRA or DoRA on the linear layers, got otherwise:"
        remedy = "train such adapters, or merge these into their base model with peft"
        raise UserError("\n  ".join([message, *problems, remedy]))
    layers = sorted(modules_of_layer)
    modules = set[str]().union(*modules_of_layer.values())
    modules |= {EMBEDDING} if any(map(_EMBEDDING.fullmatch, shapes)) else set()
    limited = config.get("layers_to_transform") is not None or isinstance(config.get("target_modules"), str)
    return LoRASettings(
        rank=config["r"],
        alpha=float(config["lora_alpha"]),
        rslora=bool(config.get("use_rslora")),
        dora=bool(config.get("use_dora")),
        dropout=float(config.get("lora_dropout") or 0.0),
        experts=any(".experts." in name for name in shapes),
        target_modules=tuple(module for module in (*HUGGING_FACE_TARGETS, EMBEDDING) if module in modules),
        layers=tuple(layer + 1 for layer in layers) if limited or layers != list(range(len(layers))) else None,
    )


def beginning_of(names: Iterable[str]) -> str | None:
    """Return what the names of tensors have before ``layers.``; None if no tensor belongs to a layer or the embedding."""
    return next((found[0] for found in map(_BEGINNING.match, names) if found), None)


def key_mapping(folder: Path, base: Path) -> dict[str, str] | None:
    """Return how PEFT must rename the tensors for the modules of the base model; None if they have its names.

    Raises UserError for names without PEFT's prefix, whose adapters it would leave without effect.
    """
    prefix, start = text_model_prefix(base), beginning_of(read_header(folder / ADAPTER_WEIGHTS)[0])
    if prefix is None or start in (None, MODULES + prefix):
        return None
    if not start.startswith(MODULES):
        text = f"{folder / ADAPTER_WEIGHTS}: names of tensors must begin with {MODULES}, got {start or 'layers.'}"
        raise UserError(f"{text}; rename them, or train from these adapters, which exports them with such names")
    return {f"^{re.escape(start.removeprefix(MODULES))}(?=layers|embed)": prefix}


def text_model_prefix(base: Path) -> str | None:
    """Return what the names of modules of the text model begin with in a Hugging Face folder; None for unknown families."""
    names, families = read_json(base / CONFIG).get("architectures") or [], (*FAMILIES.values(), *MULTIMODAL)
    return next((family.module_prefix for family in families if family.hf_architecture in names), None)


def check_adapter(folder: Path) -> None:
    """Check the files of an adapter in PEFT's format, and the types of its settings, before peft loads it.

    It may have features that cannot be trained. Raises UserError as :func:`read_adapter_settings` otherwise.
    """
    config, _ = _read(folder)
    if wrong := _wrong_settings(config, _LoRA, *_MERGEABLE):
        remedy = "download the adapter again, or write it with save_pretrained"
        raise UserError(f"{folder / ADAPTER_CONFIG}: {'; '.join(wrong)}; {remedy}")


def _read(folder: Path) -> tuple[dict[str, Any], Shapes]:
    """Return the configuration of an adapter, and the shapes of its tensors."""
    files = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    if wrong := {name: irregular(folder / name) or "missing" for name in files if not (folder / name).is_file()}:
        message = " and ".join(f"{name} is {kind}" for name, kind in wrong.items())
        remedy = "load it with peft and write it with save_pretrained"
        raise UserError(f"{folder} must be an adapter in PEFT's format, but {message}; {remedy}")
    config_file, weights = (file_inside(folder, name) for name in files)
    return read_json(config_file), tensor_shapes(weights)


def _wrong_settings(config: Mapping[str, Any], fields: type[_LoRA] = _TrainedLoRA, *others: str) -> list[str]:
    """Return the problems of settings with the ``fields`` of LoRA; PEFT checks those of ``others``, which are types."""
    if config.get("peft_type") not in ("LORA", *others):
        return [f"peft_type must be {either(['LORA', *others])}, got {show(config.get('peft_type'))}"]
    return list(file_errors(fields, config).values()) if config["peft_type"] == "LORA" else []


def is_our_adapter(folder: Path) -> bool:
    """Return whether this program wrote the folder."""
    try:
        return read_header(folder / ADAPTER_WEIGHTS)[1].get("written_by") == WRITTEN_BY
    except UserError:
        return False


def _may_match(pattern: str, names: Iterable[str]) -> bool:
    """Return whether a pattern of modules may match one of the tensors, however the names of both begin."""
    if pattern == JOINED_PATTERN or re.fullmatch(r"[\w.]+", pattern) is None:
        return pattern != JOINED_PATTERN
    end = "." + _BEGINNING.sub("", pattern)
    return any(f".{_BEGINNING.sub('', name)}".partition(".lora_")[0].endswith(end) for name in names)


def _refusals(config: Mapping[str, Any], shapes: Shapes, adapted: Collection[set[str]]) -> Iterator[str]:
    """Yield the problems of an adapter with this configuration, these tensors, and these modules of each adapted layer."""
    yield from _wrong_settings(config)
    if config.get("peft_type") != "LORA":
        return
    rank, targets, limited = config.get("r"), config.get("target_modules"), config.get("layers_to_transform") is not None
    for key, value in config.items():
        if key in ("rank_pattern", "alpha_pattern") and isinstance(value, dict):
            usual = config.get({"rank_pattern": "r", "alpha_pattern": "lora_alpha"}[key])
            value = {name: each for name, each in value.items() if each != usual and _may_match(name, shapes)}
        if value and key not in _HARMLESS:
            yield f"{printable(key, 60)} must not be set, got {printable(str(value), 60)}"
    if others := [name for name in shapes if not (_TENSOR.fullmatch(name) or _EMBEDDING.fullmatch(name))]:
        example = printable(others[0], 100)
        text = f"tensors must belong to {', '.join(HUGGING_FACE_TARGETS)}, got {len(others)} others, such as {example}"
        yield text + next((remedy for part, remedy in _REMEDIES.items() if part in others[0]), "")
    for name, shape in shapes.items():
        if name.endswith(MAGNITUDE) or not (_TENSOR.fullmatch(name) or _EMBEDDING.fullmatch(name)):
            continue
        along = 0 if ".lora_A." in name or name.endswith(EMBEDDING_A) else 1
        if len(shape) != 2 or shape[along] != rank:
            yield f"tensors must have the rank of the configuration, r = {rank}, got shape {list(shape)} of {name}"
            break
    dora, magnitudes = bool(config.get("use_dora")), any(name.endswith(MAGNITUDE) for name in shapes)
    if adapted and dora != magnitudes:
        which = "with" if magnitudes else "without"
        yield f"use_dora must be {magnitudes} {which} {MAGNITUDE} among the tensors, got {dora}"
    if dora and any(".experts." in name for name in shapes):
        yield "use_dora must be False with adapters on experts, which have none in peft either, got True"
    if any(map(_EMBEDDING.fullmatch, shapes)):
        if limited or isinstance(targets, str):
            yield f"layers_to_transform must not be set, and target_modules a list, beside adapters of {EMBEDDING}"
    elif not adapted:
        yield "at least one layer must be adapted, got no tensors of adapters"
    mixing = {*NEMO_TARGETS["attention"], *OTHER_MIXERS}
    mlps = {frozenset(each - mixing) for each in adapted}
    # Layers of Gemma 4 whose keys are also values lack one; names of other models are compared with their layers later.
    mixers = {frozenset(each & mixing - {"v_proj"}) for each in adapted}
    # layers with experts have no adapted MLP if experts have no adapters; our files then name parameters
    one_part = bool(config.get("target_parameters")) or not any(modules & mixing and modules - mixing for modules in adapted)
    if len(mlps - {frozenset()} if one_part else mlps) > 1 or sum(map(len, mixers)) > len(frozenset().union(*mixers)):
        layers = "every adapted layer with the same sequence mixer"
        yield f"{layers} must have the same modules adapted, got {len(adapted)} layers that differ"
