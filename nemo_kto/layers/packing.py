"""Packed sequences: packing, positions, attention spans, and the partition across context-parallel ranks.

A pack is the concatenation of several sequences. Sequences that begin with the same prompt may share its tokens: the prompt
is then a segment of the pack, each answer another one, which continues the prompt. Sequences that share nothing are one
segment each. In all functions ``prompts`` are the indices of the segments that precede each segment, None for a segment that
begins a sequence; None if no tokens are shared.

For context parallelism each sequence of a pack is cut into 2 * size equal chunks, and rank r holds chunks r and
2 * size - 1 - r, in this order, as megatron-core and Transformer Engine expect: a late chunk attends to many keys and an
early one to few, so the ranks have equal work. The share of a rank is the concatenation of its chunks of all sequences.

``lengths`` are the numbers of tokens of the segments of a pack, multiples of 2 * size if ``size`` is above 1; ``rank`` and
``size`` are the rank in the context-parallel group, and its size, which must be 1 if prompts are shared.

Shape suffixes: t tokens of a pack or of a rank's share of it, k keys of all its segments, n segments of a pack.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from nemo_kto.utils import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

# Sizes of heads with which torch and Transformer Engine attend to packs in one kernel: multiples of it, and the largest.
HEAD_MULTIPLE, MAX_HEAD_DIM = 8, 256


class Span(NamedTuple):
    """Queries of a pack that are evaluated together, and their keys; the mask is causal, the last query has all keys."""

    queries: slice
    keys: slice


Prompts = tuple[int | None, ...] | None
"""Index of the segment that precedes each segment, see the module's docstring."""


def shared_lengths(lengths: Sequence[int], prompts: Prompts) -> list[int]:
    """Return the number of tokens that precede each segment: those of its prompt, or 0.

    Examples:
        >>> shared_lengths((4, 2, 3, 5), (None, 0, 0, None))
        [0, 4, 4, 0]
    """
    return [0 if prompt is None else lengths[prompt] for prompt in prompts or [None] * len(lengths)]


def key_indices(lengths: Sequence[int], prompts: Prompts) -> Tensor:
    """Return the tokens that each segment attends to, its prompt and its own, segment after segment: int64 [k], on the host.

    Examples:
        >>> key_indices((2, 1, 3), (None, 0, 0)).tolist()
        [0, 1, 0, 1, 2, 0, 1, 3, 4, 5]
    """
    own = [torch.arange(begin, end) for begin, end in pairwise((0, *accumulate(lengths)))]
    before = [[] if prompt is None else [own[prompt]] for prompt in prompts or [None] * len(own)]
    return torch.cat([part for first, second in zip(before, own, strict=True) for part in (*first, second)])


def causal_spans(
    lengths: Sequence[int], *, prompts: Prompts = None, rank: int = 0, size: int = 1, window: int | None = None
) -> list[Span]:
    """Return the spans of a pack in which every token attends only to its own sequence.

    Queries index this rank's share, keys those of the whole pack in the order of :func:`key_indices`. With ``window``, each
    sequence is cut into parts of that many tokens, which do not attend to each other.

    Examples:
        >>> causal_spans((3, 2))
        [Span(queries=slice(0, 3, None), keys=slice(0, 3, None)), Span(queries=slice(3, 5, None), keys=slice(3, 5, None))]
        >>> causal_spans((8,), rank=0, size=2)
        [Span(queries=slice(0, 2, None), keys=slice(0, 2, None)), Span(queries=slice(2, 4, None), keys=slice(0, 8, None))]
        >>> causal_spans((5,), window=3)
        [Span(queries=slice(0, 3, None), keys=slice(0, 3, None)), Span(queries=slice(3, 5, None), keys=slice(3, 5, None))]
        >>> causal_spans((2, 1), prompts=(None, 0))
        [Span(queries=slice(0, 2, None), keys=slice(0, 2, None)), Span(queries=slice(2, 3, None), keys=slice(2, 5, None))]
    """
    spans, queries, begin = list[Span](), 0, 0
    for length, before in zip(lengths, shared_lengths(lengths, prompts), strict=True):
        width = length if size == 1 else _chunk(length, size)
        for chunk in (0,) if size == 1 else _chunks_of(rank, size):
            first, last = before + chunk * width, before + (chunk + 1) * width  # tokens of the sequence
            for window_begin in (0,) if window is None else range(first // window * window, last, window):
                start, stop = max(first, window_begin), last if window is None else min(last, window_begin + window)
                spans.append(Span(slice(queries, queries + stop - start), slice(begin + window_begin, begin + stop)))
                queries += stop - start
        begin += before + length
    return spans


def token_positions(lengths: Sequence[int], *, prompts: Prompts = None, rank: int = 0, size: int = 1) -> Tensor:
    """Return the position of each token of this rank in its sequence: int64 [t], on the host.

    Examples:
        >>> token_positions((3, 2)).tolist()
        [0, 1, 2, 0, 1]
        >>> token_positions((8, 4), rank=1, size=2).tolist()
        [2, 3, 4, 5, 1, 2]
        >>> token_positions((3, 2, 1), prompts=(None, 0, 0)).tolist()
        [0, 1, 2, 3, 4, 3]
    """
    if size == 1:
        before_n = shared_lengths(lengths, prompts)
        return torch.cat([torch.arange(before, before + n) for before, n in zip(before_n, lengths, strict=True)])
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
    places = _places(lengths, size)
    parts = dict(zip(places, shares_t.split([*places.values()]), strict=True))
    return torch.cat([parts[place] for place in sorted(parts)])


def shard_tokens(whole_t: Tensor, lengths: Sequence[int], *, size: int) -> Tensor:
    """Reorder a whole pack, [tokens, ...], into the shares of all ranks, concatenated in the order of the ranks.

    Examples:
        >>> shard_tokens(torch.arange(8), (8,), size=2).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
    """
    places = _places(lengths, size)
    parts = dict(zip(sorted(places), whole_t.split([places[place] for place in sorted(places)]), strict=True))
    return torch.cat([parts[place] for place in places])


def _places(lengths: Sequence[int], size: int) -> dict[tuple[int, int], int]:
    """Return sequence and number of each chunk, in the order of the ranks, and its number of tokens."""
    return {
        (number, chunk): _chunk(length, size)
        for rank in range(size)
        for number, length in enumerate(lengths)
        for chunk in _chunks_of(rank, size)
    }


def _chunk(length: int, size: int) -> int:
    """Return the number of tokens of a chunk; ValueError if the sequence cannot be cut into equal chunks."""
    if length % (2 * size):
        wanted = f"a multiple of 2 * context_parallel_size = {2 * size}"
        raise ValueError(f"the length of a sequence must be {wanted}, got {length}")
    return length // (2 * size)


def _chunks_of(rank: int, size: int) -> tuple[int, int]:
    return rank, 2 * size - 1 - rank


def pack_lengths(
    lengths: Sequence[int], *, tokens: int | None, prompts: int | None = None, sizes: Sequence[int] | None = None
) -> list[list[int]]:
    """Return the indices of the items of each pack, for few packs with similar numbers of tokens.

    Items are placed from the longest to the shortest, each into the pack with the fewest tokens. If an item does not fit,
    the packing is repeated with one more pack. ``tokens`` and ``prompts`` limit the tokens and the prompts of a pack; an
    item with more of them gets a pack of its own. ``sizes`` are the numbers of prompts of the items; None if each has one.

    Examples:
        >>> pack_lengths((5, 9, 3, 4), tokens=12)
        [[1, 2], [0, 3]]
        >>> pack_lengths((5, 9, 3, 4), tokens=8)
        [[1], [0], [3, 2]]
        >>> pack_lengths((5, 9, 3, 4), tokens=12, prompts=2, sizes=(2, 1, 1, 1))
        [[1], [0], [3, 2]]
    """
    if not lengths:
        return []
    sizes = [1] * len(lengths) if sizes is None else sizes
    max_tokens = sum(lengths) if tokens is None else tokens
    max_prompts = sum(sizes) if prompts is None else prompts
    fewest = min(len(lengths), max(ceil(sum(lengths) / max_tokens), ceil(sum(sizes) / max_prompts)))
    attempts = (_pack_into(count, lengths, sizes, max_tokens, max_prompts) for count in range(fewest, len(lengths) + 1))
    return next(packs for packs in attempts if packs is not None)  # one item per pack is always within the limits


def _pack_into(
    count: int, lengths: Sequence[int], sizes: Sequence[int], max_tokens: int, max_prompts: int
) -> list[list[int]] | None:
    """Pack the items into ``count`` packs, none of them empty; return None if an item does not fit."""
    packs: list[list[int]] = [[] for _ in range(count)]
    prompts = [0] * count
    open_packs = [(0, number) for number in range(count)]  # heap ordered by number of tokens
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        if not open_packs:
            return None
        filled, number = heapq.heappop(open_packs)
        if filled and (filled + lengths[item] > max_tokens or prompts[number] + sizes[item] > max_prompts):
            return None
        packs[number].append(item)
        prompts[number] += sizes[item]
        if prompts[number] < max_prompts:
            heapq.heappush(open_packs, (filled + lengths[item], number))
    return packs
