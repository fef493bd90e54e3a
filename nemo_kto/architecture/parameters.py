"""The parameters that a rank will hold, from the table of the model's family: nothing is built."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.families import ParamMapping, Split
from nemo_kto.architecture.lora import LoRASettings, adapted_mappings, adapter_mappings
from nemo_kto.architecture.segments import is_cut, segments, shards, source_shapes, split_dimension
from nemo_kto.architecture.stages import ONE_STAGE, PipelineSplit


@dataclass(frozen=True, kw_only=True)
class RankParameter:
    """A parameter of a rank.

    Attributes:
        name, shape: of the rank's part of it.
        trained: False where adapters are trained instead.
        is_replicated: every tensor-parallel rank holds all of it; of an expert it does not count.
    """

    name: str
    shape: tuple[int, ...]
    trained: bool
    is_replicated: bool

    @property
    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def of_expert(self) -> bool:
        """A parameter of an expert."""
        return ".experts." in self.name

    @property
    def is_multiplied(self) -> bool:
        """A matrix of a linear layer within the layers, which is what fp8 is for."""
        return ".linear_" in self.name and self.name.endswith(".weight")


def rank_parameters(
    architecture: Architecture,
    *,
    split: PipelineSplit = ONE_STAGE,
    expert_parallel: int = 1,
    stage: int = 0,
    adapters: LoRASettings | None = None,
) -> list[RankParameter]:
    """What a rank of a pipeline stage holds; padded heads and rows are counted. All ranks of a stage hold the same shapes.

    Args:
        architecture: the model; also says the tensor-parallel size.
        split: how the layers are shared out over the pipeline.
        expert_parallel: ranks over which experts are shared out, which divides their number; the first of them is meant.
        stage: from 0.
        adapters: what is adapted; None where all weights are trained.

    Raises:
        SplitError: the layers cannot be shared out like this.
    """
    is_first, is_last = stage == 0, stage == split.stages - 1
    layers = [layer for chunk in split.layers(architecture.num_layers)[stage] for layer in chunk]
    experts = architecture.sizes["experts"] // expert_parallel
    held = []
    for mapping in architecture.family.mappings:
        name = mapping.mcore_name
        hold = _form(mapping, architecture, trained=adapters is None)
        places = [place for place in architecture.instances(mapping, layers) if place.get("expert", -1) < experts]
        if "{layer}" in name:
            held += [hold(name=name.format(**place)) for place in places]
        elif not places:
            continue
        elif is_first if mapping.split is Split.VOCABULARY and name.startswith("embedding.") else is_last:
            held.append(hold(name=name))
        elif is_last and architecture.tied:  # the last stage has a copy of the embedding
            held.append(hold(name="output_layer.weight"))
    return held if adapters is None else [*held, *_adapters(architecture, adapters, layers, experts, is_first=is_first)]


def rank_shape(mapping: ParamMapping, architecture: Architecture) -> tuple[int, ...]:
    """Shape of a rank's part of a parameter."""
    shape, dimension = [*source_shapes(mapping, architecture)[0]], split_dimension(mapping)
    if dimension is not None:
        whole = sum(segment.length for segment in segments(mapping, architecture))
        shape[dimension] = whole // shards(mapping, architecture) if is_cut(mapping) else whole
    return tuple(shape)


def _adapters(
    architecture: Architecture, settings: LoRASettings, layers: Sequence[int], experts: int, *, is_first: bool
) -> Iterator[RankParameter]:
    for mapping in adapted_mappings(architecture, settings):
        for part in adapter_mappings(mapping, settings):
            hold = _form(part, architecture, trained=True)
            for place in architecture.instances(part, layers):
                selected = settings.layers is None or place["layer"] + 1 in settings.layers
                selected &= is_first or "layer" in place
                if selected and place.get("expert", -1) < experts:
                    yield hold(name=part.mcore_name.format(**place))


def _form(mapping: ParamMapping, architecture: Architecture, *, trained: bool) -> Callable[..., RankParameter]:
    """Makes one of those that a mapping describes, of its name."""
    is_replicated = not is_cut(mapping) and not mapping.of_expert
    return partial(RankParameter, shape=rank_shape(mapping, architecture), trained=trained, is_replicated=is_replicated)
