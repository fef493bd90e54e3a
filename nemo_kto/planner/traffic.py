"""What the ranks of a layout tell each other in a step: messages and bytes, in closed form.

A ring of k ranks sends 2 n (k - 1) / k bytes for an all-reduce of n bytes, and half of it for each of its halves, an
all-gather or a reduce-scatter. A message is a collective, or a tensor that is sent on. tests/distributed/test_traffic.py
counts both on real ranks. Left out is what does not grow with the model or the batch: sums of metrics, and answers that
ranks agree on; and with DoRA and dropout the products W dropout(x).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from nemo_kto.architecture.families import Split
from nemo_kto.architecture.lora import adapted_mappings
from nemo_kto.architecture.segments import split_dimension
from nemo_kto.models.flops import ATTENTION, EXPERTS, Block
from nemo_kto.planner.memory import Training

_FP32, _FP64, _INT64 = 4, 8, 8
_SHAPE = 3 * 8  # three integers tell the next stage how large a hidden state is


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step asks of the model.

    Attributes:
        rows: sequences of the global batch that go forward and backward.
        width: tokens of each.
        answer: tokens of each whose log-prob is wanted; None for all but the first.
        forward_only: forward passes without gradient over as many sequences: KL examples, a loss that looks ahead, and a
            reference that is evaluated.
        disabled: of these, passes of a reference that is the model with its adapters disabled.
    """

    rows: int
    width: int
    answer: int | None = None
    forward_only: int
    disabled: int = 0

    @property
    def tokens(self) -> int:
        """That are trained on."""
        return self.rows * self.width

    @property
    def answers(self) -> int:
        """Tokens whose log-prob is wanted."""
        return self.rows * (self.width - 1 if self.answer is None else self.answer)


class Sent(NamedTuple):
    """By one rank in a step."""

    messages: float
    bytes: float


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a rank sends to its tensor-, pipeline- and context-parallel group, to those with the same weights, to experts."""

    tensor: Sent
    pipeline: Sent
    context: Sent
    data: Sent
    expert: Sent

    @property
    def bytes(self) -> float:
        """All of it."""
        return sum(each.bytes for each in (self.tensor, self.pipeline, self.context, self.data, self.expert))


def step_traffic(training: Training, step: Step, *, stage: int) -> Traffic:
    """Of a rank of a pipeline stage."""
    return Traffic(
        tensor=_sum(_tensor(training, step, stage)) if training.tensor_parallel > 1 else Sent(0, 0.0),
        pipeline=_sum(_pipeline(training, step, stage)) if training.split.stages > 1 else Sent(0, 0.0),
        context=_sum(_context(training, step, stage)) if training.context_parallel > 1 else Sent(0, 0.0),
        data=_sum(_data(training, stage)) if training.replicas > 1 else Sent(0, 0.0),
        expert=_sum(_expert(training, step, stage)) if training.expert_ranks > 1 else Sent(0, 0.0),
    )


def _sum(parts: Iterator[Sent]) -> Sent:
    messages, sent = zip(Sent(0, 0.0), *parts, strict=True)
    return Sent(sum(messages), sum(sent))


def _tensor(training: Training, step: Step, stage: int) -> Iterator[Sent]:
    """An all-reduce for attention and one for an MLP or a shared expert, forward and backward; sequence parallelism makes
    two messages of each, of the same bytes."""
    ranks, micro_batches = training.tensor_parallel, _micro_batches(training)
    blocks = [block for block in training.blocks[stage] if block.name != EXPERTS]  # which have ranks of their own
    hidden = step.tokens / training.replicas * training.architecture.hidden_size * training.element_bytes
    half, shards, trained = (ranks - 1) / ranks, training.sequence_parallel, training.adapters is None
    forwards = 1 + step.forward_only
    times = 2 * sum(forwards + _again(training, block) for block in blocks)  # halves of an all-reduce
    times += sum(block.enters + (block.inside if shards else block.enters) for block in blocks)
    yield Sent(times / (1 if shards else 2) * micro_batches, times * half * hidden)
    if shards and trained:  # inputs of layers are gathered again for the gradients of their weights
        yield Sent(micro_batches * len(blocks), len(blocks) * half * hidden)
    if stage == 0:  # rows of the embedding, which one rank has each
        yield Sent(forwards * micro_batches, forwards * half * hidden * (1 if shards else 2))
        if shards and trained:
            yield Sent(micro_batches, half * hidden)
    if stage == training.split.stages - 1:
        answers = step.answers / training.replicas
        yield Sent(
            2 * forwards * micro_batches, 2 * half * forwards * answers * 3 * _FP32
        )  # maximum, sum and target's logit
        whole = 2 * half * answers * training.architecture.hidden_size * _FP32
        yield Sent(micro_batches, half * hidden if shards else whole)  # the gradient of the hidden states
        if shards:
            yield Sent(forwards * micro_batches, forwards * half * hidden)
    if shards:  # each rank has the gradient of its part of the sequence
        held = sum(each.numel for each in training.parameters[stage] if each.trained and each.is_replicated)
        yield Sent(held > 0, 2 * half * held * _FP32)
    yield from _adapters(training, step, stage)


def _adapters(training: Training, step: Step, stage: int) -> Iterator[Sent]:
    """A x of each adapter, as wide as its rank, times the parts of a layer that reads the input for several.

    Of a column-parallel layer the gradient of A x is summed over the ranks, of a row-parallel layer and of an embedding A x
    itself; sequence parallelism scatters or gathers the one and does the reverse with the other. Of a row of DoRA's, the
    squares of W and of the sum with the adapter, once for all micro-batches. Whole experts have all of their tokens.
    """
    if training.adapters is None:
        return
    ranks, micro_batches = training.tensor_parallel, _micro_batches(training)
    half, shards = (ranks - 1) / ranks, training.sequence_parallel
    width = step.tokens / training.replicas * training.adapters.rank * training.element_bytes
    forwards = 1 + step.forward_only - step.disabled
    adapted = [(mapping, _again(training, block)) for block in training.blocks[stage] for mapping in block.adapted]
    if stage == 0:
        of_model = adapted_mappings(training.architecture, training.adapters)
        adapted += [(mapping, 0) for mapping in of_model if mapping.split is Split.VOCABULARY]
    for mapping, again in adapted:
        if mapping.of_expert:
            continue
        by_columns = split_dimension(mapping) == 0 and mapping.split is not Split.VOCABULARY
        parts = len(mapping.hf_names) if by_columns else 1
        if shards:
            times = forwards + again + 1
        else:
            times = 1 if by_columns else forwards + again
        yield Sent(times * micro_batches, times * (1 if shards else 2) * half * parts * width)
        if training.adapters.dora and not by_columns:
            yield Sent(2 * forwards, 2 * forwards * 2 * half * training.architecture.hidden_size * _FP32)


def _pipeline(training: Training, step: Step, stage: int) -> Iterator[Sent]:
    """Hidden states to the next stage, and their gradients back; the gradient of an embedding that two stages have."""
    split, shards = training.split, training.tensor_parallel if training.sequence_parallel else 1
    hidden = step.tokens / training.replicas * training.architecture.hidden_size * training.element_bytes / shards
    for passes, is_end in ((1 + step.forward_only, stage == split.stages - 1), (1, stage == 0)):
        times = passes * (split.chunks - is_end)  # the last chunk sends nothing on, and the first nothing back
        yield Sent(2 * times * _micro_batches(training), times * (hidden + _micro_batches(training) * _SHAPE))
    if _shares_embedding(training, stage):
        rows = training.architecture.padded_vocab_size / training.tensor_parallel
        yield Sent(1, rows * training.architecture.hidden_size * _FP32)


def _context(training: Training, step: Step, stage: int) -> Iterator[Sent]:
    """Keys and values of a rank's tokens to each of the others, and the gradient that they have of them.

    Transformer Engine sends them around a ring, and once more in the backward pass; otherwise they are gathered and kept.
    """
    architecture, others = training.architecture, training.context_parallel - 1
    groups = max(1, architecture.padded_query_groups // training.tensor_parallel)
    tokens = step.tokens / training.replicas
    each = 2 * groups * architecture.head_dim * training.element_bytes * tokens * others
    again = 1 if training.recompute == "full" or "core_attn" in training.recomputed else 0
    attentions = [block for block in training.blocks[stage] if block.name == ATTENTION]
    passes = (1 + step.forward_only + again) * len(attentions)
    passes += sum(block.inside for block in attentions) * (2 if training.on_gpu else 1)
    messages = others if training.on_gpu else 1
    yield Sent(passes * messages * _micro_batches(training), passes * each)
    if stage == training.split.stages - 1:  # the log-probs of the sequences, which each rank has a part of
        sums = 2 * others / (others + 1) * step.rows / training.data_parallel * _FP64
        yield Sent((1 + step.forward_only) * _micro_batches(training), (1 + step.forward_only) * sums)


def _data(training: Training, stage: int) -> Iterator[Sent]:
    """Gradients in fp32, and what comes back: the weights, or the gradients again where each rank updates all of them.

    Those of experts go to fewer ranks, in messages of their own. Experts have an optimizer of their own too, and after each
    of the two all weights come back, unless they do so while the next step computes, as on GPUs.
    """
    trained = [each for each in training.parameters[stage] if each.trained]
    kinds = {each.of_expert for each in trained}
    gathers = 1 if training.on_gpu else len(kinds)
    for of_expert in kinds:
        sent = sum(each.numel * (1 - 1 / training.copies(each)) for each in trained if each.of_expert == of_expert)
        buckets = 1 + (
            _shares_embedding(training, stage) and not of_expert
        )  # where nothing is sent while gradients are made
        yield Sent(buckets * (sent > 0), sent * _FP32)
        back = training.element_bytes if training.distributed_optimizer else _FP32
        times = gathers if training.distributed_optimizer else 1
        yield Sent(buckets * (sent > 0) * training.distributed_optimizer * times, sent * back * times)


def _expert(training: Training, step: Step, stage: int) -> Iterator[Sent]:
    """Tokens and their weights to experts of other ranks, and what comes back, in each pass; they choose all alike.

    Ranks that share an expert gather the tokens that came to each of them, and add up what they make of these.
    """
    architecture, experts = training.architecture, training.architecture.experts
    assert experts is not None, "only a mixture shares out experts"
    blocks, micro_batches = [block for block in training.blocks[stage] if block.name == EXPERTS], _micro_batches(training)
    forwards = sum(1 + step.forward_only + _again(training, block) for block in blocks)
    gone, back = forwards + sum(block.enters for block in blocks), forwards + sum(block.leaves for block in blocks)
    choices = experts.per_token * step.tokens / training.replicas / training.tensor_parallel
    hidden = architecture.hidden_size * training.element_bytes
    for elsewhere in (1 - 1 / training.expert_parallel, architecture.expert_tensor_parallel - 1):
        messages = (2 * gone + back) * micro_batches * (elsewhere > 0)
        yield Sent(messages, (gone * (hidden + _FP32) + back * hidden) * choices * elsewhere)
    counts = forwards * micro_batches  # how many tokens each rank has for each expert
    yield Sent(counts, counts * _INT64 * experts.number * (training.expert_ranks - 1))


def _again(training: Training, block: Block) -> int:
    """Forward passes of a block that are made once more for the backward pass."""
    return int(training.recompute == "full" or ("mlp" in training.recomputed and block.name != ATTENTION))


def _shares_embedding(training: Training, stage: int) -> bool:
    """The first and the last stage have a copy each of an embedding that is the output layer too; it has its own bucket."""
    ends = (0, training.split.stages - 1)
    return training.architecture.tied and training.adapters is None and stage in ends and len(set(ends)) == 2


def _micro_batches(training: Training) -> int:
    """That the schedule gets for each rank."""
    return training.split.micro_batches(training.micro_batches)
