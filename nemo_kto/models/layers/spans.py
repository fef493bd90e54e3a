"""Packed sequences: packing, positions, attention spans, and the partition across context-parallel ranks.

A row is the concatenation of several sequences. For context parallelism each sequence of a row is cut into 2 * size equal
chunks, and rank r holds chunks r and 2 * size - 1 - r, in this order, as megatron-core and Transformer Engine expect: a late
chunk attends to many keys and an early one to few, so the ranks have equal work. The share of a rank is the concatenation of
its chunks of all sequences, in the order of the sequences.

Shape suffixes: t tokens of a row or of a rank's share of it, n sequences of a row.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    """Queries of a row that are evaluated together, and their keys; the mask is causal, the last query has all keys."""

    queries: slice
    keys: slice


def causal_spans(lengths: Sequence[int], *, rank: int = 0, size: int = 1, window: int | None = None) -> list[Span]:
    """Return the spans of a row in which every token attends only to its own sequence.

    Args:
        lengths: number of tokens of each sequence of a row; multiples of 2 * size if ``size`` is above 1.
        rank, size: rank in the context-parallel group, and its size. Queries index this rank's share, keys the whole row.
        window: cut each sequence into parts of ``window`` tokens, which do not attend to each other; None for no cut.

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
        for first, last in _own_parts(length, rank, size):
            for start, stop, seen in [(first, last, 0)] if window is None else _in_windows(first, last, window):
                spans.append(Span(slice(queries, queries + stop - start), slice(begin + seen, begin + stop)))
                queries += stop - start
    return spans


def _own_parts(length: int, rank: int, size: int) -> list[tuple[int, int]]:
    """Return start and end, within a sequence, of each range of tokens that a rank holds."""
    if size == 1:
        return [(0, length)]
    width = _chunk(length, size)
    return [(chunk * width, (chunk + 1) * width) for chunk in _chunks_of(rank, size)]


def _in_windows(first: int, last: int, window: int) -> Iterator[tuple[int, int, int]]:
    """Split the tokens [first, last) of a sequence by window.

    Yields:
        Start and end of the tokens in a window, and the first token that they attend to.
    """
    for begin in range(first // window * window, last, window):
        yield max(first, begin), min(last, begin + window), begin


def token_positions(lengths: Sequence[int], *, rank: int = 0, size: int = 1) -> Tensor:
    """Return the position of each token of this rank in its sequence: int64 [t], on the host.

    The arguments are those of :func:`causal_spans`.

    Examples:
        >>> token_positions((3, 2)).tolist()
        [0, 1, 2, 0, 1]
        >>> token_positions((8, 4), rank=1, size=2).tolist()
        [2, 3, 4, 5, 1, 2]
    """
    if size == 1:
        return torch.cat([torch.arange(length) for length in lengths])
    chunks = [torch.arange(length).view(2 * size, _chunk(length, size)) for length in lengths]
    return torch.cat([of_sequence[list(_chunks_of(rank, size))].flatten() for of_sequence in chunks])


def row_places(lengths: Sequence[int], *, rank: int, size: int) -> Tensor:
    """Return the index of each token of this rank in the whole row: int64 [t], on the host.

    The arguments are those of :func:`causal_spans`.

    Examples:
        >>> row_places((8, 4), rank=1, size=2).tolist()
        [2, 3, 4, 5, 9, 10]
    """
    begins = (0, *accumulate(lengths))[:-1]
    shares = [torch.full((length // size,), begin) for begin, length in zip(begins, lengths, strict=True)]
    return torch.cat(shares) + token_positions(lengths, rank=rank, size=size)


def in_row_order(shares_t: Tensor, lengths: Sequence[int], *, size: int) -> Tensor:
    """Reorder the shares of all ranks into the row that they are parts of.

    Args:
        shares_t: the shares, concatenated in the order of the ranks, [tokens, ...].
        lengths, size: as in :func:`causal_spans`.

    Examples:
        >>> in_row_order(torch.tensor([0, 1, 6, 7, 2, 3, 4, 5]), (8,), size=2).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    widths = [_chunk(length, size) for length in lengths]
    places = [(number, chunk) for rank in range(size) for number in range(len(widths)) for chunk in _chunks_of(rank, size)]
    parts = dict(zip(places, shares_t.split([widths[number] for number, _ in places]), strict=True))
    return torch.cat([parts[place] for place in sorted(parts)])


def _chunk(length: int, size: int) -> int:
    """Return the number of tokens of a chunk.

    Raises:
        ValueError: if the sequence cannot be cut into equal chunks.
    """
    if length % (2 * size):
        raise ValueError(
            f"the length of a sequence must be a multiple of 2 * context parallel size = {2 * size}, got {length}"
        )
    return length // (2 * size)


def _chunks_of(rank: int, size: int) -> tuple[int, int]:
    return rank, 2 * size - 1 - rank


def packed_rows(lengths: Sequence[int], *, tokens: int | None, prompts: int | None = None) -> list[list[int]]:
    """Pack items into few rows with similar numbers of tokens.

    Items are placed from the longest to the shortest, each into the row with the fewest tokens. If an item does not fit, the
    packing is repeated with one more row.

    Args:
        lengths: number of tokens of each item.
        tokens: maximum number of tokens of a row; a longer item gets a row of its own. None for no limit.
        prompts: maximum number of items of a row; None for no limit.

    Returns:
        The indices of the items of each row.

    Examples:
        >>> packed_rows((5, 9, 3, 4), tokens=12)
        [[1, 2], [0, 3]]
        >>> packed_rows((5, 9, 3, 4), tokens=8)
        [[1], [0], [3, 2]]
    """
    if not lengths:
        return []
    most_tokens = sum(lengths) if tokens is None else tokens
    most_items = len(lengths) if prompts is None else prompts
    least = min(len(lengths), max(ceil(sum(lengths) / most_tokens), ceil(len(lengths) / most_items)))
    tried = (_even_rows(lengths, count, most_tokens, most_items) for count in range(least, len(lengths) + 1))
    return next(rows for rows in tried if rows is not None)  # one item per row is always within the limits


def _even_rows(lengths: Sequence[int], count: int, most_tokens: int, most_items: int) -> list[list[int]] | None:
    """Pack the items into ``count`` rows, none of them empty; return None if an item does not fit."""
    rows: list[list[int]] = [[] for _ in range(count)]
    open_rows = [(0, number) for number in range(count)]  # heap ordered by number of tokens
    for item in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        if not open_rows:
            return None
        filled, number = heapq.heappop(open_rows)
        if filled and filled + lengths[item] > most_tokens:
            return None
        rows[number].append(item)
        if len(rows[number]) < most_items:
            heapq.heappush(open_rows, (filled + lengths[item], number))
    return rows
