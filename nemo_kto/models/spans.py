"""Sequences that lie one after the other in a row: where each token stands in its own, and which tokens it may see.

Shape suffixes: t tokens of a row, n its sequences.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from typing import NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from nemo_kto.parallel import device


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """megatron-core's description of a row of sequences, with their lengths on the host: no rank waits for its device.

    Attributes:
        lengths: tokens of each sequence, with the padding that belongs to it.
    """

    lengths: tuple[int, ...]

    @classmethod
    def of(cls, rows: Sequence[tuple[int, ...]]) -> list[PackedSequences]:
        """From the lengths of each row; what the device needs of them goes there in one transfer."""
        begins = [torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) for lengths in rows]
        return [
            cls(
                qkv_format="thd",
                cu_seqlens_q=begin_n,
                cu_seqlens_kv=begin_n,
                max_seqlen_q=max(lengths),
                max_seqlen_kv=max(lengths),
                lengths=lengths,
            )
            for lengths, begin_n in zip(rows, device.upload(begins), strict=True)
        ]


class Span(NamedTuple):
    """Tokens of a row that are evaluated together, and keys they may see: the last query all, the one before one less."""

    queries: slice
    keys: slice


def causal_spans(lengths: Sequence[int]) -> list[Span]:
    """Each sequence sees itself.

    Examples:
        >>> causal_spans((3, 2))
        [Span(queries=slice(0, 3, None), keys=slice(0, 3, None)), Span(queries=slice(3, 5, None), keys=slice(3, 5, None))]
    """
    ends = list(accumulate(lengths))
    return [Span(whole := slice(end - length, end), whole) for end, length in zip(ends, lengths, strict=True)]


def token_positions(lengths: Sequence[int]) -> Tensor:
    """Of each token its place in its sequence: int64 [t], on the host.

    Examples:
        >>> token_positions((3, 2)).tolist()
        [0, 1, 2, 0, 1]
    """
    return torch.cat([torch.arange(length) for length in lengths])


def packed_rows(lengths: Sequence[int], *, tokens: int | None, prompts: int | None = None) -> list[list[int]]:
    """Which items share a row, so that rows are few and equally full.

    The longest goes first, and each into the row with the fewest tokens. Where one does not fit there, it is done again with
    one row more.

    Args:
        lengths: tokens of each item.
        tokens: the most that a row holds; an item that is longer has a row of its own. None: all are in one row.
        prompts: the most items of a row; None for any number.

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
    return next(rows for rows in tried if rows is not None)  # each item in a row of its own is within the limits


def _even_rows(lengths: Sequence[int], count: int, most_tokens: int, most_items: int) -> list[list[int]] | None:
    """So many rows, none of them empty; None if an item fits into none."""
    rows: list[list[int]] = [[] for _ in range(count)]
    open_rows = [(0, number) for number in range(count)]  # a heap: the row with the fewest tokens comes first
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
