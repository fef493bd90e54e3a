"""Reading of an adapter folder in PEFT's format: its configuration, and the shapes of its tensors.

megatron-core is not imported, so that a command line can be checked without it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_kto.architecture.lora import (
    EMBEDDING,
    EMBEDDING_A,
    EMBEDDING_B,
    HUGGING_FACE_TARGETS,
    MAGNITUDE,
    MAX_ALPHA,
    OTHER_NAMES,
    LoRASettings,
)
from nemo_kto.artifacts.safetensors_files import WRITTEN_BY, Shapes, read_metadata, tensor_shapes
from nemo_kto.errors import UserError, printable, show
from nemo_kto.utils.files import file_inside, irregular, read_json

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(
    r"base_model\.model\.model\.layers\.(?P<layer>\d+)\."
    r"(?:self_attn|(?:mlp|block_sparse_moe|feed_forward)(?:\.experts\.\d+|\.shared_expert)?)"
    rf"\.(?P<module>{'|'.join((*HUGGING_FACE_TARGETS, *OTHER_NAMES))})\.(?:lora_[AB]\.weight|{MAGNITUDE})"
)
_EMBEDDING = re.compile(rf"base_model\.model\.model\.{EMBEDDING}\.({EMBEDDING_A}|{EMBEDDING_B})")
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
# Remedies for tensors that are not supported, by a part of their names.
_REMEDIES = {
    ".experts.": "; experts need names of their own",
    f"{EMBEDDING}.base_layer": "; save adapters of an embedding with save_embedding_layers=False",
}
# Initialisations that leave the base model unchanged; others (PiSSA, OLoRA, ...) modify it and train on the result.
_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
# Numeric fields: a test of the value, and the requirement in words.
_NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "r": (lambda value: type(value) is int and value >= 1, "an integer of at least 1"),
    "lora_alpha": (lambda value: 0 < value <= MAX_ALPHA, f"above 0 and at most {MAX_ALPHA}"),
    "lora_dropout": (lambda value: 0 <= value < 1, "from 0 to below 1"),
}


def read_adapter_settings(folder: str | Path) -> LoRASettings:
    """Return the settings of the adapter in a folder in PEFT's format.

    Raises:
        UserError: the folder holds no adapter, the adapter has unsupported features (all are listed), or a file is a link
            out of the folder.
    """
    config, shapes = _read(Path(folder))
    modules_of_layer: dict[int, set[str]] = defaultdict(set)
    for match in filter(None, map(_TENSOR.fullmatch, shapes)):
        modules_of_layer[int(match["layer"])].add(OTHER_NAMES.get(match["module"], match["module"]))
    if problems := list(_refusals(config, shapes, modules_of_layer.values())):
        message = f"{folder}: adapters must be LoRA or DoRA on the linear layers, got otherwise:"
        raise UserError(
            "\n  ".join([message, *problems, "train such adapters, or merge these into their base model with peft"])
        )
    layers = sorted(modules_of_layer)
    modules = set(modules_of_layer[layers[0]] if layers else ())
    modules |= {EMBEDDING} if _adapts_embedding(shapes) else set()
    limited = config.get("layers_to_transform") is not None or isinstance(config.get("target_modules"), str)
    return LoRASettings(
        rank=config["r"],
        alpha=float(config["lora_alpha"]),
        rslora=bool(config.get("use_rslora")),
        dora=bool(config.get("use_dora")),
        dropout=float(config.get("lora_dropout") or 0.0),
        target_modules=tuple(module for module in (*HUGGING_FACE_TARGETS, EMBEDDING) if module in modules),
        layers=tuple(layer + 1 for layer in layers) if limited or layers != list(range(len(layers))) else None,
    )


def _adapts_embedding(shapes: Shapes) -> bool:
    return any(map(_EMBEDDING.fullmatch, shapes))


def is_our_adapter(folder: Path) -> bool:
    """Return whether this program wrote the folder."""
    try:
        return read_metadata(folder / ADAPTER_WEIGHTS).get("written_by") == WRITTEN_BY
    except UserError:
        return False


def _read(folder: Path) -> tuple[dict[str, Any], Shapes]:
    """Return the configuration, and the shape of each tensor."""
    files = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    kinds = {name: irregular(folder / name) or "not there" for name in files if not (folder / name).is_file()}
    if kinds:
        message = " and ".join(f"{name} is {kind}" for name, kind in kinds.items())
        raise UserError(
            f"{folder} must be an adapter in PEFT's format, but {message}; load it with peft and write it with "
            "save_pretrained"
        )
    config, weights = (file_inside(folder, name) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS))
    return read_json(config), tensor_shapes(weights)


def _refusals(config: Mapping[str, Any], shapes: Shapes, adapted: Collection[set[str]]) -> Iterator[str]:
    """Yield the problems of an adapter with this configuration, these tensors, and these modules of each adapted layer."""
    if config.get("peft_type") != "LORA":
        yield f"peft_type must be LORA, got {printable(str(config.get('peft_type')), 60)}"
        return
    if config.get("bias", "none") != "none":
        yield f"bias must be none, got {printable(str(config['bias']), 60)}"
    if (start := config.get("init_lora_weights")) not in _STARTS:
        yield f"init_lora_weights must leave the base model as it is, got {printable(str(start), 60)}"
    for key, (holds, text) in _NUMBERS.items():
        value = config.get(key)
        if (key in config or key in ("r", "lora_alpha")) and not (isinstance(value, int | float) and holds(value)):
            yield f"{key} must be {text}, got {show(value)}"
    if (targets := config.get("target_modules")) is not None and not isinstance(targets, str | list):
        yield f"target_modules must be a list of names, got {show(targets)}"
    for key, value in config.items():
        if key in ("rank_pattern", "alpha_pattern") and isinstance(value, dict):
            value = {name: number for name, number in value.items() if name != JOINED_PATTERN}  # matches no tensor
        if value and key not in _HARMLESS:
            yield f"{printable(key, 60)} must not be set, got {printable(str(value), 60)}"
    if others := [name for name in shapes if not (_TENSOR.fullmatch(name) or _EMBEDDING.fullmatch(name))]:
        example = printable(others[0], 100)
        text = f"tensors must belong to {', '.join(HUGGING_FACE_TARGETS)}, got {len(others)} others, such as {example}"
        yield text + next((remedy for part, remedy in _REMEDIES.items() if part in others[0]), "")
    yield from _wrong_shapes(config.get("r"), shapes)
    dora, magnitudes = bool(config.get("use_dora")), any(name.endswith(MAGNITUDE) for name in shapes)
    if adapted and dora != magnitudes:
        which = "with" if magnitudes else "without"
        yield f"use_dora must be {magnitudes} {which} {MAGNITUDE} among the tensors, got {dora}"
    if dora and any(".experts." in name for name in shapes):
        yield "use_dora must be False with adapters on experts, which have none in peft either, got True"
    if _adapts_embedding(shapes):
        if config.get("layers_to_transform") is not None or isinstance(targets, str):
            yield f"layers_to_transform must not be set, and target_modules a list, beside adapters of {EMBEDDING}"
    elif not adapted:
        yield "at least one layer must be adapted, got no tensors of adapters"
    if len(set(map(frozenset, adapted))) > 1:
        yield f"every adapted layer must have the same modules adapted, got {len(adapted)} layers that differ"


def _wrong_shapes(rank: object, shapes: Shapes) -> Iterator[str]:
    """Yield a message about the first tensor whose rank differs from the configuration's."""
    for name, shape in shapes.items():
        if name.endswith(MAGNITUDE) or not (_TENSOR.fullmatch(name) or _EMBEDDING.fullmatch(name)):
            continue
        along = 0 if ".lora_A." in name or name.endswith(EMBEDDING_A) else 1
        if len(shape) != 2 or shape[along] != rank:
            yield f"tensors must have the rank of the configuration, r = {rank}, got shape {list(shape)} of {name}"
            return
