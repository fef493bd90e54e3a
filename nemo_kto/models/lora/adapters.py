"""LoRA: low-rank adapters on megatron-core's linear layers, y = W x + scale * B A x, the same at every layout.

Hu et al. 2021 (arXiv 2106.09685), section 4.1. A fused layer (query, key and value; gate and up projection) holds one pair
of A and B a part, as PEFT does for the layers that Hugging Face's models keep apart:

    lora_a  [parts * rank, in]   the parts' A, one under the other
    lora_b  [out, rank]          in the order of the rows of the weight; ``part_of_row`` says whose A a row goes with

Parts that are not adapted have A = B = 0, so their gradients are exactly zero and they stay as they are; so do the rows of
B and the columns of A that belong to padding. How the two are shared out over ranks: ``models.lora.layers``.

With DoRA (``models.dora``) each row that is adapted has a magnitude besides:

    lora_magnitude  [out]        less its start, the norm of the row of W; zero where a row has none
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
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.families import ParamMapping, Split
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
from nemo_kto.models.gpt import HiddenStateGPT
from nemo_kto.models.lora.layers import ADAPTED_CLASSES, Adapter, adapt_linear

if HAVE_TE:
    from nemo_kto.models.lora.te_layers import ENGINE_CLASSES

    ADAPTED_CLASSES.update(ENGINE_CLASSES)

# The linear layer of an expert; Transformer Engine has one for all experts of a rank, whose weights have their numbers.
_ONE_EXPERT = re.compile(r"local_experts\.(?P<expert>\d+)\.(?P<linear>linear_fc[12])$")


def is_adapter(name: str) -> bool:
    """True for the name of a parameter that belongs to an adapter."""
    return name.endswith((f".{LORA_A}", f".{LORA_B}", f".{LORA_MAGNITUDE}"))


def add_adapters(chunk: HiddenStateGPT, settings: LoRASettings, *, architecture: Architecture, seed: int) -> None:
    """Freeze a chunk of the model and give its linear layers adapters; before it is wrapped for data parallelism.

    A starts as PEFT's does (uniform within 1 / sqrt(in): He et al. 2015, arXiv 1502.01852, with a = sqrt(5)), drawn for each
    layer of the Hugging Face model by itself, so that it is the same at every layout (of an embedding from a normal
    distribution); B starts at zero, and with DoRA magnitudes at the norms of the rows.

    Args:
        chunk: built by ``models.gpt.build_gpt``; where experts are adapted, with each of them by itself.
        settings: what is adapted and how.
        architecture: what the chunk was built from.
        seed: of the values of A.

    Raises:
        UserError: a layer's number is larger than the number of layers, or the embedding cannot be adapted.
    """
    if problem := embedding_problem(settings, tied=architecture.tied):
        raise UserError(f"adapters {problem}")
    if settings.layers is not None and max(settings.layers) > architecture.num_layers:
        raise UserError(
            f"layers to adapt must be from 1 to {architecture.num_layers}, the number of layers; got {list(settings.layers)}"
        )
    for parameter in chunk.parameters():
        parameter.requires_grad_(False)
    for mapping in adapted_mappings(architecture, settings):
        for linear, place in _linears(chunk, mapping, settings, architecture):
            adapt_linear(
                linear,
                rank=settings.rank,
                scale=settings.scale,
                dropout=settings.dropout,
                parts=len(mapping.hf_names),
                part_of_row=_part_of_row(linear.weight, mapping, architecture),
                magnitudes=[settings.dora and hf_module(name) in settings.modules for name in mapping.hf_names],
            )
            _draw_a(linear.lora_a, mapping, place, settings, architecture=architecture, seed=seed)
    chunk.adapters = settings
    if chunk.pre_process and chunk.config.recompute_granularity is not None:
        chunk.embedding.register_forward_hook(_require_grad)


@contextlib.contextmanager
def disable_adapters(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Within the block the model is the base model; no weight changes.

    Raises:
        RuntimeError: the adapters are merged into the weights.
    """
    adapters = _adapters(chunks)
    if any(adapter.adapter_is_merged for adapter in adapters):
        raise RuntimeError("adapters must be disabled before they are merged into the weights, not after")
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
    """Add every adapter to its weight: the model stays what it is, and its weights now are those of a plain model.

    Raises:
        RuntimeError: that has been done.
    """
    finish_gathers(chunks)
    adapters = _adapters(chunks)
    if any(adapter.adapter_is_merged for adapter in adapters):
        raise RuntimeError("the adapters are already merged into the weights")
    for adapter in adapters:
        adapter.merge()


def share_weights(adapted: HiddenStateGPT, chunk: nn.Module) -> None:
    """Put the adapters of one model on the weights of another of the same names and shapes, which both hold from then on."""
    weights = dict(unwrap_model(chunk).named_parameters())
    for name, adapter in adapted.named_modules():
        if isinstance(adapter, Adapter):
            one_by_one, grouped = f"{name}.weight", _ONE_EXPERT.sub(r"\g<linear>.weight\g<expert>", name)
            adapter.weight = weights[one_by_one if one_by_one in weights else grouped]


@torch.no_grad()
def zero_adapters(chunks: Iterable[nn.Module]) -> None:
    """Make the adapters add nothing: B becomes zero, and magnitudes the norms of the rows, as where training begins."""
    for adapter in _adapters(chunks):
        adapter.lora_b.zero_()
        if adapter.lora_magnitude is not None:
            adapter.lora_magnitude.zero_()


@contextlib.contextmanager
def constant_weights(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Within the block no weight changes, so that what DoRA needs of all of them is computed once."""
    adapters = [adapter for adapter in _adapters(chunks) if adapter.lora_magnitude is not None]
    for adapter in adapters:
        adapter.adapter_is_constant = True
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.adapter_is_constant, adapter.adapter_change = False, None


@torch.no_grad()
def magnitudes(chunks: Iterable[nn.Module]) -> dict[nn.Parameter, Tensor]:
    """DoRA's magnitudes in fp32, by the parameters that hold what they are more than where they start; collective.

    Raises:
        RuntimeError: the adapters are merged into the weights, whose norms have changed with that.
    """
    chunks = [*chunks]
    finish_gathers(chunks)
    held = [(adapter.lora_magnitude, adapter) for adapter in _adapters(chunks)]
    if any(parameter is not None and adapter.adapter_is_merged for parameter, adapter in held):
        raise RuntimeError("magnitudes must be read before adapters are merged into the weights, not after")
    return {parameter: adapter.magnitudes() for parameter, adapter in held if parameter is not None}


@torch.no_grad()
def take_magnitudes(chunks: Iterable[nn.Module], values: Mapping[nn.Parameter, Tensor]) -> None:
    """What :func:`magnitudes` gives becomes ``values``, beside the weights that the chunks have now; collective."""
    for adapter in _adapters(chunks):
        if adapter.lora_magnitude is not None:
            adapter.take_magnitudes(values[adapter.lora_magnitude])


def _linears(
    chunk: HiddenStateGPT, mapping: ParamMapping, settings: LoRASettings, architecture: Architecture
) -> Iterator[tuple[Any, dict[str, int]]]:
    """The linear layers of a chunk whose weight a mapping describes, with the number of the layer, and of the expert."""
    if mapping.split is Split.VOCABULARY:
        if chunk.pre_process:
            yield chunk.embedding.word_embeddings, {}
        return
    path = mapping.mcore_name.removeprefix("decoder.layers.{layer}.").removesuffix(".weight")
    for layer in chunk.decoder.layers:
        if settings.layers is not None and layer.layer_number not in settings.layers:
            continue
        for place in architecture.instances(mapping, [layer.layer_number - 1]):
            if not mapping.of_expert:
                yield layer.get_submodule(path), place
            elif place["expert"] in (held := layer.mlp.local_expert_indices):
                yield layer.get_submodule(path.format(expert=held.index(place["expert"]))), place


def _adapters(chunks: Iterable[nn.Module]) -> list[Adapter]:
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapter)]


def _part_of_row(weight: Tensor, mapping: ParamMapping, architecture: Architecture) -> Tensor | None:
    """Which weight of the Hugging Face model each row belongs to, padding to the first: [out of this rank]."""
    if split_dimension(mapping) != 0:
        return None
    parts = torch.zeros(weight.size(0), dtype=torch.long)
    rank = dist.get_rank(state.tensor_group(of_expert=mapping.of_expert))
    for offset, part in held(mapping, architecture, rank=rank, length=weight.size(0)):
        parts[offset : offset + part.length] = part.source or 0
    return parts


@torch.no_grad()
def _draw_a(
    lora_a: Tensor,
    mapping: ParamMapping,
    place: Mapping[str, int],
    settings: LoRASettings,
    *,
    architecture: Architecture,
    seed: int,
) -> None:
    names = [name.format(**place) for name in mapping.hf_names]
    widths = [shape[1] for shape in source_shapes(mapping, architecture)]
    mapping_a = adapter_mappings(mapping, settings)[0]
    rank = dist.get_rank(state.tensor_group(of_expert=mapping.of_expert))
    for piece in pieces(lora_a, mapping_a, architecture, rank=rank):
        name, width = names[piece.source], widths[piece.source]
        if hf_module(name) in settings.modules:
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
            whole = torch.empty(settings.rank, width)
            if mapping.split is Split.VOCABULARY:
                whole.normal_(generator=generator)
            else:
                whole.uniform_(-1, 1, generator=generator).div_(math.sqrt(width))
            piece.place.copy_(whole[piece.where])


def _require_grad(embedding: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    """A recomputed layer or MLP has gradients only if its input asks for one, and a frozen embedding's output does not."""
    if torch.is_grad_enabled():
        output.requires_grad_()
