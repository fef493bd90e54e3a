"""Import and export of adapters in PEFT's format, at any layout.

The format is a folder with adapter_config.json and adapter_model.safetensors, which ``peft.PeftModel.from_pretrained``
applies to the Hugging Face model that the adapters were trained on.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.family import name_in_file
from nemo_kto.architecture.lora import (
    NEMO_TARGETS,
    LoRASettings,
    adapted_mappings,
    adapted_modules,
    has_adaptable_experts,
    hf_module,
)
from nemo_kto.checkpoint.sharded_state import adapters_of
from nemo_kto.errors import UserError
from nemo_kto.huggingface.export_folder import write_together
from nemo_kto.huggingface.hf_weights import read_weights
from nemo_kto.huggingface.quantized import StoredWeight
from nemo_kto.huggingface.rank_weights import differences, gather_weights, rank_adapters, wanted_adapters
from nemo_kto.model_files.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    JOINED,
    JOINED_PATTERN,
    MODULES,
    beginning_of,
    is_our_adapter,
    read_adapter_settings,
)
from nemo_kto.model_files.safetensors_files import WRITTEN_BY, read_header
from nemo_kto.models.lora.adapters import magnitudes, set_magnitudes


def export_adapter(
    chunks: Sequence[nn.Module],
    architecture: Architecture,
    *,
    out: str | Path,
    base_model: str | Path,
    describe: Callable[[Path], object] = lambda folder: None,
) -> None:
    """Write the adapters in PEFT's format, as :func:`nemo_kto.huggingface.hf_weights.export` writes the model.

    ``base_model`` (folder or name) is recorded in the configuration. Raises like ``export``, and ValueError for a model
    without adapters.
    """
    settings, instead = _settings(chunks), magnitudes(chunks)
    prefixes = {MODULES + "model.": MODULES + architecture.family.module_prefix}

    def write(folder: Path, stream: Iterator[tuple[str, Tensor]]) -> None:
        # the parts of a fused layer that are not adapted are zero here and do not exist in PEFT
        kept = ((name, tensor) for name, tensor in stream if hf_module(name) in settings.modules)
        tensors = {name_in_file(name, prefixes): tensor.contiguous() for name, tensor in kept}
        save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt", "written_by": WRITTEN_BY})
        text = json.dumps(_config(settings, architecture, base_model), indent=2) + "\n"
        (folder / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
        describe(folder)

    write_together(
        "export of the adapters",
        target=Path(out),
        is_ours=is_our_adapter,
        prepare=lambda: None,
        stream=lambda: gather_weights(rank_adapters(chunks, architecture, settings, instead), architecture),
        write=write,
    )


def check_adapter(architecture: Architecture, settings: LoRASettings, folder: str | Path) -> dict[str, StoredWeight]:
    """Compare an adapter in PEFT's format with the model, by the header of its file, and return each tensor by its name.

    Raises UserError if it is not an adapter, or one with other tensors than ``settings`` need; lists all differences.
    """
    saved, file = read_adapter_settings(folder), Path(folder) / ADAPTER_WEIGHTS
    found, shapes = read_header(file)[0], wanted_adapters(architecture, settings)
    prefixes = {MODULES + "model.": beginning_of(found) or MODULES + architecture.family.module_prefix}
    names = {name: name_in_file(name, prefixes) for name in shapes}
    wanted = {names[name]: shape for name, shape in shapes.items()}
    count, problems = differences(wanted, {name: tensor.shape for name, tensor in found.items()})
    if not math.isclose(settings.scale, saved.scale):
        divisor = f"sqrt({saved.rank})" if saved.rslora else saved.rank
        problems.insert(0, f"scale of the adapters: expected {settings.scale:g}, got {saved.alpha:g} / {divisor}")
        count += 1
    if problems:
        given = f"rank {settings.rank}, {', '.join(settings.modules)}"
        message = f"{folder}: the adapters must be those that the model was given ({given}), got {count} differences:"
        raise UserError("\n  ".join([message, *problems]))
    return {
        ours: StoredWeight(name=name, tensors={"": found[name]}, shape=found[name].shape) for ours, name in names.items()
    }


def load_adapter(chunks: Sequence[nn.Module], architecture: Architecture, folder: str | Path) -> None:
    """Fill the adapters of this rank's chunks from a folder in PEFT's format, before an optimizer copies their parameters.

    The base weights must be loaded already: DoRA's magnitudes are stored as differences from the norms of weight rows.
    Raises UserError as :func:`check_adapter`, on every rank.
    """
    settings = _settings(chunks)
    files = check_adapter(architecture, settings, folder)
    instead = magnitudes(chunks)
    read_weights(rank_adapters(chunks, architecture, settings, instead), architecture, files)
    set_magnitudes(chunks, instead)


def _settings(chunks: Sequence[nn.Module]) -> LoRASettings:
    settings = adapters_of(chunks)
    if settings is None:
        raise ValueError("the model must have adapters, got one without; call models.lora.add_adapters")
    return settings


def _config(settings: LoRASettings, architecture: Architecture, base_model: str | Path) -> dict[str, object]:
    family = architecture.family
    mixture = _of_mixture(settings, architecture) if has_adaptable_experts(family) else {}
    dense = [mapping for mapping in adapted_mappings(architecture, settings) if not mapping.of_expert]
    # outside of the text model, some modules have the names of adapted ones
    outside = {"exclude_modules": f"(?!{re.escape(family.module_prefix)}).*"} if family.text_type else {}
    names, of_dense = _own_names(architecture), {hf_module(name) for mapping in dense for name in mapping.hf_names}
    modules = [module for module in adapted_modules(architecture, settings) if module in of_dense]
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base_model), "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": [names.get(module, module) for module in modules],
        "layers_to_transform": None if settings.layers is None else [layer - 1 for layer in settings.layers],
        "bias": "none", "fan_in_fan_out": False, "init_lora_weights": True, "modules_to_save": None,
        "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": settings.rslora, "use_dora": settings.dora,
        **outside,
        **mixture,
    }  # fmt: skip


def _own_names(architecture: Architecture) -> dict[str, str]:
    """Return the family's names of linear layers that settings call otherwise."""
    return {usual: own for own, usual in architecture.family.module_names.items()}


def _of_mixture(settings: LoRASettings, architecture: Architecture) -> dict[str, object]:
    """Return the entries of the configuration for a mixture-of-experts model whose MLPs or experts are adapted.

    transformers keeps all experts of a layer in one tensor, with gate and up projection joined. peft joins their adapters
    too, with twice the rank, and identifies them by parameter names. The other MLPs are given by parameter names as well,
    because module names would match the experts too.
    """
    own, names = _own_names(architecture), list[str]()
    for mapping in (mapping for mapping in adapted_mappings(architecture, settings) if ".mlp." in mapping.mcore_name):
        if not any(architecture.instances(mapping, range(architecture.num_layers))):
            continue
        if mapping.of_expert:
            block = "feed_forward" if any(".feed_forward." in name for name in mapping.hf_names) else "mlp"
            names.append(f"{block}.experts.{'down_proj' if len(mapping.hf_names) == 1 else JOINED}")
        else:
            adapted = [name for name in mapping.hf_names if hf_module(name) in settings.modules]
            names += [name.removeprefix("model.layers.{layer}.") for name in adapted]
    if not names:
        return {}
    if settings.layers is not None:
        names = [f"layers.{number - 1}.{name}" for number in settings.layers for name in names]
    return {
        "target_modules": [own.get(module, module) for module in settings.modules if module not in NEMO_TARGETS["mlp"]],
        "target_parameters": names,
        "rank_pattern": {JOINED_PATTERN: 2 * settings.rank},
        "alpha_pattern": {JOINED_PATTERN: settings.alpha * (math.sqrt(2) if settings.rslora else 2)},
        "lora_dropout": 0.0,  # peft accepts no other value for target_parameters
    }
