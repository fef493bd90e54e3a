"""Sequences that lie one after the other in a row: where each token stands in its own, and which tokens it may see.

Shape suffixes: t tokens of a row, n its sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """megatron-core's description of a row of sequences, with their lengths on the host: no rank waits for its device.

    Attributes:
        lengths: tokens of each sequence, with the padding that belongs to it.
    """

    lengths: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], cu_lengths_n: Tensor) -> PackedSequences:
        """From where each sequence begins, and the last ends: ``cu_lengths_n``, int32 [n + 1], on the device."""
        longest = max(lengths)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cu_lengths_n,
            cu_seqlens_kv=cu_lengths_n,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=tuple(lengths),
        )


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
