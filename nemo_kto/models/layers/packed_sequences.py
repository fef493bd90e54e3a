"""megatron-core's description of packed sequences, with the lengths on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from nemo_kto.device import device


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """megatron-core's description of packed sequences, with their lengths on the host, so that no rank waits for the device.

    Attributes:
        lengths: number of tokens of each sequence, including its padding.
    """

    lengths: tuple[int, ...]

    @classmethod
    def of(cls, rows: Sequence[tuple[int, ...]]) -> list[PackedSequences]:
        """Build a description for each row of packed sequences; all device tensors are copied in one transfer."""
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
