"""Batches of token sequences, and their split into micro-batches.

Shape suffixes: B sequences, P prompts, S tokens; b, s of a micro-batch; n its segments; T its response tokens.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_kto.device import device
from nemo_kto.device.precision import FP8_MULTIPLE
from nemo_kto.layers.packing import Prompts, local_token_indices, pack_lengths
from nemo_kto.losses.sequence import IGNORED, response_counts, response_positions

if TYPE_CHECKING:  # so that a plan does not import megatron-core
    from nemo_kto.layers.attention import PackedSequences

_GPU_WIDTHS = 64  # rounds widths up on a GPU, because attention kernels are set up again for every new width
# Padding, in tokens, of a sequence on a CPU beyond which another micro-batch costs less; there, products of a few hundred
# tokens are as efficient as larger ones.
_CPU_MAX_PADDING = 16
# Fraction of the tokens that shared prompts must save. Attention is computed answer by answer with copies of the prompt's
# keys and values, which costs more than it saves if prompts are very short.
_MIN_SAVING = 1 / 32


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
    # Sequences with the same prompt are in the same micro-batch, if they fit, and share its tokens; such batches are packed.
    share_prompts: bool = False

    def __post_init__(self) -> None:
        if self.share_prompts and self.context_parallel > 1:
            raise ValueError(f"share_prompts must be False with context_parallel={self.context_parallel}, got True")

    def __str__(self) -> str:
        """Describe the limits, such as "up to 8,192 tokens"."""
        prompts = [] if self.prompts is None else [f"{self.prompts:,}"]
        tokens = [] if self.tokens is None else [f"up to {self.tokens:,} tokens"]
        return ", ".join(prompts + tokens + ["packed"] * self.packed + ["shared prompts"] * self.share_prompts)

    def width(self, longest: int) -> int:
        """Return the width of a micro-batch whose longest sequence has ``longest`` tokens."""
        return -(-longest // self.multiple) * self.multiple

    def packed_lengths(self, lengths: Tensor) -> Tensor:
        """Return ``lengths`` rounded up for a pack: context-parallel ranks have two equal chunks of each sequence."""
        chunks = 2 * self.context_parallel if self.context_parallel > 1 else 1
        return -(-lengths // chunks) * chunks

    def forward_only(self, size: int | None, *, answers: int) -> MicroBatchLimits:
        """Return the limits of a pass without gradient, of which a micro-batch has ``size`` sequences; None for the same."""
        return self if size is None else replace(self, prompts=max(1, size // answers), tokens=None)

    def whole_groups(self, micro_batches: int) -> int:
        """Return ``micro_batches`` rounded up to a multiple of ``group``."""
        return -(-micro_batches // self.group) * self.group

    def fitting(self, longest: int, *, answers: int) -> int:
        """Return the number of prompts, with ``answers`` each and at most ``longest`` tokens, that fit a micro-batch."""
        most = sys.maxsize if self.prompts is None else self.prompts
        return most if self.tokens is None else max(1, min(most, self.tokens // (answers * self.width(longest))))


class Segment(NamedTuple):
    """Consecutive tokens of a sequence in a pack: the whole sequence, a shared prompt, or an answer to one."""

    sequence: int  # index in the micro-batch; for a shared prompt, that of any sequence that begins with it
    start: int  # position of the first token in the sequence
    stop: int
    prompt: int | None  # index of the segment with the tokens before ``start``; None if there are none


@dataclass(frozen=True, kw_only=True)
class SequenceBatch:
    """Batch of sequences, each a prompt with one answer, padded on the right."""

    tokens_BS: Tensor
    labels_BS: Tensor  # token id at positions of the response, -100 elsewhere
    lengths_B: Tensor  # number of tokens before the padding
    # Number of answers to each prompt. Sequences k, k + B / answers, ... are answers to one prompt, and are always in the
    # same micro-batch.
    answers: int = 1
    prompt_labels_BS: Tensor | None = None  # labels of a second log-prob of each sequence, over tokens outside its response
    weights_BS: Tensor | None = None  # factor of each token's log-prob in that of its response; None for 1
    # micro-batches on the device, for all passes over these sequences
    kept: dict[MicroBatchLimits, list[MicroBatch]] = field(init=False, repr=False, compare=False, default_factory=dict)

    @classmethod
    def of(cls, tokens_BS: Tensor, labels_BS: Tensor, lengths_B: Tensor) -> SequenceBatch:
        """Build a batch from the tensors of a collated batch."""
        return cls(tokens_BS=tokens_BS, labels_BS=labels_BS, lengths_B=lengths_B)

    @classmethod
    def answers_to_one_prompt(cls, *parts: SequenceBatch) -> SequenceBatch:
        """Concatenate parts of the same shape whose prompts are in the same order, each part one answer to each prompt."""
        return cls(
            tokens_BS=torch.cat([part.tokens_BS for part in parts]),
            labels_BS=torch.cat([part.labels_BS for part in parts]),
            lengths_B=torch.cat([part.lengths_B for part in parts]),
            answers=len(parts),
        )

    def __len__(self) -> int:
        return self.tokens_BS.shape[0]

    def with_prompts(self, wanted_B: Tensor) -> SequenceBatch:
        """Return the batch with a second log-prob: of all tokens outside the response if in ``wanted_B``, else of none."""
        is_prompt_BS = (self.labels_BS == IGNORED) & (torch.arange(self.tokens_BS.shape[1]) < self.lengths_B[:, None])
        return replace(self, prompt_labels_BS=torch.where(is_prompt_BS & wanted_B[:, None], self.tokens_BS, IGNORED))

    def desensitized(self, alpha_P: Tensor) -> SequenceBatch:
        """Return the batch with weights ``alpha_P`` of response tokens beyond the length of the prompt's shortest response.

        LD-DPO, Liu et al. 2024, arXiv 2409.06411: the log-prob of a response is the sum over the length
        that all responses to the prompt have, plus alpha times the sum over the rest.
        """
        shared_B = self.response_counts_B.view(self.answers, -1).amin(dim=0).repeat(self.answers)
        is_response_BS = self.labels_BS != IGNORED
        is_response_BS[:, 0] = False  # no hidden state predicts the first token
        is_beyond_BS = is_response_BS.cumsum(dim=1) > shared_B[:, None]
        return replace(self, weights_BS=torch.where(is_beyond_BS, alpha_P.repeat(self.answers)[:, None], 1.0))

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

    @cached_property
    def prompt_lengths_B(self) -> Tensor:
        """Number of tokens before the first response token, or of all tokens if there is none; [B] int64."""
        is_response_BS = self.labels_BS != IGNORED
        return torch.where(is_response_BS.any(dim=1), is_response_BS.int().argmax(dim=1), self.lengths_B)

    @cached_property
    def prompt_group_B(self) -> Tensor:
        """Number of the prompt of each sequence, [B] int64: the same for sequences that can share the prompt's tokens."""
        groups: dict[bytes | int, int] = {}
        prompts = zip(self.tokens_BS.numpy(), self.prompt_lengths_B.tolist(), self.valid_B.tolist(), strict=True)
        keys = [tokens[:length].tobytes() if valid and length else k for k, (tokens, length, valid) in enumerate(prompts)]
        return torch.tensor([groups.setdefault(key, len(groups)) for key in keys], dtype=torch.long)

    def limits_of(self, limits: MicroBatchLimits) -> MicroBatchLimits:
        """Return ``limits`` with packing if shared prompts save enough tokens, otherwise without shared prompts."""
        separate = replace(limits, share_prompts=False)
        if not limits.share_prompts or len(set(self.prompt_group_B.tolist())) == len(self):
            return separate
        shared = replace(limits, packed=True)
        saved = 1 - self._tokens(self._partition(shared), shared) / self._tokens(self._partition(separate), separate)
        return shared if saved >= _MIN_SAVING else separate

    def shared_prompts(self, limits: MicroBatchLimits) -> list[int]:
        """Return the length of each prompt that :meth:`micro_batches` leaves out because it is shared."""
        return [length for _, lengths in self._shared_prompts(limits) for length in lengths]

    def largest_part(self, limits: MicroBatchLimits) -> float:
        """Return which fraction of its tokens the micro-batch computes that shares the least; 1 without shared prompts."""
        shared = self._shared_prompts(limits)
        return max((1 - sum(lengths) / int(self.lengths_B[index_b].sum()) for index_b, lengths in shared), default=1.0)

    def _shared_prompts(self, limits: MicroBatchLimits) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield the indices of the sequences of each micro-batch, and the lengths of the prompts that it leaves out."""
        limits = self.limits_of(limits)
        if not limits.share_prompts:
            return
        for index_b in self._partition(limits):
            segments = self._segments(index_b, limits)
            answers = Counter(segment.prompt for segment in segments if segment.prompt is not None)
            yield index_b, [segments[prompt].stop for prompt, count in answers.items() for _ in range(count - 1)]

    def take(self, sequence_index_b: Tensor) -> SequenceBatch:
        """Return the sequences with these indices as a batch with one answer to each prompt and one log-prob."""
        return SequenceBatch(
            tokens_BS=self.tokens_BS[sequence_index_b],
            labels_BS=self.labels_BS[sequence_index_b],
            lengths_B=self.lengths_B[sequence_index_b],
            weights_BS=None if self.weights_BS is None else self.weights_BS[sequence_index_b],
        )

    def micro_batches(
        self, limits: MicroBatchLimits, *, context_rank: int = 0, agree: Callable[[int], int] = int
    ) -> list[MicroBatch]:
        """Split the batch into micro-batches on the device, either packed or of prompts of similar length.

        With ``limits.share_prompts``, sequences that begin with the same prompt share its tokens, and the batch is packed,
        if that saves tokens; otherwise micro-batches are those without shared prompts.

        Each micro-batch is only as wide as its longest sequence needs, because padding costs time and a sum over sequences
        does not depend on their order. It has the first answers to its prompts, followed by the second ones, if there are
        any; with context parallelism, this rank's tokens of each sequence. ``agree`` maps the number of micro-batches that
        this rank needs to the number that all ranks run; the additional ones have no sequences.
        """
        limits = self.limits_of(limits)
        whole = [self._micro_batch(index_b, limits) for index_b in self._partition(limits)]
        whole += [self._empty_micro_batch(limits)] * (agree(limits.whole_groups(len(whole))) - len(whole))
        return MicroBatch.on_device([micro_batch.share(context_rank, limits.context_parallel) for micro_batch in whole])

    def padded_tokens(self, limits: MicroBatchLimits, *, agree: Callable[[int], int] = int) -> int:
        """Return the number of tokens, including padding, of :meth:`micro_batches` with the same arguments."""
        limits = self.limits_of(limits)
        parts = self._partition(limits)
        empty = agree(limits.whole_groups(len(parts))) - len(parts)
        return self._tokens(parts, limits) + limits.width(1) * empty

    def _tokens(self, parts: Sequence[Tensor], limits: MicroBatchLimits) -> int:
        """Return the number of tokens, including padding, of micro-batches of the sequences with these indices."""
        return sum((1 if limits.packed else len(index_b)) * self._width(index_b, limits) for index_b in parts)

    def _partition(self, limits: MicroBatchLimits) -> list[Tensor]:
        """Return the indices of the sequences of each micro-batch."""
        prompts = len(self) // self.answers
        lengths_AP = self.lengths_B.view(self.answers, prompts)
        parts: list[Tensor] = []  # indices of prompts
        if limits.share_prompts:
            parts = self._partition_groups(limits)
        elif limits.packed:
            tokens_P = limits.packed_lengths(lengths_AP).sum(dim=0)
            packs = pack_lengths(tokens_P.tolist(), tokens=limits.tokens, prompts=limits.prompts)
            parts = [torch.tensor(pack) for pack in packs]
        else:
            longest_P = lengths_AP.amax(dim=0)
            order = torch.argsort(longest_P, descending=True, stable=True)
            while len(order):
                longest = int(longest_P[order[0]])
                count = limits.fitting(longest, answers=self.answers)
                if limits.tokens is not None and not device.on_gpu():
                    count = min(count, int((longest_P[order] >= longest - _CPU_MAX_PADDING).sum()))
                parts.append(order[:count])
                order = order[count:]
        return [torch.cat([part + prompts * k for k in range(self.answers)]) for part in parts]

    def _partition_groups(self, limits: MicroBatchLimits) -> list[Tensor]:
        """Return the indices of the prompts of each pack; equal prompts are packed together, as far as the limits allow."""
        group_AP, lengths_AP = (values_B.view(self.answers, -1) for values_B in (self.prompt_group_B, self.lengths_B))
        alike_P = (group_AP == group_AP[0]).all(dim=0)
        prompt_P = torch.where(alike_P, self.prompt_lengths_B[: len(alike_P)], 0)
        own_P = (lengths_AP - prompt_P).sum(dim=0)  # tokens besides those of the prompt
        groups: dict[int, list[int]] = {}
        for prompt in torch.argsort(own_P, descending=True, stable=True).tolist():
            groups.setdefault(int(group_AP[0, prompt]) if alike_P[prompt] else -1 - prompt, []).append(prompt)
        items, tokens = list[list[int]](), list[int]()
        for group in groups.values():
            for number, prompt in enumerate(group):
                own, shared = int(own_P[prompt]), int(prompt_P[prompt])
                is_full = limits.prompts is not None and number and len(items[-1]) == limits.prompts
                is_full = is_full or (limits.tokens is not None and number and tokens[-1] + own > limits.tokens)
                if number == 0 or is_full:
                    items.append([])
                    tokens.append(shared)
                items[-1].append(prompt)
                tokens[-1] += own
        packs = pack_lengths(tokens, tokens=limits.tokens, prompts=limits.prompts, sizes=[*map(len, items)])
        return [torch.tensor([prompt for item in pack for prompt in items[item]]) for pack in packs]

    def _segments(self, sequence_index_b: Tensor, limits: MicroBatchLimits) -> list[Segment]:
        """Return the segments of a pack; with shared prompts, each prompt is followed by its answers."""
        lengths = self.lengths_B[sequence_index_b].tolist()
        if not limits.share_prompts:
            return [Segment(k, 0, length, None) for k, length in enumerate(lengths)]
        groups: dict[int, list[int]] = {}
        for k, group in enumerate(self.prompt_group_B[sequence_index_b].tolist()):
            groups.setdefault(group, []).append(k)
        segments = list[Segment]()
        for first, *others in groups.values():
            if not others:
                segments.append(Segment(first, 0, lengths[first], None))
                continue
            prompt, shared = len(segments), int(self.prompt_lengths_B[sequence_index_b[first]])
            segments.append(Segment(first, 0, shared, None))
            segments += [Segment(k, shared, lengths[k], prompt) for k in (first, *others)]
        return segments

    def _width(self, sequence_index_b: Tensor, limits: MicroBatchLimits) -> int:
        lengths = self.lengths_B[sequence_index_b]
        if limits.packed:
            segments = self._segments(sequence_index_b, limits)
            lengths = limits.packed_lengths(torch.tensor([stop - start for _, start, stop, _ in segments])).sum()
        return limits.width(int(lengths.max()))

    def _micro_batch(self, sequence_index_b: Tensor, limits: MicroBatchLimits) -> MicroBatch:
        size, width = len(sequence_index_b), self._width(sequence_index_b, limits)
        label_width = None if limits.packed else width
        found = [response_positions(labels_BS[sequence_index_b, :label_width]) for labels_BS in self.label_sets]
        sequence_T, position_T, target_T = (torch.cat(parts) for parts in zip(*found, strict=True))
        segments = self._segments(sequence_index_b, limits)
        if limits.packed:
            # Padding belongs to the segment before it, whose tokens do not attend to it; the padding at the end of the
            # pack belongs to the last segment.
            lengths = limits.packed_lengths(torch.tensor([stop - start for _, start, stop, _ in segments])).tolist()
            lengths[-1] += width - sum(lengths)
            hidden_index_T = _token_indices(segments, lengths, sequence_T, position_T)
            tokens_bs = _packed(self.tokens_BS[sequence_index_b], segments, lengths)
            positions_bs = _packed(torch.arange(self.tokens_BS.shape[1]).expand(size, -1), segments, lengths)
        else:
            lengths = [width] * size
            hidden_index_T = position_T * size + sequence_T
            tokens_bs, positions_bs = self.tokens_BS[sequence_index_b, :width], torch.arange(width).repeat(size, 1)
        segment_bs = [
            torch.where(torch.arange(n) < stop - start, k, -1)
            for k, ((_, start, stop, _), n) in enumerate(zip(segments, lengths, strict=True))
        ]
        weight_T = None
        if self.weights_BS is not None:  # of the tokens that the hidden states predict
            weight_T = self.weights_BS[sequence_index_b[sequence_T], position_T + 1]
        return MicroBatch(
            sequence_index_b=sequence_index_b,
            tokens_bs=tokens_bs,
            positions_bs=positions_bs,
            segment_bs=torch.cat(segment_bs).view(len(tokens_bs), -1),
            owners_nb=_owners(segments, self.counted_B[sequence_index_b] > 0),
            hidden_index_T=hidden_index_T,
            target_T=target_T,
            logprob_T=torch.cat([own_T + k * size for k, (own_T, _, _) in enumerate(found)]),
            weight_T=weight_T,
            num_logprobs=len(found) * size,
            lengths=tuple(lengths) if limits.packed else None,
            prompts=tuple(segment.prompt for segment in segments) if limits.share_prompts else None,
        )

    def _empty_micro_batch(self, limits: MicroBatchLimits) -> MicroBatch:
        """Build a micro-batch without sequences, loss or gradient; the layers compute placeholder tokens."""
        width, nothing = limits.width(1), torch.zeros(0, dtype=torch.long)
        return MicroBatch(
            sequence_index_b=nothing,
            tokens_bs=torch.zeros(1, width, dtype=torch.long),
            positions_bs=torch.arange(width)[None],
            segment_bs=torch.full((1, width), -1),
            owners_nb=torch.zeros(1, 1, dtype=torch.bool),
            hidden_index_T=nothing,
            target_T=nothing,
            logprob_T=nothing,
            weight_T=None if self.weights_BS is None else torch.zeros(0),
            num_logprobs=0,
        )


def joined(parts: Sequence[SequenceBatch], limits: MicroBatchLimits, *, in_fp32: bool) -> Sequence[SequenceBatch]:
    """Return the parts as one batch if prompts are shared and the parts are answers to the same prompts; in fp32 only.

    The policy evaluates each part separately. In fp32, log-probs differ by rounding errors, at most a millionth, so the
    log-ratios of the first step are not exactly 0; in bf16 they would be noticeably different from 0.
    """
    is_alike = len({part.tokens_BS.shape for part in parts}) == 1 and all(part.answers == 1 for part in parts)
    if len(parts) == 1 or not limits.share_prompts or not is_alike or not in_fp32:
        return parts
    return [SequenceBatch.answers_to_one_prompt(*parts)]


def _packed(values_bS: Tensor, segments: Sequence[Segment], lengths: Sequence[int]) -> Tensor:
    """Concatenate the values of segments, each padded to its length in the pack: [1, sum of lengths]."""
    own = [values_bS[sequence, start:stop] for sequence, start, stop, _ in segments]
    return torch.cat([F.pad(values, (0, n - len(values))) for values, n in zip(own, lengths, strict=True)])[None]


def _token_indices(segments: Sequence[Segment], lengths: Sequence[int], sequence_T: Tensor, position_T: Tensor) -> Tensor:
    """Return the index in the pack of each token of a sequence, [T]; several sequences may have the same one."""
    begins = (0, *accumulate(lengths))
    last = {segment.sequence: number for number, segment in enumerate(segments)}  # the segment after a shared prompt
    own = [(begins[last[k]], segments[last[k]]) for k in range(len(last))]
    starts = [(segment.start, begin - segment.start, begins[segment.prompt or 0]) for begin, segment in own]
    start_b, own_b, prompt_b = torch.tensor(starts).T
    is_own_T = position_T >= start_b[sequence_T]
    return torch.where(is_own_T, own_b[sequence_T], prompt_b[sequence_T]) + position_T


def _owners(segments: Sequence[Segment], counted_b: Tensor) -> Tensor:
    """Return the sequences to which the tokens of each segment count, [n + 1, b] bool; the last row is that of padding."""
    owners_nb = torch.zeros(len(segments) + 1, len(counted_b), dtype=torch.bool)
    for number, segment in enumerate(segments):
        owners_nb[number, segment.sequence] = True
        if segment.prompt is not None:
            owners_nb[segment.prompt, segment.sequence] = True
    return owners_nb & counted_b


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Input of one pass through the pipeline.

    The last stage reads only the indices, so it does not depend on the arrangement of sequences in ``tokens_bs``: padded,
    packed into one ([1, s]) with or without shared prompts, or this rank's part of each.
    """

    sequence_index_b: Tensor  # indices of the sequences in the batch
    tokens_bs: Tensor
    positions_bs: Tensor
    # Sequences to which a token counts in a loss that the model itself adds (load balancing): each token has a row of
    # ``owners_nb``, -1 for padding; the columns are the sequences, False for those that are excluded from the loss.
    segment_bs: Tensor
    owners_nb: Tensor
    hidden_index_T: Tensor  # hidden state that predicts each response token: an index into [s * b] (megatron-core's order)
    target_T: Tensor  # response token that the hidden state predicts
    logprob_T: Tensor  # log-prob it contributes to: an index into ``sequence_index_b``, plus b for a second log-prob
    weight_T: Tensor | None  # factor of each token's log-prob in that of its response; None for 1
    num_logprobs: int  # b, or 2 b if sequences have a second log-prob
    lengths: tuple[int, ...] | None = None  # of the whole segments of a pack, each with its padding; None if not packed
    prompts: Prompts = None  # segment that each segment continues; None if no tokens are shared
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
            segment_bs=self.segment_bs[:, index_s],
            hidden_index_T=(local_index_T * batch + sequence_T)[is_local_T],
            target_T=self.target_T[is_local_T],
            logprob_T=self.logprob_T[is_local_T],
            weight_T=None if self.weight_T is None else self.weight_T[is_local_T],
        )

    @classmethod
    def on_device(cls, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Copy micro-batches to this rank's device, in one transfer per dtype; the host need not wait between them."""
        from nemo_kto.layers.attention import PackedSequences

        names = [each.name for each in fields(cls) if each.name not in ("num_logprobs", "lengths", "prompts", "packed")]
        uploaded = iter(device.upload([getattr(micro_batch, name) for micro_batch in micro_batches for name in names]))
        packs = [(part.lengths, part.prompts) for part in micro_batches if part.lengths is not None]
        packed = iter(PackedSequences.of([lengths for lengths, _ in packs], [prompts for _, prompts in packs]))
        return [
            replace(part, packed=None if part.lengths is None else next(packed), **{name: next(uploaded) for name in names})
            for part in micro_batches
        ]
