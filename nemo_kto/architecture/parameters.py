"""Parameters held by a rank, computed from the table of the model's family without building the model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.lora import LoRASettings, adapted_mappings, adapter_mappings
from nemo_kto.architecture.segments import is_cut, segments, shards, source_shapes, split_dimension
from nemo_kto.architecture.stages import ONE_STAGE, PipelineSplit
from nemo_kto.mixers.param_mapping import ParamMapping, Split


@dataclass(frozen=True, kw_only=True)
class RankParameter:
    """A parameter of a rank, which may occur in several layers and in each expert of these."""

    name: str  # with {layer} and {expert} in the place of numbers
    layers: tuple[int, ...]  # from 0; empty for a parameter outside of the layers
    experts: int  # number of a layer's experts on the rank; 1 for a parameter that is of none
    shape: tuple[int, ...]  # of the rank's shard
    trained: bool  # False if adapters are trained instead
    is_replicated: bool  # every tensor-parallel rank holds all of it; always False for a parameter of an expert

    @property
    def names(self) -> list[str]:
        """Name of each of its occurrences."""
        if not self.layers:
            return [self.name]
        return [self.name.format(layer=layer, expert=expert) for layer in self.layers for expert in range(self.experts)]

    @property
    def count(self) -> int:
        """Number of its occurrences."""
        return max(1, len(self.layers)) * self.experts

    @cached_property
    def numel(self) -> int:
        """Number of values in the rank's shard of one of them."""
        return math.prod(self.shape)

    @cached_property
    def total(self) -> int:
        """Number of values of all of them."""
        return self.count * self.numel

    @property
    def of_expert(self) -> bool:
        """Whether this is a parameter of an expert."""
        return ".experts." in self.name

    @property
    def is_multiplied(self) -> bool:
        """Whether this is the weight matrix of a linear layer within the transformer layers, to which fp8 applies."""
        return ".linear_" in self.name and self.name.endswith(".weight")


def rank_parameters(
    architecture: Architecture,
    *,
    split: PipelineSplit = ONE_STAGE,
    expert_parallel: int = 1,
    stage: int = 0,
    adapters: LoRASettings | None = None,
) -> list[RankParameter]:
    """Return the parameters of a rank, including padded heads and rows. All ranks of a stage hold the same shapes.

    ``expert_parallel`` divides the number of experts; the first such rank is described. ``stage`` is counted from 0. Without
    ``adapters`` all weights are trained. Raises SplitError if the layers cannot be partitioned in this way.
    """
    is_first, is_last = stage == 0, stage == split.stages - 1
    layers = [layer for chunk in split.layers(architecture.num_layers)[stage] for layer in chunk]
    experts = architecture.sizes["experts"] // expert_parallel
    parameters: list[RankParameter] = []

    def add(mapping: ParamMapping, name: str, layers: Iterable[int] = (), *, trained: bool) -> None:
        shape, dimension = [*source_shapes(mapping, architecture)[0]], split_dimension(mapping)
        if dimension is not None:
            whole = sum(segment.length for segment in segments(mapping, architecture))
            shape[dimension] = whole // shards(mapping, architecture) if is_cut(mapping) else whole
        parameters.append(
            RankParameter(
                name=name,
                layers=tuple(layers),
                experts=experts if mapping.of_expert else 1,
                shape=tuple(shape),
                trained=trained,
                is_replicated=not is_cut(mapping) and not mapping.of_expert,
            )
        )

    for mapping in architecture.family.mappings:
        name, trained = mapping.mcore_name, adapters is None and not mapping.frozen
        places = [*architecture.instances(mapping, layers, experts=1)]
        if not places:
            continue
        if "{layer}" in name:
            add(mapping, name, (place["layer"] for place in places), trained=trained)
        elif is_first if mapping.split is Split.VOCABULARY and name.startswith("embedding.") else is_last:
            add(mapping, name, trained=trained)
        elif is_last and architecture.tied:  # the last stage holds a copy of the embedding
            add(mapping, "output_layer.weight", trained=trained)
    if adapters is None:
        return parameters
    layers = [layer for layer in layers if adapters.layers is None or layer + 1 in adapters.layers]
    for mapping in adapted_mappings(architecture, adapters):
        for part in adapter_mappings(mapping, adapters):
            places = [*architecture.instances(part, layers, experts=1)]
            if places and (is_first or "layer" in places[0]):
                add(part, part.mcore_name, (place["layer"] for place in places if place), trained=True)
    return parameters
