"""Mapping between Hugging Face weights and fused or sharded parameters, at any tensor-parallel size.

A megatron-core parameter, concatenated over its tensor-parallel group, is a sequence of segments along one dimension: some
rows of one weight, some rows of another, some zeros. A rank holds an equal part of that sequence, or all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.mixers.param_mapping import ParamMapping, Split

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Segment:
    """``length`` rows (or columns) from ``start`` of weight number ``source`` of a mapping; zeros if ``source`` is None."""

    source: int | None
    start: int
    length: int
    step: int = 1  # distance of successive rows in the weight

    @property
    def where(self) -> slice:
        """Slice of the segment's rows in the weight."""
        stop = self.start + (self.length - 1) * self.step + 1
        return slice(self.start, stop) if self.step == 1 else slice(self.start, stop, self.step)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The slice ``where`` of weight number ``source`` of a mapping, and the view ``place`` of a parameter that stores it."""

    source: int
    where: tuple[slice, ...]
    place: Tensor


def split_dimension(mapping: ParamMapping) -> int | None:
    """Return the dimension that segments divide; None if the parameter is a single weight that every rank holds."""
    if mapping.split is Split.REPLICATED:
        return None
    return 1 if mapping.split in (Split.HEADS, Split.GROUP_COLUMNS, Split.ROW_PARALLEL) else 0


def is_cut(mapping: ParamMapping) -> bool:
    """Return True if a parameter is sharded over the tensor-parallel group; else each rank holds all of it."""
    return mapping.split not in (Split.REPLICATED, Split.STACKED)


def source_shapes(mapping: ParamMapping, architecture: Architecture) -> list[tuple[int, ...]]:
    """Return the shape of each weight that the mapping names, in its order."""
    sizes = architecture.sizes
    return [tuple(size if isinstance(size, int) else sizes[size] for size in shape) for shape in mapping.hf_names.values()]


def shape_in_file(mapping: ParamMapping, shape: tuple[int, ...], architecture: Architecture) -> tuple[int, ...]:
    """Return the shape of the file's tensor that holds a weight of this shape, or such weights of all experts."""
    shape = shape[::-1] if mapping.transposed else shape
    return (architecture.sizes["experts"], *shape) if mapping.joins_experts else shape


def place_in_file(mapping: ParamMapping, place: Mapping[str, int], where: tuple[slice, ...]) -> tuple[slice | int, ...]:
    """Convert the slice ``where`` of a weight into one of the file's tensor; ``place`` has the number of an expert."""
    if mapping.transposed:  # only matrices are
        where = (*where, slice(None))[:2][::-1]
    return (place["expert"], *where) if mapping.joins_experts else where


def shards(mapping: ParamMapping, architecture: Architecture) -> int:
    """Return the number of ranks over which a parameter is sharded, if it is."""
    return architecture.expert_tensor_parallel if mapping.of_expert else architecture.tensor_parallel


def segments(mapping: ParamMapping, architecture: Architecture) -> list[Segment]:
    """Return the segments of a parameter, concatenated over the tensor-parallel group."""
    parts = _segments(mapping, architecture)
    if len(mapping.hf_names) > 1 or mapping.split not in (Split.QKV, Split.GATED):
        return parts
    # one tensor of the file holds all these weights, concatenated along the rows
    sizes, rows = architecture.sizes, source_shapes(mapping, architecture)[0][0]
    queries = sizes["query"] * (1 + architecture.output_gate)
    per_item = (queries, sizes["key_value"], sizes["key_value"]) if mapping.split is Split.QKV else (rows // 2,)
    starts = [0, *itertools.accumulate(per_item)]
    return [
        part if part.source is None else Segment(source=0, start=starts[part.source] + part.start, length=part.length)
        for part in parts
    ]


def _segments(mapping: ParamMapping, architecture: Architecture) -> list[Segment]:
    sizes, head = architecture.sizes, architecture.head_dim
    if mapping.split is Split.VOCABULARY:
        return _padded(sizes["vocabulary"], architecture.padded_vocab_size)
    if mapping.split is Split.HEADS:
        return _padded(sizes["query"], architecture.padded_attention_heads * head)
    if mapping.split is Split.HEAD_NUMBERS:
        return _padded(sizes["heads"], architecture.padded_attention_heads)
    if mapping.split in (Split.GROUPS, Split.GROUP_COLUMNS):
        return _grouped([(source, sizes[length]) for source, length in mapping.parts], sizes[mapping.groups], architecture)
    if mapping.split in (Split.COLUMN_PARALLEL, Split.ROW_PARALLEL):
        width = source_shapes(mapping, architecture)[0][mapping.split is Split.ROW_PARALLEL]
        return _padded(width, width)
    if mapping.split in (Split.GATED, Split.INTERLEAVED):
        ranks = range(shards(mapping, architecture))
        # width of the gate, which the file has as a separate weight or in one tensor with the up projection
        width = source_shapes(mapping, architecture)[0][0] // (1 if len(mapping.hf_names) > 1 else 2)
        part = width // len(ranks)
        if mapping.split is Split.GATED:
            return [Segment(source=source, start=rank * part, length=part) for rank in ranks for source in (0, 1)]
        starts = (2 * rank * part + which for rank in ranks for which in (0, 1))
        return [Segment(source=0, start=start, length=part, step=2) for start in starts]
    if mapping.split is Split.QKV:
        heads, groups = architecture.num_attention_heads // architecture.num_query_groups, architecture.num_query_groups
        query, kinds = heads * head, 1 + architecture.output_gate
        parts = list[Segment]()
        for group in range(groups):
            # the file has each query before its gate, the parameter a group's queries before its gates
            if architecture.output_gate:
                starts = ((2 * (group * heads + number) + kind) * head for kind in range(2) for number in range(heads))
                parts += [Segment(source=0, start=start, length=head) for start in starts]
            else:
                parts.append(Segment(source=0, start=group * query, length=query))
            parts += [Segment(source=source, start=group * head, length=head) for source in (1, 2)]
        padding = (architecture.padded_query_groups - groups) * (kinds * query + 2 * head)
        return [*parts, Segment(source=None, start=0, length=padding)] if padding else parts
    if mapping.split is Split.STACKED:
        shapes = source_shapes(mapping, architecture)
        return [Segment(source=source, start=0, length=shape[0]) for source, shape in enumerate(shapes)]
    raise ValueError(f"a mapping must be split to have segments, got {mapping.mcore_name}, of which every rank holds all")


def _grouped(lengths: list[tuple[int, int]], groups: int, architecture: Architecture) -> list[Segment]:
    """Return the segments of groups of heads whose parts have these sources and lengths, with padding."""
    padding = -groups % architecture.tensor_parallel * sum(length for _, length in lengths)
    if len(lengths) == 1:  # adjacent in the file too, where blocks of quantized weights may contain several
        lengths, groups = [(lengths[0][0], groups * lengths[0][1])], 1
    sources = [source for source, _ in lengths]
    before = [sum(size for other, size in lengths[:number] if other == source) for number, source in enumerate(sources)]
    parts = [
        Segment(source=source, start=begin * groups + group * length, length=length)
        for group in range(groups)
        for begin, (source, length) in zip(before, lengths, strict=True)
    ]
    return [*parts, Segment(source=None, start=0, length=padding)] if padding else parts


def cut(parts: Iterable[Segment], *, start: int, length: int) -> Iterator[tuple[int, Segment]]:
    """Yield the parts of the segments within [start, start + length), each with its offset from ``start``."""
    position = 0
    for part in parts:
        first, last = max(start, position), min(start + length, position + part.length)
        if first < last:
            begin = part.start + (first - position) * part.step
            yield first - start, replace(part, start=begin, length=last - first)
        position += part.length


def held(mapping: ParamMapping, architecture: Architecture, *, rank: int, length: int) -> Iterator[tuple[int, Segment]]:
    """Yield the segments of a tensor-parallel rank's shard of this length, each with its offset in the shard."""
    return cut(segments(mapping, architecture), start=rank * length if is_cut(mapping) else 0, length=length)


def pieces(values: Tensor, mapping: ParamMapping, architecture: Architecture, *, rank: int) -> Iterator[Piece]:
    """Yield the pieces of weights to be stored in the ``values`` of a parameter, and set its padding to zero.

    ``rank`` is that in the tensor-parallel group, or in the expert-tensor-parallel group for a parameter of an expert.
    """
    dimension = split_dimension(mapping)
    if dimension is None:
        yield Piece(source=0, where=(slice(None),), place=values)
        return
    for offset, part in held(mapping, architecture, rank=rank, length=values.size(dimension)):
        place = values.narrow(dimension, offset, part.length)
        if part.source is None:
            place.zero_()
        else:
            where = (slice(None),) * dimension + (part.where,)
            yield Piece(source=part.source, where=where, place=place)


def _padded(size: int, padded: int) -> list[Segment]:
    parts = [Segment(source=0, start=0, length=size)]
    return [*parts, Segment(source=None, start=0, length=padded - size)] if padded > size else parts
