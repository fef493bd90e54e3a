"""Which blocks a backward pass goes through: all of them, and where weights are frozen those behind the first adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.families import ParamMapping
from nemo_kto.architecture.lora_mappings import adapted_mappings
from nemo_kto.architecture.lora_settings import LoRASettings
from nemo_kto.architecture.segments import split_dimension

ATTENTION, MLP, EXPERTS, SHARED_EXPERTS = "self_attention", "mlp", "mlp.experts", "mlp.shared_experts"


class Block(NamedTuple):
    """A part of a layer with a residual connection around it; experts and a shared expert have the same one.

    Attributes:
        layer: number of its layer, from 0.
        name: ``ATTENTION``, ``MLP``, ``EXPERTS`` or ``SHARED_EXPERTS``.
        adapted: its parameters that have adapters, once for all experts.
        enters: there is a gradient of its input.
        inside: there is one of what its last linear layer gets.
        leaves: there is one of what it adds.
    """

    layer: int
    name: str
    adapted: tuple[ParamMapping, ...]
    enters: bool
    inside: bool
    leaves: bool


def blocks_of(
    architecture: Architecture, layers: Sequence[int], *, adapters: LoRASettings | None, enters: bool
) -> Iterator[Block]:
    """The blocks of layers that follow one another, in the order of a forward pass.

    Args:
        architecture: the model.
        layers: their numbers, from 0.
        adapters: what is adapted; None where all weights are trained.
        enters: there is a gradient of what the first of the layers gets.
    """
    enters = enters or adapters is None
    adapted = _adapted(architecture, adapters)
    shared = architecture.experts is not None and architecture.experts.shared_ffn_hidden_size > 0
    mixture = (EXPERTS, SHARED_EXPERTS) if shared else (EXPERTS,)
    for layer in layers:
        selected = adapters is not None and (adapters.layers is None or layer + 1 in adapters.layers)
        for names in ((ATTENTION,), mixture if architecture.sparse_layers[layer] else (MLP,)):
            found = [adapted[name] if selected else () for name in names]
            for name, mappings in zip(names, found, strict=True):
                columns = any(split_dimension(mapping) == 0 for mapping in mappings)
                yield Block(layer, name, mappings, enters, enters or columns, enters or bool(mappings))
            enters = enters or any(found)


def _adapted(architecture: Architecture, adapters: LoRASettings | None) -> Mapping[str, tuple[ParamMapping, ...]]:
    """The parameters with adapters in each kind of block."""
    found = [] if adapters is None else adapted_mappings(architecture, adapters)
    every_layer = range(architecture.num_layers)
    held = [(_block_name(mapping), mapping) for mapping in found if any(architecture.instances(mapping, every_layer))]
    kinds = (ATTENTION, MLP, EXPERTS, SHARED_EXPERTS)
    return {kind: tuple(mapping for name, mapping in held if name == kind) for kind in kinds}


def _block_name(mapping: ParamMapping) -> str:
    """``mlp.experts`` of ``decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight``."""
    name = mapping.mcore_name.removeprefix("decoder.layers.{layer}.").replace(".local_experts.{expert}", "")
    return name.rpartition(".linear_")[0]
