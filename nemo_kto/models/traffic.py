"""What the ranks of a layout tell each other in a step: messages and bytes, in closed form.

A ring of k ranks sends 2 n (k - 1) / k bytes for an all-reduce of n bytes, and half of it for each of its halves, an
all-gather or a reduce-scatter. A message is a collective, or a tensor that is sent on. tests/distributed/test_traffic.py
counts both on real ranks. Left out is what does not grow with the model or the batch: sums of metrics, and answers that
ranks agree on; and what adapters send, which is as much narrower than hidden states as their rank is: A x, and of DoRA two
norms of each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from nemo_kto.models.memory import Training

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
    """

    rows: int
    width: int
    answer: int | None = None
    forward_only: int

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
    messages, sent = zip(*parts, strict=True)
    return Sent(sum(messages), sum(sent))


def _tensor(training: Training, step: Step, stage: int) -> Iterator[Sent]:
    """An all-reduce for attention and one for an MLP or a shared expert, forward and backward; sequence parallelism makes
    two messages of each, of the same bytes."""
    ranks, micro_batches = training.tensor_parallel, _micro_batches(training)
    layers, mlps = _layers(training, stage), _mlps(training, stage)
    hidden = step.tokens / training.replicas * training.architecture.hidden_size * training.element_bytes
    half, shards, trained = (ranks - 1) / ranks, training.sequence_parallel, training.adapters is None
    parts, forwards = layers + mlps, 1 + step.forward_only  # attention and MLP send alike
    again = parts if training.recompute == "full" else mlps * ("mlp" in training.recomputed)
    times = (forwards + 1) * parts + again
    yield Sent(times * micro_batches * (2 if shards else 1), times * 2 * half * hidden)
    if shards and trained:  # inputs of layers are gathered again for the gradients of their weights
        yield Sent(micro_batches * parts, parts * half * hidden)
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
    if shards and trained:
        replicated = ("norm", "router", "gate_weight", "linear_proj.bias", "mlp.linear_fc2.bias")
        held = [each.numel for each in training.parameters(stage) if any(name in each.name for name in replicated)]
        yield Sent(1, 2 * half * sum(held) * _FP32)


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
    layers, each = _layers(training, stage), 2 * groups * architecture.head_dim * training.element_bytes * tokens * others
    again = 1.0 if training.recompute == "full" or "core_attn" in training.recomputed else 0.0
    passes = 1 + step.forward_only + again + (2 if training.on_gpu else 1)
    messages = others if training.on_gpu else 1
    yield Sent(passes * messages * layers * _micro_batches(training), passes * layers * each)
    if stage == training.split.stages - 1:  # the log-probs of the sequences, which each rank has a part of
        sums = 2 * others / (others + 1) * step.rows / training.data_parallel * _FP64
        yield Sent((1 + step.forward_only) * _micro_batches(training), (1 + step.forward_only) * sums)


def _data(training: Training, stage: int) -> Iterator[Sent]:
    """Gradients in fp32, and what comes back: the weights, or the gradients again where each rank updates all of them.

    Those of experts go to fewer ranks, in messages of their own. Experts have an optimizer of their own too, and after each
    of the two all weights come back, unless they do so while the next step computes, as on GPUs.
    """
    gathers = 2 if training.architecture.experts is not None and not training.on_gpu else 1
    trained = [each for each in training.parameters(stage) if each.trained]
    for of_expert in {each.of_expert for each in trained}:
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
    layers = sum(_sparse_layers(training, stage))
    again = 1 if training.recompute == "full" or "mlp" in training.recomputed else 0
    forwards = 1 + step.forward_only + again
    choices = experts.per_token * step.tokens / training.replicas / training.tensor_parallel
    each = 2 * architecture.hidden_size * training.element_bytes + _FP32
    for elsewhere in (1 - 1 / training.expert_parallel, architecture.expert_tensor_parallel - 1):
        messages = 3 * (forwards + 1) * layers * _micro_batches(training) * (elsewhere > 0)
        yield Sent(messages, (forwards + 1) * layers * choices * elsewhere * each)
    counts = forwards * layers * _micro_batches(training)  # how many tokens each rank has for each expert
    yield Sent(counts, counts * _INT64 * experts.number * (training.expert_ranks - 1))


def _mlps(training: Training, stage: int) -> int:
    """Layers of a stage with an MLP that the tensor-parallel ranks share; experts have their own."""
    experts, sparse = training.architecture.experts, _sparse_layers(training, stage)
    return len(sparse) if experts is not None and experts.shared_ffn_hidden_size else sparse.count(False)


def _sparse_layers(training: Training, stage: int) -> list[bool]:
    """Whether each layer of a stage has experts."""
    held = training.split.layers(training.architecture.num_layers)[stage]
    return [training.architecture.sparse_layers[layer] for chunk in held for layer in chunk]


def _shares_embedding(training: Training, stage: int) -> bool:
    """The first and the last stage have a copy each of an embedding that is the output layer too; it has its own bucket."""
    ends = (0, training.split.stages - 1)
    return training.architecture.tied and training.adapters is None and stage in ends and len(set(ends)) == 2


def _layers(training: Training, stage: int) -> int:
    return training.split.stage_sizes(training.architecture.num_layers)[stage]


def _micro_batches(training: Training) -> int:
    """That the schedule gets for each rank."""
    return training.split.micro_batches(training.micro_batches)
