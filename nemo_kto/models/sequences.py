"""Sequences of token ids, and how they are cut into micro-batches.

Shape suffixes: B sequences, S tokens; b, s of a micro-batch; T response tokens of a micro-batch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from nemo_kto.losses.sequence import response_counts, response_positions
from nemo_kto.parallel import device

_GPU_WIDTHS = 64  # attention on a GPU is planned again for every width that is new to it
FP8_MULTIPLE = 16  # tensor cores multiply matrices in fp8 whose sizes are multiples of it


def width_multiple(*, tensor_parallel: int, sequence_parallel: bool, fp8: bool = False, on_gpu: bool | None = None) -> int:
    """What the width of a micro-batch is rounded up to, here or ``on_gpu``.

    Sequence parallelism shards it; a shard, which is quantised by itself, has the size that ``fp8`` needs.
    """
    on_gpu = device.on_gpu() if on_gpu is None else on_gpu
    shards = tensor_parallel if sequence_parallel else 1
    return math.lcm(shards * (FP8_MULTIPLE if fp8 else 1), _GPU_WIDTHS if on_gpu else 1)


@dataclass(frozen=True, kw_only=True)
class MicroBatchLimits:
    """How much one micro-batch may hold; it has at least one prompt with its answers.

    Attributes:
        prompts: at most so many; None for no limit.
        tokens: at most so many, padding included; None for no limit.
        multiple: its width is a multiple of it.
    """

    prompts: int | None
    tokens: int | None
    multiple: int

    def __str__(self) -> str:
        """Such as "up to 8,192 tokens"."""
        prompts = [] if self.prompts is None else [f"{self.prompts:,}"]
        tokens = [] if self.tokens is None else [f"up to {self.tokens:,} tokens"]
        return ", ".join(prompts + tokens)

    def width(self, longest: int) -> int:
        """Of a micro-batch whose longest sequence has so many tokens."""
        return -(-longest // self.multiple) * self.multiple

    def fitting(self, longest: int, *, answers: int) -> int:
        """Prompts of a micro-batch with so many answers to each, whose longest sequence has so many tokens."""
        most = sys.maxsize if self.prompts is None else self.prompts
        return most if self.tokens is None else max(1, min(most, self.tokens // (answers * self.width(longest))))


@dataclass(frozen=True, kw_only=True)
class SequenceBatch:
    """Prompts with an answer each, padded on the right.

    Attributes:
        tokens_BS: token ids.
        labels_BS: the token itself where it belongs to the response, -100 elsewhere.
        lengths_B: tokens before the padding.
        positions_BS: position ids.
        mask_B1SS: True where attention is forbidden; None for plain causal attention.
        answers: sequences that belong together: k, k + B / answers, ... are answers to one prompt, and share a micro-batch.
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    lengths_B: Tensor
    positions_BS: Tensor
    mask_B1SS: Tensor | None = None
    answers: int = 1

    @classmethod
    def of(
        cls, tokens_BS: Tensor, labels_BS: Tensor, lengths_B: Tensor, positions_BS: Tensor | None, mask: Tensor | None
    ) -> SequenceBatch:
        """From the tensors of a collated batch; a mask [B, S] only says where the padding is."""
        if positions_BS is None:
            positions_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
        return cls(
            tokens_BS=tokens_BS,
            labels_BS=labels_BS,
            lengths_B=lengths_B,
            positions_BS=positions_BS,
            mask_B1SS=mask if mask is not None and mask.dim() == 4 else None,
        )

    @classmethod
    def answers_to_one_prompt(cls, *parts: SequenceBatch) -> SequenceBatch:
        """The sequences of all parts, one part after the other; all have the same shape, and prompts in the same order."""
        masks = [part.mask_B1SS for part in parts if part.mask_B1SS is not None]
        return cls(
            tokens_BS=torch.cat([part.tokens_BS for part in parts]),
            labels_BS=torch.cat([part.labels_BS for part in parts]),
            lengths_B=torch.cat([part.lengths_B for part in parts]),
            positions_BS=torch.cat([part.positions_BS for part in parts]),
            mask_B1SS=torch.cat(masks) if masks else None,
            answers=len(parts),
        )

    def __len__(self) -> int:
        return self.tokens_BS.shape[0]

    @cached_property
    def valid_B(self) -> Tensor:
        """[B] bool: sequences with at least one response token to learn from."""
        return self.response_counts_B > 0

    @cached_property
    def response_counts_B(self) -> Tensor:
        """[B] int64: response tokens of each sequence."""
        return response_counts(self.labels_BS)

    @cached_property
    def counted_B(self) -> Tensor:
        """[B] int64: tokens before the padding where all answers to the prompt are valid, else 0."""
        valid_P = self.valid_B.view(self.answers, -1).all(dim=0)
        return self.lengths_B * valid_P.repeat(self.answers)

    def take(self, sequence_index_b: Tensor) -> SequenceBatch:
        """The sequences of these numbers, each by itself."""
        mask = self.mask_B1SS
        return SequenceBatch(
            tokens_BS=self.tokens_BS[sequence_index_b],
            labels_BS=self.labels_BS[sequence_index_b],
            lengths_B=self.lengths_B[sequence_index_b],
            positions_BS=self.positions_BS[sequence_index_b],
            mask_B1SS=None if mask is None else mask[sequence_index_b],
        )

    def micro_batches(self, limits: MicroBatchLimits) -> list[MicroBatch]:
        """Cut into micro-batches of prompts of like length, each no wider than its longest sequence needs.

        A sum over sequences does not depend on their order, and padding costs time. A micro-batch has first the first
        answers to its prompts, then the second ones, if there are any.
        """
        return MicroBatch.on_device([self._micro_batch(index_b, limits) for index_b in self._by_length(limits)])

    def padded_tokens(self, limits: MicroBatchLimits) -> int:
        """Tokens and padding that :meth:`micro_batches` of the same limits carry."""
        return sum(len(index_b) * self._width(index_b, limits) for index_b in self._by_length(limits))

    def _by_length(self, limits: MicroBatchLimits) -> Iterator[Tensor]:
        prompts = len(self) // self.answers
        longest_of_prompt = self.lengths_B.view(self.answers, prompts).amax(dim=0)
        order = torch.argsort(longest_of_prompt, descending=True, stable=True)
        while len(order):
            count = limits.fitting(int(longest_of_prompt[order[0]]), answers=self.answers)
            part, order = order[:count], order[count:]
            yield torch.cat([part + prompts * k for k in range(self.answers)])

    def _width(self, sequence_index_b: Tensor, limits: MicroBatchLimits) -> int:
        return limits.width(int(self.lengths_B[sequence_index_b].max()))

    def _micro_batch(self, sequence_index_b: Tensor, limits: MicroBatchLimits) -> MicroBatch:
        width, mask = self._width(sequence_index_b, limits), self.mask_B1SS
        sequence_T, position_T, target_T = response_positions(self.labels_BS[sequence_index_b, :width])
        return MicroBatch(
            sequence_index_b=sequence_index_b,
            tokens_bs=self.tokens_BS[sequence_index_b, :width],
            positions_bs=self.positions_BS[sequence_index_b, :width],
            mask_b1ss=None if mask is None else mask[sequence_index_b, :, :width, :width],
            counted_b=self.counted_B[sequence_index_b],
            hidden_index_T=position_T * len(sequence_index_b) + sequence_T,
            target_T=target_T,
            sequence_T=sequence_T,
        )


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What one pass through the pipeline carries.

    The last stage reads only the indices, so it is the same however sequences lie in ``tokens_bs``: a row each, several
    packed into one, or a part of each on this rank.

    Attributes:
        sequence_index_b: which sequences of the batch these are.
        tokens_bs, positions_bs, mask_b1ss: what the first stage and the attention get.
        counted_b: tokens of each sequence that count in what a model adds to the loss itself: those before the padding, none
            of a sequence that is in no sum.
        hidden_index_T: the hidden state that predicts each response token, as an index into [s * b] (megatron-core's order).
        target_T: that token.
        sequence_T: whose token it is, as an index into ``sequence_index_b``.
    """

    sequence_index_b: Tensor
    tokens_bs: Tensor
    positions_bs: Tensor
    mask_b1ss: Tensor | None
    counted_b: Tensor
    hidden_index_T: Tensor
    target_T: Tensor
    sequence_T: Tensor

    @classmethod
    def without_sequences(cls, limits: MicroBatchLimits) -> MicroBatch:
        """One row of padding, for a rank that has nothing to do while others work; already on this rank's device."""
        nothing, row = torch.zeros(0, dtype=torch.int64), torch.zeros(1, limits.multiple, dtype=torch.int64)
        indices = dict.fromkeys(("sequence_index_b", "hidden_index_T", "target_T", "sequence_T"), nothing)
        empty = cls(tokens_bs=row, positions_bs=row, mask_b1ss=None, counted_b=torch.zeros(1, dtype=torch.int64), **indices)
        return cls.on_device([empty])[0]

    @classmethod
    def on_device(cls, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The same on this rank's device, in one transfer: nothing is left to wait for between two micro-batches."""
        names = [each.name for each in fields(cls) if each.name != "mask_b1ss"]
        there = iter(device.upload([getattr(each, name) for each in micro_batches for name in names]))
        masks = iter(device.upload([each.mask_b1ss for each in micro_batches if each.mask_b1ss is not None]))
        return [
            cls(mask_b1ss=None if each.mask_b1ss is None else next(masks), **{name: next(there) for name in names})
            for each in micro_batches
        ]
