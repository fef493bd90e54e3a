"""Streaming of weights from all ranks to rank 0, one at a time, at any layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.segments import is_cut, segments, source_shapes, split_dimension
from nemo_kto.device import device
from nemo_kto.distributed import state
from nemo_kto.huggingface.rank_weights import Weight
from nemo_kto.mixers.param_mapping import ParamMapping

# Header of a parameter sent by a pipeline stage: mapping, layer and expert, and shape and dtype of the values that follow.
_Header = tuple[ParamMapping, Mapping[str, int], torch.Size, torch.dtype]


def sends_weights() -> bool:
    """Return whether this rank takes part in :func:`gather_weights`: it holds the first copy of the layers or of experts."""
    return (
        parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        or parallel_state.get_expert_data_parallel_rank() == 0
    )


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
    if not weight.mapping.of_expert:
        if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
            whole = _gather_shards(weight)
            if leads:
                yield weight.place, whole
        return
    if parallel_state.get_expert_data_parallel_rank() > 0:
        return
    whole, stage = _gather_shards(weight), _stage_group()
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
