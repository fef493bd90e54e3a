"""LoRA: low-rank adapters on megatron-core's linear layers, y = W x + scale * B A x, the same at every layout.

Hu et al. 2021 (arXiv 2106.09685), section 4.1. A fused layer (query, key and value; gate and up projection) holds one pair
of A and B for each part, as in PEFT, where Hugging Face's models have these parts as separate layers:

    lora_a  [parts * rank, in]   the A of all parts, stacked
    lora_b  [out, rank]          rows in the order of the weight; ``part_of_row`` gives the part whose A belongs to a row

Parts that are not adapted have A = B = 0, so their gradients are exactly zero and they remain zero; the same holds for the
rows of B and the columns of A that are padding. ``models.lora.lora_layers`` describes how A and B are sharded over ranks.

With DoRA each adapted row also has a magnitude:

    lora_magnitude  [out]        minus its initial value, the norm of the row of W; zero for rows without a magnitude
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.lora import (
    LORA_A,
    LORA_B,
    LORA_MAGNITUDE,
    LoRASettings,
    adapted_mappings,
    adapter_mappings,
    embedding_problem,
    hf_module,
)
from nemo_kto.architecture.segments import held, pieces, source_shapes, split_dimension
from nemo_kto.distributed import state
from nemo_kto.distributed.gradients import finish_gathers
from nemo_kto.errors import UserError
from nemo_kto.layers.quantized_weight import QuantizedWeight
from nemo_kto.mixers.param_mapping import ParamMapping, Split
from nemo_kto.models.gpt import HiddenStateGPT
from nemo_kto.models.lora.lora_layers import Adapter, adapt_linear

# Linear layer of one expert. Transformer Engine has one layer for all experts of a rank, with a numbered weight for each.
_ONE_EXPERT = re.compile(r"local_experts\.(?P<expert>\d+)\.(?P<linear>linear_fc[12])$")


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter."""
    return name.endswith((f".{LORA_A}", f".{LORA_B}", f".{LORA_MAGNITUDE}"))


@torch.no_grad()
def add_adapters(chunk: HiddenStateGPT, settings: LoRASettings, *, architecture: Architecture, seed: int) -> None:
    """Freeze a model chunk and add adapters to its linear layers; call before wrapping it for data parallelism.

    A is drawn as in PEFT, uniform within 1 / sqrt(in) (He et al. 2015, arXiv 1502.01852, with a = sqrt(5)), for an embedding
    from a normal distribution; separately for each layer of the Hugging Face model, so that it is the same at every layout.
    B starts at zero. Adapted experts require a chunk without grouped experts. Raises UserError if a layer number exceeds the
    number of layers, or the embedding cannot be adapted.
    """
    if problem := embedding_problem(settings, tied=architecture.tied):
        raise UserError(f"adapters {problem}")
    if settings.layers is not None and max(settings.layers) > architecture.num_layers:
        layers = f"from 1 to {architecture.num_layers}, the number of layers"
        raise UserError(f"layers to adapt must be {layers}, got {list(settings.layers)}")
    for parameter in chunk.parameters():
        parameter.requires_grad_(False)
    for mapping in adapted_mappings(architecture, settings):
        rank = dist.get_rank(state.tensor_group(of_expert=mapping.of_expert))
        for linear, indices in _linears(chunk, mapping, settings, architecture):
            part_of_row = torch.zeros(linear.weight.size(0), dtype=torch.long)  # also 0 for padding
            if split_dimension(mapping) == 0:
                for offset, part in held(mapping, architecture, rank=rank, length=len(part_of_row)):
                    part_of_row[offset : offset + part.length] = part.source or 0
            adapt_linear(
                linear,
                rank=settings.rank,
                scale=settings.scale,
                dropout=settings.dropout,
                parts=len(mapping.hf_names),
                part_of_row=part_of_row,
                magnitudes=[settings.dora and hf_module(name) in settings.modules for name in mapping.hf_names],
            )
            names = [name.format(**indices) for name in mapping.hf_names]
            widths = [shape[1] for shape in source_shapes(mapping, architecture)]
            for piece in pieces(linear.lora_a, adapter_mappings(mapping, settings)[0], architecture, rank=rank):
                name, width = names[piece.source], widths[piece.source]
                if hf_module(name) in settings.modules:
                    whole = _initial_a(settings.rank, width, f"{seed} {name}", normal=mapping.split is Split.VOCABULARY)
                    piece.place.copy_(whole[piece.where])
    chunk.adapters = settings

    def require_grad(embedding: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if torch.is_grad_enabled():
            output.requires_grad_()

    # Recomputed layers have no gradients if their input, the output of a frozen embedding, does not require one.
    if chunk.pre_process and chunk.config.recompute_granularity is not None:
        chunk.embedding.register_forward_hook(require_grad)


@contextlib.contextmanager
def disable_adapters(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Context in which the adapters are off, so that the model is the base model; RuntimeError if they are merged."""
    adapters = adapted_layers(chunks)
    if any(adapter.adapter_is_merged for adapter in adapters):
        raise RuntimeError("cannot disable adapters that are merged into the weights")
    was_on = [adapter.adapter_is_on for adapter in adapters]
    for adapter in adapters:
        adapter.adapter_is_on = False
    try:
        yield
    finally:
        for adapter, on in zip(adapters, was_on, strict=True):
            adapter.adapter_is_on = on


@torch.no_grad()
def merge_adapters(chunks: Sequence[nn.Module]) -> None:
    """Merge every adapter into its weight, unless that is quantized; the model computes the same function.

    RuntimeError if they are already merged.
    """
    finish_gathers(chunks)
    adapters = adapted_layers(chunks)
    if any(adapter.adapter_is_merged for adapter in adapters):
        raise RuntimeError("the adapters are already merged into the weights")
    for adapter in adapters:
        if not isinstance(adapter.weight, QuantizedWeight):
            adapter.merge()


def share_weights(adapted: HiddenStateGPT, chunk: nn.Module) -> None:
    """Make the adapted layers of one model share the weights of another model with the same names and shapes."""
    weights = dict(unwrap_model(chunk).named_parameters())
    for name, adapter in adapted.named_modules():
        if isinstance(adapter, Adapter):
            one_by_one, grouped = f"{name}.weight", _ONE_EXPERT.sub(r"\g<linear>.weight\g<expert>", name)
            adapter.weight = weights[one_by_one if one_by_one in weights else grouped]


@torch.no_grad()
def zero_adapters(chunks: Iterable[nn.Module]) -> None:
    """Reset B to zero and magnitudes to the norms of the rows, as at the start of training; the adapters then add zero."""
    for adapter in adapted_layers(chunks):
        adapter.lora_b.zero_()
        if adapter.lora_magnitude is not None:
            adapter.lora_magnitude.zero_()


@contextlib.contextmanager
def constant_weights(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Context manager for passes during which no weight changes: DoRA's row norms and full B are computed only once."""
    adapters = [each for each in adapted_layers(chunks) if each.lora_magnitude is not None or each.adapter_parts > 1]
    for adapter in adapters:
        adapter.adapter_is_constant = True
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.adapter_is_constant, adapter.adapter_change, adapter.adapter_full_b = False, None, None


@torch.no_grad()
def magnitudes(chunks: Iterable[nn.Module]) -> dict[nn.Parameter, Tensor]:
    """Return DoRA's magnitudes in fp32, keyed by ``lora_magnitude``; collective. RuntimeError if the adapters are merged."""
    chunks = [*chunks]
    finish_gathers(chunks)
    adapters = [(adapter.lora_magnitude, adapter) for adapter in adapted_layers(chunks)]
    # merging has changed the norms of the weights
    if any(parameter is not None and adapter.adapter_is_merged for parameter, adapter in adapters):
        raise RuntimeError("cannot read the magnitudes of adapters that are merged into the weights")
    return {parameter: adapter.magnitudes() for parameter, adapter in adapters if parameter is not None}


@torch.no_grad()
def set_magnitudes(chunks: Iterable[nn.Module], values: Mapping[nn.Parameter, Tensor]) -> None:
    """Set DoRA's magnitudes to ``values``, a result of :func:`magnitudes`, given the current weights; collective."""
    for adapter in adapted_layers(chunks):
        if adapter.lora_magnitude is not None:
            adapter.set_magnitudes(values[adapter.lora_magnitude])


def _linears(
    chunk: HiddenStateGPT, mapping: ParamMapping, settings: LoRASettings, architecture: Architecture
) -> Iterator[tuple[Any, dict[str, int]]]:
    """Yield the linear layers of a chunk that a mapping describes, with indices of layer and expert (empty: embedding)."""
    if mapping.split is Split.VOCABULARY:
        if chunk.pre_process:
            yield chunk.embedding.word_embeddings, {}
        return
    path = mapping.mcore_name.removeprefix("decoder.layers.{layer}.").removesuffix(".weight")
    for layer in chunk.decoder.layers:
        if settings.layers is not None and layer.layer_number not in settings.layers:
            continue
        for indices in architecture.instances(mapping, [layer.layer_number - 1]):
            if not mapping.of_expert:
                yield layer.get_submodule(path), indices
            elif indices["expert"] in (local := layer.mlp.local_expert_indices):
                yield layer.get_submodule(path.format(expert=local.index(indices["expert"]))), indices


def adapted_layers(chunks: Iterable[nn.Module]) -> list[Adapter]:
    """Return the adapted layers of model chunks."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapter)]


def _initial_a(rank: int, width: int, seed: str, *, normal: bool) -> Tensor:
    """Draw A, [rank, width], from a generator that depends on ``seed`` alone."""
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big"))
    whole = torch.empty(rank, width)
    if normal:
        return whole.normal_(generator=generator)
    return whole.uniform_(-1, 1, generator=generator).div_(math.sqrt(width))
