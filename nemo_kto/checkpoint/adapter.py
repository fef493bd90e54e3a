"""Adapters in PEFT's format, in and out, at any layout.

A folder with adapter_config.json and adapter_model.safetensors, which ``peft.PeftModel.from_pretrained`` puts on the model
in Hugging Face format that the adapters were trained on.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from nemo_kto.checkpoint.folders import start_partial, write_together
from nemo_kto.checkpoint.mapping import differences, rank_adapters, wanted_adapters
from nemo_kto.checkpoint.model_state import adapters_of
from nemo_kto.checkpoint.safetensors_files import tensor_shapes
from nemo_kto.checkpoint.stream import gather_weights, read_weights
from nemo_kto.files import partial_folder, publish_folder
from nemo_kto.models.architecture import Architecture
from nemo_kto.models.lora_settings import HUGGING_FACE_TARGETS, LoRASettings

_CONFIG, _WEIGHTS, _WRITTEN_BY = "adapter_config.json", "adapter_model.safetensors", "nemo_kto"
_TENSOR = re.compile(
    rf"base_model\.model\.model\.layers\.(\d+)\.(?:self_attn|mlp)\.({'|'.join(HUGGING_FACE_TARGETS)})\.lora_[AB]\.weight"
)
# Entries of PEFT's configuration that may hold anything: read here, or without meaning for trained adapters. Any other that
# is set asks for something that our adapters are not.
_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha",
    "lora_dropout", "megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "revision",
    "runtime_config", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
# Ways to start that leave the base model as it is; others (PiSSA, OLoRA, ...) train against another one.
_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


def export_adapter(
    chunks: Sequence[nn.Module], architecture: Architecture, *, out: str | Path, base_model: str | Path
) -> None:
    """Write the adapters in PEFT's format, as :func:`nemo_kto.checkpoint.huggingface.export` writes the model.

    Args:
        base_model: folder or name of the model that the adapters belong to; stands in the configuration.

    Raises:
        RuntimeError: rank 0 could not write; says why, on every rank alike.
        ValueError: the model has no adapters.
    """
    settings, target = _settings(chunks), Path(out)

    def write(stream: Iterator[tuple[str, Tensor]]) -> None:
        # parts of a fused layer that are not adapted are zero, and nothing to PEFT
        tensors = {name: tensor.contiguous() for name, tensor in stream if name.split(".")[-3] in settings.modules}
        save_file(tensors, partial_folder(target) / _WEIGHTS, metadata={"format": "pt", "written_by": _WRITTEN_BY})

    def publish() -> None:
        text = json.dumps(_config(settings, base_model), indent=2) + "\n"
        (partial_folder(target) / _CONFIG).write_text(text, encoding="utf-8")
        publish_folder(target)

    write_together(
        "export of the adapters",
        prepare=lambda: start_partial(target, is_ours=_is_ours),
        stream=lambda: gather_weights(rank_adapters(chunks, architecture, settings), architecture),
        write=write,
        publish=publish,
    )


def read_adapter_settings(folder: str | Path) -> LoRASettings:
    """What the adapter in a folder in PEFT's format adapts, and how.

    Rank-stabilised scaling (Kalajdzievski 2023, arXiv 2312.03732), alpha / sqrt(rank), comes out as an alpha that gives the
    same scale.

    Raises:
        FileNotFoundError: it lacks one of the two files.
        ValueError: it is no adapter, or asks for what our adapters are not; lists all of it.
    """
    config, shapes = _read(Path(folder))
    modules_of_layer: dict[int, set[str]] = defaultdict(set)
    for match in filter(None, map(_TENSOR.fullmatch, shapes)):
        modules_of_layer[int(match[1])].add(match[2])
    if problems := list(_refusals(config, shapes, modules_of_layer.values())):
        told = f"{folder}: adapters must be plain LoRA on the linear layers, got otherwise:"
        raise ValueError("\n  ".join([told, *problems]))
    layers = sorted(modules_of_layer)
    modules = modules_of_layer[layers[0]]
    limited = config.get("layers_to_transform") is not None or isinstance(config.get("target_modules"), str)
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    return LoRASettings(
        rank=rank,
        alpha=alpha * math.sqrt(rank) if config.get("use_rslora") else alpha,
        dropout=float(config.get("lora_dropout") or 0.0),
        target_modules=tuple(module for module in HUGGING_FACE_TARGETS if module in modules),
        layers=tuple(layer + 1 for layer in layers) if limited or layers != list(range(len(layers))) else None,
    )


def load_adapter(chunks: Sequence[nn.Module], architecture: Architecture, folder: str | Path) -> None:
    """Fill the adapters of this rank's chunks from a folder in PEFT's format, before an optimizer copies their parameters.

    Raises:
        FileNotFoundError: it lacks one of the two files.
        ValueError: it is not for a model with these adapters; lists all differences, on every rank alike.
    """
    settings, saved = _settings(chunks), read_adapter_settings(folder)
    _, shapes = _read(Path(folder))
    wanted = wanted_adapters(architecture, settings)
    problems = differences(wanted, shapes)
    if not math.isclose(settings.scale, saved.scale):
        problems.insert(0, f"alpha / rank: expected {settings.scale:g}, got {saved.alpha:g} / {saved.rank}")
    if problems:
        told = (
            f"{folder}: the adapters must be those that the model was given (rank {settings.rank}, "
            f"{', '.join(settings.modules)}), got {len(problems)} differences:"
        )
        raise ValueError("\n  ".join([told, *problems]))
    files = dict.fromkeys(wanted, Path(folder) / _WEIGHTS)
    read_weights(rank_adapters(chunks, architecture, settings), architecture, files)


def _settings(chunks: Sequence[nn.Module]) -> LoRASettings:
    settings = adapters_of(chunks)
    if settings is None:
        raise ValueError("the model must have adapters, got one without; call models.lora.add_adapters")
    return settings


def _config(settings: LoRASettings, base_model: str | Path) -> dict[str, object]:
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base_model), "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": list(settings.modules),
        "layers_to_transform": None if settings.layers is None else [layer - 1 for layer in settings.layers],
        "bias": "none", "fan_in_fan_out": False, "init_lora_weights": True, "modules_to_save": None,
        "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False, "use_dora": False,
    }  # fmt: skip


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """The configuration, and the shape of each tensor."""
    if absent := [name for name in (_CONFIG, _WEIGHTS) if not (folder / name).is_file()]:
        raise FileNotFoundError(
            f"{folder} must be an adapter in PEFT's format, but {' and '.join(absent)} is not there; "
            "load it with peft and write it with save_pretrained"
        )
    return json.loads((folder / _CONFIG).read_text(encoding="utf-8")), tensor_shapes(folder / _WEIGHTS)


def _refusals(config: Mapping[str, object], names: Iterable[str], adapted: Collection[set[str]]) -> Iterator[str]:
    """What is wrong with an adapter of this configuration, these tensors, and these modules of each adapted layer."""
    if config.get("peft_type") != "LORA":
        yield f"peft_type must be LORA, got {config.get('peft_type')}"
        return
    if config.get("bias", "none") != "none":
        yield f"bias must be none, got {config['bias']}"
    if (start := config.get("init_lora_weights")) not in _STARTS:
        yield f"init_lora_weights must leave the base model as it is, got {start}"
    yield from (f"{key} must not be set, got {value}" for key, value in config.items() if value and key not in _HARMLESS)
    if others := [name for name in names if not _TENSOR.fullmatch(name)]:
        yield f"tensors must belong to {', '.join(HUGGING_FACE_TARGETS)}, got {len(others)} others, such as {others[0]}"
    if len(set(map(frozenset, adapted))) != 1:
        yield f"every adapted layer must have the same modules adapted, got {len(adapted)} layers that differ"


def _is_ours(folder: Path) -> bool:
    try:
        with safe_open(folder / _WEIGHTS, framework="pt") as handle:
            return (handle.metadata() or {}).get("written_by") == _WRITTEN_BY
    except OSError:
        return False
