"""This rank's parameters as weights of a Hugging Face folder, and their stream from all ranks to rank 0, at any layout."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.lora import LoRASettings, adapted_mappings, adapter_mappings, hf_module
from nemo_kto.architecture.segments import is_cut, segments, shape_in_file, source_shapes, split_dimension
from nemo_kto.device import device
from nemo_kto.distributed import state
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


# Header of a parameter sent by a pipeline stage: mapping, layer and expert, and shape and dtype of the values that follow.
_Header = tuple[ParamMapping, Mapping[str, int], torch.Size, torch.dtype]


def sends_weights() -> bool:
    """Return whether this rank takes part in :func:`gather_weights`: it holds the first copy of the layers or of experts."""
    return has_first_copy(of_expert=False) or has_first_copy(of_expert=True)


def has_first_copy(*, of_expert: bool) -> bool:
    """Return whether this rank holds the first copy of weights of experts, or of all others."""
    if of_expert:
        return bool(parallel_state.get_expert_data_parallel_rank() == 0)
    return bool(parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0)


def gather_weights(weights: Iterable[Weight], architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of the model under its name in the file on rank 0; other ranks send theirs and yield nothing.

    On rank 0 the names are those of the mappings of ``architecture``, which may join experts that the weights' own do not.
    To be called on the ranks where :func:`sends_weights` is True, all of which must consume the whole iterator. If the file
    has the experts of a layer in one tensor, rank 0 keeps them until all have arrived.
    """
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    stages = dist.get_process_group_ranks(pipeline)
    leads = dist.get_rank() == dist.get_process_group_ranks(_stage_group())[0]
    first_stage = parallel_state.get_pipeline_model_parallel_rank() == 0
    files = FileWeights(architecture=architecture)
    for weight in weights:
        for place, whole in () if weight.copied else _whole_values(weight, architecture, leads=leads):
            if first_stage:
                yield from files.of(weight.mapping, place, whole)
            else:
                header: _Header = (weight.mapping, place, whole.shape, whole.dtype)
                dist.send_object_list([header], dst=stages[0], group=pipeline)
                dist.send(whole, dst=stages[0], group=pipeline)
    if leads and not first_stage:
        dist.send_object_list([None], dst=stages[0], group=pipeline)
    for stage in stages[1:] if leads and first_stage else ():
        received: list[_Header | None] = [None]
        while True:
            dist.recv_object_list(received, src=stage, group=pipeline)
            if received[0] is None:
                break
            mapping, place, shape, dtype = received[0]
            whole = torch.empty(shape, dtype=dtype, device=device.current_device())
            dist.recv(whole, src=stage, group=pipeline)
            yield from files.of(mapping, place, whole)


def _stage_group() -> dist.ProcessGroup:
    """Return the group of this pipeline stage, over which its experts are partitioned; its first rank is the leader."""
    return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)


def _whole_values(weight: Weight, architecture: Architecture, *, leads: bool) -> Iterator[tuple[Mapping[str, int], Tensor]]:
    """Yield the whole weight, for an expert those of all expert-parallel ranks, on the stage's leader; send it elsewhere."""
    if not has_first_copy(of_expert=weight.mapping.of_expert):
        return
    whole, stage = _gather_shards(weight), _stage_group()
    if not weight.mapping.of_expert:
        if leads:
            yield weight.place, whole
        return
    holders = dist.get_process_group_ranks(parallel_state.get_expert_model_parallel_group())
    if leads:
        yield weight.place, whole
        on_each = architecture.sizes["experts"] // len(holders)
        for number, holder in enumerate(holders[1:], start=1):
            dist.recv(received := torch.empty_like(whole), src=holder, group=stage)
            yield {**weight.place, "expert": weight.place["expert"] + number * on_each}, received
    elif parallel_state.get_expert_tensor_parallel_rank() == 0:
        dist.send(whole, dst=dist.get_process_group_ranks(stage)[0], group=stage)


def _gather_shards(weight: Weight) -> Tensor:
    """Return the concatenated shards of a weight on the first rank of its tensor-parallel group, the own shard elsewhere."""
    shard, dimension = weight.parameter.data, split_dimension(weight.mapping)
    group = state.tensor_group(of_expert=weight.mapping.of_expert)
    ranks = dist.get_process_group_ranks(group)
    if dimension is None or not is_cut(weight.mapping) or len(ranks) == 1:
        return shard.contiguous()
    shards = [torch.empty_like(shard) for _ in ranks] if dist.get_rank() == ranks[0] else None
    dist.gather(shard.contiguous(), shards, dst=ranks[0], group=group)
    return torch.cat(shards, dim=dimension) if shards else shard


@dataclass(kw_only=True, eq=False)
class FileWeights:
    """Splitter of parameters into the file's weights, which also joins experts that the file has in one tensor."""

    architecture: Architecture
    _joined: dict[str, tuple[Tensor, int]] = field(default_factory=dict, init=False)  # tensor and number of missing experts

    @cached_property
    def _mappings(self) -> Mapping[str, ParamMapping]:
        return {mapping.mcore_name: mapping for mapping in self.architecture.family.mappings}

    def of(self, mapping: ParamMapping, place: Mapping[str, int], whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that are complete with this parameter, by their names in the file."""
        mapping = self._mappings.get(mapping.mcore_name, mapping)
        for hf_name, values in zip(mapping.hf_names, self._parts(mapping, whole), strict=True):
            name, values = hf_name.format(**place), values.T if mapping.transposed else values
            if not mapping.joins_experts:
                yield name, values
                continue
            experts = self.architecture.sizes["experts"]
            if name not in self._joined:
                self._joined[name] = values.new_empty(experts, *values.shape), experts
            joined, missing = self._joined.pop(name)
            joined[place["expert"]] = values
            if missing > 1:
                self._joined[name] = joined, missing - 1
            else:
                yield name, joined

    def _parts(self, mapping: ParamMapping, whole: Tensor) -> Iterator[Tensor]:
        dimension = split_dimension(mapping)
        parts = [] if dimension is None else segments(mapping, self.architecture)
        for source, shape in enumerate(source_shapes(mapping, self.architecture)):
            if dimension is None or len(parts) == 1:
                yield whole.cpu()
                continue
            values = torch.empty(shape, dtype=whole.dtype)
            position = 0
            for part in parts:
                if part.source == source:
                    place = values[(slice(None),) * dimension + (part.where,)]
                    place.copy_(whole.narrow(dimension, position, part.length))
                position += part.length
            yield values
