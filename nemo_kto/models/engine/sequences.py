"""Batches of token sequences, and their split into micro-batches.

Shape suffixes: B sequences, S tokens; b, s of a micro-batch; T response tokens of a micro-batch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_kto.device import device
from nemo_kto.device.precision import FP8_MULTIPLE
from nemo_kto.losses.sequence import IGNORED, response_counts, response_positions
from nemo_kto.models.layers.packing import local_token_indices, pack_lengths

if TYPE_CHECKING:  # so that the planner does not import megatron-core
    from nemo_kto.models.layers.attention import PackedSequences

_GPU_WIDTHS = 64  # rounds widths up on a GPU, because attention kernels are set up again for every new width


def width_multiple(
    *,
    tensor_parallel: int,
    sequence_parallel: bool,
    context_parallel: int = 1,
    fp8: bool = False,
    on_gpu: bool | None = None,  # whether the run computes on GPUs; None for the device of this process
) -> int:
    """Return the multiple to which the width of a micro-batch is rounded up.

    Each context-parallel rank has two chunks of the width, and sequence parallelism shards its tokens. With ``fp8`` each
    shard is quantised separately, so its size must be a multiple of ``FP8_MULTIPLE``.
    """
    on_gpu = device.on_gpu() if on_gpu is None else on_gpu
    shards = context_parallel * (tensor_parallel if sequence_parallel else 1)
    shard_multiple = 2 if context_parallel > 1 else 1
    if fp8:
        shard_multiple = FP8_MULTIPLE
    return math.lcm(shards * shard_multiple, _GPU_WIDTHS if on_gpu else 1)


@dataclass(frozen=True, kw_only=True)
class MicroBatchLimits:
    """Size limits of a micro-batch, which always holds at least one prompt with its answers."""

    prompts: int | None  # maximum number of prompts; None for no limit
    tokens: int | None  # maximum number of tokens, including padding; None for no limit
    multiple: int  # the width of a micro-batch is a multiple of this number
    packed: bool = False  # sequences are packed one after the other, without padding between them
    context_parallel: int = 1  # context-parallel size, over which each packed sequence is sharded
    group: int = 1  # the number of micro-batches is a multiple of this number; the last ones may be empty

    def __str__(self) -> str:
        """Describe the limits, such as "up to 8,192 tokens"."""
        prompts = [] if self.prompts is None else [f"{self.prompts:,}"]
        tokens = [] if self.tokens is None else [f"up to {self.tokens:,} tokens"]
        return ", ".join(prompts + tokens + ["packed"] * self.packed)

    def width(self, longest: int) -> int:
        """Return the width of a micro-batch whose longest sequence has ``longest`` tokens."""
        return -(-longest // self.multiple) * self.multiple

    def packed_lengths(self, lengths: Tensor) -> Tensor:
        """Return ``lengths`` rounded up for a pack: context-parallel ranks have two equal chunks of each sequence."""
        chunks = 2 * self.context_parallel if self.context_parallel > 1 else 1
        return -(-lengths // chunks) * chunks

    def whole_groups(self, micro_batches: int) -> int:
        """Return ``micro_batches`` rounded up to a multiple of ``group``."""
        return -(-micro_batches // self.group) * self.group

    def fitting(self, longest: int, *, answers: int) -> int:
        """Return the number of prompts, with ``answers`` each and at most ``longest`` tokens, that fit a micro-batch."""
        most = sys.maxsize if self.prompts is None else self.prompts
        return most if self.tokens is None else max(1, min(most, self.tokens // (answers * self.width(longest))))


@dataclass(frozen=True, kw_only=True)
class SequenceBatch:
    """Batch of sequences, each a prompt with one answer, padded on the right."""

    tokens_BS: Tensor
    labels_BS: Tensor  # token id at positions of the response, -100 elsewhere
    lengths_B: Tensor  # number of tokens before the padding
    positions_BS: Tensor
    mask_B1SS: Tensor | None = None  # True where attention is forbidden; None for plain causal attention
    # Number of answers to each prompt. Sequences k, k + B / answers, ... are answers to one prompt, and are always in the
    # same micro-batch.
    answers: int = 1
    prompt_labels_BS: Tensor | None = None  # labels of a second log-prob of each sequence, over tokens outside its response

    @classmethod
    def of(
        cls, tokens_BS: Tensor, labels_BS: Tensor, lengths_B: Tensor, positions_BS: Tensor | None, mask: Tensor | None
    ) -> SequenceBatch:
        """Build a batch from the tensors of a collated batch; a mask [B, S] marks only padding and is ignored."""
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
        """Concatenate parts of the same shape whose prompts are in the same order, each part one answer to each prompt."""
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

    def with_prompts(self, wanted_B: Tensor) -> SequenceBatch:
        """Return the batch with a second log-prob: of all tokens outside the response if in ``wanted_B``, else of none."""
        is_prompt_BS = (self.labels_BS == IGNORED) & (torch.arange(self.tokens_BS.shape[1]) < self.lengths_B[:, None])
        return replace(self, prompt_labels_BS=torch.where(is_prompt_BS & wanted_B[:, None], self.tokens_BS, IGNORED))

    @property
    def label_sets(self) -> list[Tensor]:
        """Labels of each log-prob of a sequence, [B, S] each: those of its response first."""
        return [self.labels_BS] if self.prompt_labels_BS is None else [self.labels_BS, self.prompt_labels_BS]

    @cached_property
    def prompt_counts_B(self) -> Tensor:
        """Number of tokens of the second log-prob, [B] int64; 0 without a second log-prob."""
        labels_BS = self.prompt_labels_BS
        return torch.zeros_like(self.response_counts_B) if labels_BS is None else response_counts(labels_BS)

    @cached_property
    def valid_B(self) -> Tensor:
        """Whether a sequence has at least one response token to learn from, [B] bool."""
        return self.response_counts_B > 0

    @cached_property
    def response_counts_B(self) -> Tensor:
        """Number of response tokens of each sequence, [B] int64."""
        return response_counts(self.labels_BS)

    @cached_property
    def counted_B(self) -> Tensor:
        """Number of tokens before the padding if all answers to the prompt are valid, otherwise 0; [B] int64."""
        valid_P = self.valid_B.view(self.answers, -1).all(dim=0)
        return self.lengths_B * valid_P.repeat(self.answers)

    def take(self, sequence_index_b: Tensor) -> SequenceBatch:
        """Return the sequences with these indices as a batch with one answer to each prompt and one log-prob."""
        mask = self.mask_B1SS
        return SequenceBatch(
            tokens_BS=self.tokens_BS[sequence_index_b],
            labels_BS=self.labels_BS[sequence_index_b],
            lengths_B=self.lengths_B[sequence_index_b],
            positions_BS=self.positions_BS[sequence_index_b],
            mask_B1SS=None if mask is None else mask[sequence_index_b],
        )

    def micro_batches(
        self, limits: MicroBatchLimits, *, context_rank: int = 0, agree: Callable[[int], int] = int
    ) -> list[MicroBatch]:
        """Split the batch into micro-batches on the device, either packed or of prompts of similar length.

        Each micro-batch is only as wide as its longest sequence needs, because padding costs time and a sum over sequences
        does not depend on their order. It has the first answers to its prompts, followed by the second ones, if there are
        any; with context parallelism, this rank's tokens of each sequence. ``agree`` maps the number of micro-batches that
        this rank needs to the number that all ranks run; the additional ones have no sequences.
        """
        whole = [self._micro_batch(index_b, limits) for index_b in self._partition(limits)]
        whole += [self._empty_micro_batch(limits)] * (agree(limits.whole_groups(len(whole))) - len(whole))
        return MicroBatch.on_device([micro_batch.share(context_rank, limits.context_parallel) for micro_batch in whole])

    def padded_tokens(self, limits: MicroBatchLimits, *, agree: Callable[[int], int] = int) -> int:
        """Return the number of tokens, including padding, of :meth:`micro_batches` with the same arguments."""
        parts = self._partition(limits)
        empty = agree(limits.whole_groups(len(parts))) - len(parts)
        tokens = sum((1 if limits.packed else len(index_b)) * self._width(index_b, limits) for index_b in parts)
        return tokens + limits.width(1) * empty

    def _partition(self, limits: MicroBatchLimits) -> list[Tensor]:
        """Return the indices of the sequences of each micro-batch."""
        prompts = len(self) // self.answers
        lengths_AP = self.lengths_B.view(self.answers, prompts)
        parts: list[Tensor] = []  # indices of prompts
        if limits.packed:
            tokens_P = limits.packed_lengths(lengths_AP).sum(dim=0)
            packs = pack_lengths(tokens_P.tolist(), tokens=limits.tokens, prompts=limits.prompts)
            parts = [torch.tensor(pack) for pack in packs]
        else:
            longest_P = lengths_AP.amax(dim=0)
            order = torch.argsort(longest_P, descending=True, stable=True)
            while len(order):
                count = limits.fitting(int(longest_P[order[0]]), answers=self.answers)
                parts.append(order[:count])
                order = order[count:]
        return [torch.cat([part + prompts * k for k in range(self.answers)]) for part in parts]

    def _width(self, sequence_index_b: Tensor, limits: MicroBatchLimits) -> int:
        lengths_b = self.lengths_B[sequence_index_b]
        return limits.width(int(limits.packed_lengths(lengths_b).sum() if limits.packed else lengths_b.max()))

    def _micro_batch(self, sequence_index_b: Tensor, limits: MicroBatchLimits) -> MicroBatch:
        size, width = len(sequence_index_b), self._width(sequence_index_b, limits)
        label_width = None if limits.packed else width
        found = [response_positions(labels_BS[sequence_index_b, :label_width]) for labels_BS in self.label_sets]
        sequence_T, position_T, target_T = (torch.cat(parts) for parts in zip(*found, strict=True))
        if limits.packed:
            # Padding belongs to the sequence before it, whose tokens do not attend to it; the padding at the end of the
            # pack belongs to the last sequence.
            lengths = limits.packed_lengths(self.lengths_B[sequence_index_b]).tolist()
            lengths[-1] += width - sum(lengths)
            starts_b = torch.tensor([0, *accumulate(lengths)])[:-1]
            hidden_index_T = starts_b[sequence_T] + position_T
            tokens_bs, positions_bs = (
                self._packed(values_BS, sequence_index_b, lengths) for values_BS in (self.tokens_BS, self.positions_BS)
            )
        else:
            lengths = [width] * size
            hidden_index_T = position_T * size + sequence_T
            tokens_bs, positions_bs = self.tokens_BS[sequence_index_b, :width], self.positions_BS[sequence_index_b, :width]
        counted = self.counted_B[sequence_index_b].tolist()
        owners = [
            torch.where(torch.arange(n) < count, k, -1) for k, (count, n) in enumerate(zip(counted, lengths, strict=True))
        ]
        mask = None if limits.packed or self.mask_B1SS is None else self.mask_B1SS[sequence_index_b, :, :width, :width]
        return MicroBatch(
            sequence_index_b=sequence_index_b,
            tokens_bs=tokens_bs,
            positions_bs=positions_bs,
            mask_b1ss=mask,
            owner_bs=torch.cat(owners).view(len(tokens_bs), -1),
            hidden_index_T=hidden_index_T,
            target_T=target_T,
            logprob_T=torch.cat([own_T + k * size for k, (own_T, _, _) in enumerate(found)]),
            num_logprobs=len(found) * size,
            lengths=tuple(lengths) if limits.packed else None,
        )

    def _packed(self, values_BS: Tensor, sequence_index_b: Tensor, lengths: Sequence[int]) -> Tensor:
        """Concatenate the values of sequences, each padded to its length in the pack: [1, sum of lengths]."""
        own = [values_BS[k, : self.lengths_B[k]] for k in sequence_index_b]
        return torch.cat([F.pad(values, (0, n - len(values))) for values, n in zip(own, lengths, strict=True)])[None]

    def _empty_micro_batch(self, limits: MicroBatchLimits) -> MicroBatch:
        """Build a micro-batch without sequences, loss or gradient; the layers compute placeholder tokens."""
        width, nothing = limits.width(1), torch.zeros(0, dtype=torch.long)
        return MicroBatch(
            sequence_index_b=nothing,
            tokens_bs=torch.zeros(1, width, dtype=torch.long),
            positions_bs=torch.arange(width)[None],
            mask_b1ss=None if self.mask_B1SS is None else torch.zeros(1, 1, width, width, dtype=torch.bool),
            owner_bs=torch.full((1, width), -1),
            hidden_index_T=nothing,
            target_T=nothing,
            logprob_T=nothing,
            num_logprobs=0,
        )


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Input of one pass through the pipeline.

    The last stage reads only the indices, so it does not depend on the arrangement of sequences in ``tokens_bs``: padded,
    packed into one ([1, s]), or this rank's part of each.
    """

    sequence_index_b: Tensor  # indices of the sequences in the batch
    tokens_bs: Tensor
    positions_bs: Tensor
    mask_b1ss: Tensor | None
    # Sequence to which each token counts in a loss that the model itself adds (load balancing), as an index into
    # ``sequence_index_b``; -1 for padding and for sequences that are excluded from the loss.
    owner_bs: Tensor
    hidden_index_T: Tensor  # hidden state that predicts each response token: an index into [s * b] (megatron-core's order)
    target_T: Tensor  # response token that the hidden state predicts
    logprob_T: Tensor  # log-prob it contributes to: an index into ``sequence_index_b``, plus b for a second log-prob
    num_logprobs: int  # b, or 2 b if sequences have a second log-prob
    lengths: tuple[int, ...] | None = None  # of the whole sequences of a pack, each with its padding; None if not packed
    packed: PackedSequences | None = None  # the lengths in the form that attention needs, on the device

    def share(self, rank: int, size: int) -> MicroBatch:
        """Return the part of the micro-batch that a context-parallel rank has: its tokens, and the targets they predict.

        Raises ValueError if the length of a sequence is not a multiple of 2 * size.
        """
        if size == 1:
            return self
        batch, width = self.tokens_bs.shape
        index_s = local_token_indices(self.lengths or (width,), rank=rank, size=size)
        local_index_s = torch.full((width,), -1).index_copy(0, index_s, torch.arange(len(index_s)))  # -1: on another rank
        local_index_T, sequence_T = local_index_s[self.hidden_index_T // batch], self.hidden_index_T % batch
        is_local_T = local_index_T >= 0
        return replace(
            self,
            tokens_bs=self.tokens_bs[:, index_s],
            positions_bs=self.positions_bs[:, index_s],
            owner_bs=self.owner_bs[:, index_s],
            hidden_index_T=(local_index_T * batch + sequence_T)[is_local_T],
            target_T=self.target_T[is_local_T],
            logprob_T=self.logprob_T[is_local_T],
        )

    @classmethod
    def on_device(cls, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Copy micro-batches to this rank's device, in one transfer per dtype; the host need not wait between them."""
        from nemo_kto.models.layers.attention import PackedSequences

        names = [field.name for field in fields(cls) if field.name not in ("num_logprobs", "lengths", "packed")]
        uploaded = iter(device.upload([getattr(micro_batch, name) for micro_batch in micro_batches for name in names]))
        packed = iter(PackedSequences.of([part.lengths for part in micro_batches if part.lengths is not None]))
        return [
            replace(part, packed=None if part.lengths is None else next(packed), **{name: next(uploaded) for name in names})
            for part in micro_batches
        ]
