"""Where each value of a Hugging Face weight lies in our parameters, at any tensor-parallel size.

A parameter of ours, put together over its tensor-parallel group, is a row of segments along one dimension: so many rows of
this weight, so many of that, so many zeros. A rank holds an equal part of that row. Loading cuts the segments to the rank's
part; export puts the parts together and takes the segments out again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from nemo_kto.models.architecture import Architecture
from nemo_kto.models.families import Row, Split
from nemo_kto.models.gpt import HiddenStateGPT

# Transformer Engine keeps the norm before a linear layer inside that layer.
_ENGINE_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


@dataclass(frozen=True, kw_only=True)
class Segment:
    """``length`` rows (or columns), from ``start`` of the row's weight number ``source``; zeros where that is None."""

    source: int | None
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter of this rank and what it is made of.

    Attributes:
        parameter: the parameter.
        row: its row in the family's table.
        layer: number of the layer in the whole model; None outside of the layers.
        copied: it is the last stage's copy of a tied embedding.
    """

    parameter: nn.Parameter
    row: Row
    layer: int | None
    copied: bool = False

    @property
    def sources(self) -> list[str]:
        """Names of the weights in the file."""
        return [name.format(layer=self.layer) for name in self.row.theirs]


def split_dimension(row: Row) -> int | None:
    """The dimension along which segments and ranks divide the parameter; None if every rank holds all of it."""
    if row.split is Split.WHOLE:
        return None
    return 1 if row.split in (Split.HEADS, Split.COLUMNS) else 0


def segments(row: Row, architecture: Architecture) -> list[Segment]:
    """The segments of a parameter, put together over the tensor-parallel group."""
    sizes, head = architecture.sizes, architecture.head_dim
    if row.split is Split.VOCABULARY:
        return _padded(sizes["vocabulary"], architecture.padded_vocab_size)
    if row.split is Split.HEADS:
        return _padded(sizes["query"], architecture.padded_attention_heads * head)
    if row.split is Split.COLUMNS:
        return _padded(sizes["ffn"], sizes["ffn"])
    if row.split is Split.GATED:
        part = sizes["ffn"] // architecture.tensor_parallel
        ranks = range(architecture.tensor_parallel)
        return [Segment(source=source, start=rank * part, length=part) for rank in ranks for source in (0, 1)]
    if row.split is Split.QKV:
        return _query_key_value(architecture)
    raise ValueError(f"a row must be split to have segments, got {row.ours}, of which every rank holds all")


def cut(parts: Iterable[Segment], *, start: int, length: int) -> Iterator[tuple[int, Segment]]:
    """The parts of the segments that lie in [start, start + length), each with its offset from ``start``."""
    position = 0
    for part in parts:
        first, last = max(start, position), min(start + length, position + part.length)
        if first < last:
            yield first - start, Segment(source=part.source, start=part.start + first - position, length=last - first)
        position += part.length


def _query_key_value(architecture: Architecture) -> list[Segment]:
    head = architecture.head_dim
    query = architecture.num_attention_heads // architecture.num_query_groups * head  # the query heads of one group
    parts = []
    for group in range(architecture.num_query_groups):
        parts.append(Segment(source=0, start=group * query, length=query))
        parts.append(Segment(source=1, start=group * head, length=head))
        parts.append(Segment(source=2, start=group * head, length=head))
    groups_of_zeros = architecture.padded_query_groups - architecture.num_query_groups
    if groups_of_zeros:
        parts.append(Segment(source=None, start=0, length=groups_of_zeros * (query + 2 * head)))
    return parts


def _padded(size: int, padded: int) -> list[Segment]:
    parts = [Segment(source=0, start=0, length=size)]
    return [*parts, Segment(source=None, start=0, length=padded - size)] if padded > size else parts


def wanted_weights(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that a Hugging Face folder of this architecture must hold."""
    wanted = {}
    for row in architecture.family.rows:
        if row.when and not getattr(architecture, row.when):
            continue
        layers: Iterable[int | None] = range(architecture.num_layers) if "{layer}" in row.ours else [None]
        for layer in layers:
            for name, shape in row.theirs.items():
                wanted[name.format(layer=layer)] = tuple(architecture.sizes[size] for size in shape)
    return wanted


def unwrap(chunk: nn.Module) -> HiddenStateGPT:
    """The model inside of a DistributedDataParallel (or other) wrapper."""
    inner: Any = chunk
    while not isinstance(inner, HiddenStateGPT):
        if not hasattr(inner, "module"):
            raise TypeError(f"a model chunk must be a HiddenStateGPT or a wrapper around one, got {type(chunk).__name__}")
        inner = inner.module
    return inner


def rank_weights(chunks: Iterable[nn.Module], architecture: Architecture) -> Iterator[Weight]:
    """Every parameter of this rank's chunks, with its row.

    Raises:
        KeyError: the family's table has no row for a parameter.
    """
    rows = {row.ours: row for row in architecture.family.rows}
    for chunk in map(unwrap, chunks):
        for name, parameter in chunk.named_parameters():
            if name == "output_layer.weight" and architecture.tied:
                yield Weight(parameter=parameter, row=rows["embedding.word_embeddings.weight"], layer=None, copied=True)
                continue
            layer = None
            if name.startswith("decoder.layers."):
                local, name = name.removeprefix("decoder.layers.").split(".", 1)
                layer = chunk.decoder.layers[int(local)].layer_number - 1  # counted from 1 over all stages
                name = "decoder.layers.{layer}." + _ENGINE_NAMES.get(name, name)
            if name not in rows:
                raise KeyError(f"the table of {architecture.family.name} has no row for the parameter {name}")
            yield Weight(parameter=parameter, row=rows[name], layer=layer)
