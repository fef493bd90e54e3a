"""FLOPs per forward or backward pass, and the gradients that a backward pass needs if weights are frozen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.lora import EMBEDDING, LoRASettings, adapted_mappings, hf_module
from nemo_kto.architecture.segments import source_shapes, split_dimension
from nemo_kto.mixers import AttentionWindow
from nemo_kto.mixers.param_mapping import Layers, ParamMapping, Split
from nemo_kto.models.engine.sequences import SequenceBatch

MIXER, MLP, EXPERTS, SHARED_EXPERTS = "self_attention", "mlp", "mlp.experts", "mlp.shared_experts"


class Block(NamedTuple):
    """A part of a layer with a residual connection around it; experts and shared expert share one."""

    layer: int  # from 0
    name: str  # MIXER, MLP, EXPERTS or SHARED_EXPERTS
    adapted: tuple[ParamMapping, ...]  # parameters with adapters, listed once for all experts
    enters: bool  # the input of the block requires a gradient
    inside: bool  # the input of its last linear layer does
    leaves: bool  # its output does, which is added to the residual stream


def blocks_of(
    architecture: Architecture, layers: Sequence[int], *, adapters: LoRASettings | None, enters: bool
) -> Iterator[Block]:
    """Yield the blocks of consecutive layers in forward order; ``enters``: the input of the first requires a gradient."""
    enters = enters or adapters is None  # without adapters all weights are trained
    adapted: dict[str, tuple[ParamMapping, ...]] = dict.fromkeys((MIXER, MLP, EXPERTS, SHARED_EXPERTS), ())
    for mapping in [] if adapters is None else adapted_mappings(architecture, adapters):
        # decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight belongs to mlp.experts
        path = mapping.mcore_name.removeprefix("decoder.layers.{layer}.").replace(".local_experts.{expert}", "")
        block = path.rpartition(".linear_")[0]
        if (block := block if block in adapted else block.partition(".")[0]) in adapted:
            adapted[block] += (mapping,)
    shared = architecture.experts is not None and architecture.experts.shared_ffn_hidden_size > 0
    mixture = (EXPERTS, SHARED_EXPERTS) if shared else (EXPERTS,)
    for layer in layers:
        selected = adapters is not None and (adapters.layers is None or layer + 1 in adapters.layers)
        mlp = (MLP,) if architecture.layers_with[Layers.DENSE][layer] else ()
        for names in ((MIXER,), mixture if architecture.sparse_layers[layer] else mlp):
            has_adapters = False
            for name in names:
                held = [each for each in adapted[name] if selected and any(architecture.instances(each, [layer]))]
                columns = any(split_dimension(mapping) == 0 for mapping in held)
                yield Block(layer, name, tuple(held), enters, enters or columns, enters or bool(held))
                has_adapters = has_adapters or bool(held)
            enters = enters or has_adapters


class Passes(NamedTuple):
    """Number of passes through the model in a step."""

    forward: int = 0  # with adapters if there are any
    disabled: int = 0  # forward passes with adapters disabled
    backward: int = 0


class Flops(NamedTuple):
    """FLOPs of one or several passes."""

    per_token: int  # of the linear layers
    per_token_mlp: int  # the part of ``per_token`` that is in the MLPs
    per_token_pair: Mapping[AttentionWindow, int]  # of attention, for a pair of a token and a token it attends to
    per_response_token: int  # of the output layer, which is applied to response tokens only

    def attention(self, length: int) -> int:
        """Return the FLOPs of attention scores and values for a sequence of ``length`` tokens."""
        return sum(operations * window.pairs(length) for window, operations in self.per_token_pair.items())

    def of_tokens(self, length: int, responses: int = 0) -> int:
        """Return the FLOPs for a sequence of ``length`` tokens, of which ``responses`` are response tokens."""
        return self.per_token * length + self.attention(length) + self.per_response_token * responses

    def of_sequences(self, count: int, width: int) -> int:
        """Return the FLOPs for ``count`` sequences of ``width`` tokens, all but the first of which are response tokens."""
        return count * self.of_tokens(width, width - 1)

    def of(self, sequences: SequenceBatch) -> Tensor:
        """Return the FLOPs for the sequences without their padding: 0-d float64."""
        lengths, responses = sequences.lengths_B.tolist(), sequences.response_counts_B.tolist()
        return torch.tensor(sum(map(self.of_tokens, lengths, responses)), dtype=torch.float64)

    def of_prompts(self, lengths: Sequence[int]) -> Tensor:
        """Return the FLOPs for prompts of these lengths, without log-probs: 0-d float64."""
        return torch.tensor(sum(map(self.of_tokens, lengths)), dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """FLOPs of one pass of each kind, see :class:`Passes`."""

    forward: Flops
    disabled: Flops
    backward: Flops

    @classmethod
    def of_model(cls, architecture: Architecture, *, adapters: LoRASettings | None = None) -> ModelFlops:
        """Count the FLOPs of a whole copy of the model, independent of the layout; without adapters it is trained fully."""
        enters = adapters is not None and EMBEDDING in adapters.modules
        blocks = [*blocks_of(architecture, range(architecture.num_layers), adapters=adapters, enters=enters)]
        base = [product for block in blocks for product in _base_products(architecture, block)]
        adapter = [] if adapters is None else [*_adapter_products(architecture, blocks, adapters)]
        # the backward pass has a product for each gradient of an input, and one for each gradient of a trained weight
        gradients = [product for product in [*base, *adapter] if product.has_gradient]
        gradients += base if adapters is None else adapter
        output = 2 * architecture.hidden_size * architecture.vocab_size
        attention = _attention(architecture, blocks, backward=False)
        backward_attention = _attention(architecture, blocks, backward=True)
        return cls(
            forward=_sum([*base, *adapter], attention, output),
            disabled=_sum(base, attention, output),
            backward=_sum(gradients, backward_attention, output * (2 if adapters is None else 1)),
        )

    def of_passes(self, passes: Passes) -> Flops:
        """Return the total FLOPs of the given numbers of passes."""
        counted = [*zip(passes, (self.forward, self.disabled, self.backward), strict=True)]
        return Flops(
            per_token=sum(count * flops.per_token for count, flops in counted),
            per_token_mlp=sum(count * flops.per_token_mlp for count, flops in counted),
            per_token_pair={
                window: sum(count * flops.per_token_pair[window] for count, flops in counted)
                for window in self.forward.per_token_pair
            },
            per_response_token=sum(count * flops.per_response_token for count, flops in counted),
        )


class _Product(NamedTuple):
    """A matrix product: FLOPs per token, whether it is in an MLP, and whether its input requires a gradient."""

    flops: int
    is_mlp: bool
    has_gradient: bool


def _sum(products: list[_Product], per_token_pair: Mapping[AttentionWindow, int], per_response_token: int) -> Flops:
    return Flops(
        per_token=sum(product.flops for product in products),
        per_token_mlp=sum(product.flops for product in products if product.is_mlp),
        per_token_pair=per_token_pair,
        per_response_token=per_response_token,
    )


def _attention(architecture: Architecture, blocks: Sequence[Block], *, backward: bool) -> dict[AttentionWindow, int]:
    """Return the FLOPs of scores and values per pair of tokens, keyed by attention window."""
    found: dict[AttentionWindow, int] = {}
    for block in blocks:
        if block.name == MIXER:
            window, flops = architecture.mixers[block.layer].pair_flops(architecture, block.layer)
            found[window] = found.get(window, 0) + (2 * block.inside if backward else 1) * flops
    return found


def _base_products(architecture: Architecture, block: Block) -> Iterator[_Product]:
    """Yield the products with a block's weights: query, key, value (gate, up, router), then attention output (down)."""
    hidden, experts, inputs = architecture.hidden_size, architecture.experts, 1 + architecture.family.gated_mlp
    if block.name == MIXER:
        first, last = architecture.mixers[block.layer].products(architecture)
    elif block.name == MLP or experts is None:
        last = hidden * architecture.ffn_hidden_size
        first = inputs * last
    elif block.name == SHARED_EXPERTS:
        last = hidden * experts.shared_ffn_hidden_size
        first = inputs * last + hidden * experts.shared_gate
    else:
        last = experts.per_token * hidden * experts.ffn_hidden_size
        first = inputs * last + hidden * experts.number
    yield _Product(2 * first, block.name != MIXER, block.enters)
    yield _Product(2 * last, block.name != MIXER, block.inside)


def _adapter_products(architecture: Architecture, blocks: Sequence[Block], adapters: LoRASettings) -> Iterator[_Product]:
    """Yield the products with A and B of each adapter, one pair for each Hugging Face weight, as in PEFT."""
    for mapping in adapted_mappings(architecture, adapters):
        if mapping.split is Split.VOCABULARY:
            yield _Product(2 * adapters.rank * architecture.hidden_size, False, True)  # the other matrix is a lookup
    adapted = [(block, mapping) for block in blocks for mapping in block.adapted]
    for block, mapping in adapted:
        experts = architecture.experts.per_token if architecture.experts is not None and mapping.of_expert else 1
        has_gradient = block.enters if split_dimension(mapping) == 0 else block.inside
        for name, (rows, columns) in zip(mapping.hf_names, source_shapes(mapping, architecture), strict=True):
            if hf_module(name) in adapters.modules:
                yield _Product(2 * experts * adapters.rank * columns, block.name != MIXER, has_gradient)
                yield _Product(2 * experts * adapters.rank * rows, block.name != MIXER, True)
