"""Packed sequences: packing, positions, attention spans, and the partition across context-parallel ranks.

A pack is the concatenation of several sequences. For context parallelism each sequence of a pack is cut into 2 * size equal
chunks, and rank r holds chunks r and 2 * size - 1 - r, in this order, as megatron-core and Transformer Engine expect: a late
chunk attends to many keys and an early one to few, so the ranks have equal work. The share of a rank is the concatenation of
its chunks of all sequences, in the order of the sequences.

In all functions ``lengths`` are the numbers of tokens of the sequences of a pack, multiples of 2 * size if ``size`` is above
1; ``rank`` and ``size`` are the rank in the context-parallel group, and its size.

Shape suffixes: t tokens of a pack or of a rank's share of it, n sequences of a pack.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    """Queries of a pack that are evaluated together, and their keys; the mask is causal, the last query has all keys."""

    queries: slice
    keys: slice


def causal_spans(lengths: Sequence[int], *, rank: int = 0, size: int = 1, window: int | None = None) -> list[Span]:
    """Return the spans of a pack in which every token attends only to its own sequence.

    Queries index this rank's share, keys the whole pack. With ``window``, each sequence is cut into parts of that many
    tokens, which do not attend to each other.

    Examples:
        >>> causal_spans((3, 2))
        [Span(queries=slice(0, 3, None), keys=slice(0, 3, None)), Span(queries=slice(3, 5, None), keys=slice(3, 5, None))]
        >>> causal_spans((8,), rank=0, size=2)
        [Span(queries=slice(0, 2, None), keys=slice(0, 2, None)), Span(queries=slice(2, 4, None), keys=slice(0, 8, None))]
        >>> causal_spans((5,), window=3)
        [Span(queries=slice(0, 3, None), keys=slice(0, 3, None)), Span(queries=slice(3, 5, None), keys=slice(3, 5, None))]
    """
    spans, queries = list[Span](), 0
    for begin, length in zip((0, *accumulate(lengths))[:-1], lengths, strict=True):
        width = length if size == 1 else _chunk(length, size)
        for chunk in (0,) if size == 1 else _chunks_of(rank, size):
            first, last = chunk * width, (chunk + 1) * width  # tokens of the sequence
            for window_begin in (0,) if window is None else range(first // window * window, last, window):
                start, stop = max(first, window_begin), last if window is None else min(last, window_begin + window)
                spans.append(Span(slice(queries, queries + stop - start), slice(begin + window_begin, begin + stop)))
                queries += stop - start
    return spans


def token_positions(lengths: Sequence[int], *, rank: int = 0, size: int = 1) -> Tensor:
    """Return the position of each token of this rank in its sequence: int64 [t], on the host.

    Examples:
        >>> token_positions((3, 2)).tolist()
        [0, 1, 2, 0, 1]
        >>> token_positions((8, 4), rank=1, size=2).tolist()
        [2, 3, 4, 5, 1, 2]
    """
    if size == 1:
        return torch.cat([torch.arange(length) for length in lengths])
    chunks = [torch.arange(length).view(2 * size, _chunk(length, size)) for length in lengths]
    return torch.cat([sequence_chunks[list(_chunks_of(rank, size))].flatten() for sequence_chunks in chunks])


def local_token_indices(lengths: Sequence[int], *, rank: int, size: int) -> Tensor:
    """Return the index of each token of this rank in the whole pack: int64 [t], on the host.

    Examples:
        >>> local_token_indices((8, 4), rank=1, size=2).tolist()
        [2, 3, 4, 5, 9, 10]
    """
    begins = (0, *accumulate(lengths))[:-1]
    begin_t = [torch.full((length // size,), begin) for begin, length in zip(begins, lengths, strict=True)]
    return torch.cat(begin_t) + token_positions(lengths, rank=rank, size=size)


def unshard_tokens(shares_t: Tensor, lengths: Sequence[int], *, size: int) -> Tensor:
    """Reorder the shares of all ranks, [tokens, ...], concatenated in the order of the ranks, into the whole pack.

    Examples:
        >>> unshard_tokens(torch.tensor([0, 1, 6, 7, 2, 3, 4, 5]), (8,), size=2).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    widths = [_chunk(length, size) for length in lengths]
    places = [(number, chunk) for rank in range(size) for number in range(len(widths)) for chunk in _chunks_of(rank, size)]
    parts = dict(zip(places, shares_t.split([widths[number] for number, _ in places]), strict=True))
    return torch.cat([parts[place] for place in sorted(parts)])


def _chunk(length: int, size: int) -> int:
    """Return the number of tokens of a chunk; ValueError if the sequence cannot be cut into equal chunks."""
    if length % (2 * size):
        raise ValueError(
            f"the length of a sequence must be a multiple of 2 * context_parallel_size = {2 * size}, got {length}"
        )
    return length // (2 * size)


def _chunks_of(rank: int, size: int) -> tuple[int, int]:
    return rank, 2 * size - 1 - rank


def pack_lengths(lengths: Sequence[int], *, tokens: int | None, prompts: int | None = None) -> list[list[int]]:
    """Return the indices of the items of each pack, for few packs with similar numbers of tokens.

    Items are placed from the longest to the shortest, each into the pack with the fewest tokens. If an item does not fit,
    the packing is repeated with one more pack. ``tokens`` and ``prompts`` limit the tokens and the items of a pack; an item
    with more tokens gets a pack of its own.

    Examples:
        >>> pack_lengths((5, 9, 3, 4), tokens=12)
        [[1, 2], [0, 3]]
        >>> pack_lengths((5, 9, 3, 4), tokens=8)
        [[1], [0], [3, 2]]
    """
    if not lengths:
        return []
    max_tokens = sum(lengths) if tokens is None else tokens
    max_items = len(lengths) if prompts is None else prompts
    fewest = min(len(lengths), max(ceil(sum(lengths) / max_tokens), ceil(len(lengths) / max_items)))
    attempts = (_pack_into(count, lengths, max_tokens, max_items) for count in range(fewest, len(lengths) + 1))
    return next(packs for packs in attempts if packs is not None)  # one item per pack is always within the limits


def _pack_into(count: int, lengths: Sequence[int], max_tokens: int, max_items: int) -> list[list[int]] | None:
    """Pack the items into ``count`` packs, none of them empty; return None if an item does not fit."""
    packs: list[list[int]] = [[] for _ in range(count)]
    open_packs = [(0, number) for number in range(count)]  # heap ordered by number of tokens
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        if not open_packs:
            return None
        filled, number = heapq.heappop(open_packs)
        if filled and filled + lengths[item] > max_tokens:
            return None
        packs[number].append(item)
        if len(packs[number]) < max_items:
            heapq.heappush(open_packs, (filled + lengths[item], number))
    return packs
