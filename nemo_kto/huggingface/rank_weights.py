"""Mapping of this rank's parameters to the weights of a Hugging Face folder, by the table of the model's family."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.lora import LoRASettings, adapted_mappings, adapter_mappings, hf_module
from nemo_kto.architecture.segments import shape_in_file, source_shapes
from nemo_kto.distributed.gradients import finish_gathers
from nemo_kto.errors import printable
from nemo_kto.mixers.param_mapping import ParamMapping
from nemo_kto.model_files.safetensors_files import Shapes
from nemo_kto.models.gpt import HiddenStateGPT
from nemo_kto.models.lora.adapters import is_adapter

# Transformer Engine stores the norm before a linear layer inside that layer.
ENGINE_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_SHOWN = 8  # differences of a kind to list; a model of another size differs everywhere
# A separate expert, and an expert in Transformer Engine's grouped layer; both are numbered within their rank.
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<rest>.+)")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(?P<rest>linear_fc[12]\.weight)(?P<expert>\d+)")


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter of this rank and its mapping."""

    parameter: Tensor  # the parameter, or a tensor that replaces it
    mapping: ParamMapping  # its entry in the family's table
    # ``layer``, its number in the whole model, and ``expert``, its number in the layer, if it belongs to one
    place: Mapping[str, int]
    copied: bool = False  # it is the last stage's copy of a tied embedding


def wanted_weights(architecture: Architecture) -> Shapes:
    """Return name and shape of every weight that a Hugging Face folder of this architecture must hold."""
    return _shapes(architecture.family.mappings, architecture, range(architecture.num_layers))


def frozen_weights(architecture: Architecture) -> Shapes:
    """Return name and shape of those weights that are never trained."""
    mappings = [mapping for mapping in architecture.family.mappings if mapping.frozen]
    return _shapes(mappings, architecture, range(architecture.num_layers))


def wanted_adapters(architecture: Architecture, settings: LoRASettings) -> Shapes:
    """Return name and shape of every tensor that an adapter of this model must hold."""
    layers = [layer - 1 for layer in settings.layers or range(1, architecture.num_layers + 1)]
    shapes = _shapes(_adapter_mappings(architecture, settings), architecture, layers)
    return {name: shape for name, shape in shapes.items() if hf_module(name) in settings.modules}


def _adapter_mappings(architecture: Architecture, settings: LoRASettings) -> list[ParamMapping]:
    groups = [adapter_mappings(mapping, settings) for mapping in adapted_mappings(architecture, settings)]
    return [mapping for group in groups for mapping in group]


def _shapes(mappings: Iterable[ParamMapping], architecture: Architecture, layers: Sequence[int]) -> Shapes:
    return {
        name.format(**place): shape_in_file(mapping, shape, architecture)
        for mapping in mappings
        for place in architecture.instances(mapping, layers)
        for name, shape in zip(mapping.hf_names, source_shapes(mapping, architecture), strict=True)
    }


def differences(wanted: Shapes, found: Shapes, ignored: Collection[str] = ()) -> tuple[int, list[str]]:
    """Return the number of missing, unexpected and misshapen weights, and a message for each.

    A kind with many has one message about the rest of them. Weights in ``ignored`` may exist or not.
    """
    others = {name: shape for name, shape in found.items() if name in wanted and wanted[name] != shape}
    kinds = [
        [f"missing: {name}" for name in wanted if name not in found],
        [f"unexpected: {printable(name, 200)}" for name in found if name not in wanted and name not in ignored],
        [f"{name}: expected shape {list(wanted[name])}, got {list(others[name])}" for name in wanted if name in others],
    ]
    more = [[f"and {len(kind) - _SHOWN:,} more"] if len(kind) > _SHOWN else [] for kind in kinds]
    return sum(map(len, kinds)), [line for kind, rest in zip(kinds, more, strict=True) for line in [*kind[:_SHOWN], *rest]]


def rank_weights(chunks: Sequence[nn.Module], architecture: Architecture) -> Iterator[Weight]:
    """Yield this rank's parameters but the adapters, with their mappings; KeyError if the table has none for a parameter."""
    mappings = {mapping.mcore_name: mapping for mapping in architecture.family.mappings}
    for name, place, parameter in _parameters(chunks):
        if name == "output_layer.weight" and architecture.tied:
            yield Weight(parameter=parameter, mapping=mappings["embedding.word_embeddings.weight"], place=place, copied=True)
        elif name in mappings:
            yield Weight(parameter=parameter, mapping=mappings[name], place=place)
        elif not is_adapter(name):
            raise KeyError(f"the table of {architecture.family.name} has no mapping for the parameter {name}")


def rank_adapters(
    chunks: Sequence[nn.Module], architecture: Architecture, settings: LoRASettings, instead: Mapping[nn.Parameter, Tensor]
) -> Iterator[Weight]:
    """Yield this rank's adapters, under PEFT's names; ``instead`` replaces parameters by the values that the file stores."""
    mappings = {mapping.mcore_name: mapping for mapping in _adapter_mappings(architecture, settings)}
    for name, place, parameter in _parameters(chunks):
        if is_adapter(name):
            yield Weight(parameter=instead.get(parameter, parameter), mapping=mappings[name], place=place)


def _parameters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, dict[str, int], nn.Parameter]]:
    """Yield each parameter with its name as in the tables and its layer and expert numbers."""
    finish_gathers(chunks)
    for chunk in chunks:
        gpt: HiddenStateGPT = unwrap_model(chunk)
        for name, parameter in gpt.named_parameters():
            place = {}
            if name.startswith("decoder.layers."):
                local, name = name.removeprefix("decoder.layers.").split(".", 1)
                layer = gpt.decoder.layers[int(local)]
                place["layer"] = layer.layer_number - 1  # layer_number counts from 1 over all stages
                name = ENGINE_NAMES.get(name, name)
                if (found := _LOCAL_EXPERT.fullmatch(name) or _GROUPED_EXPERT.fullmatch(name)) is not None:
                    parts = found.groupdict()
                    place["expert"] = layer.mlp.local_expert_indices[int(parts["expert"])]
                    name = f"mlp.experts.local_experts.{{expert}}.{parts['rest']}"
                name = "decoder.layers.{layer}." + name
            yield name, place, parameter
