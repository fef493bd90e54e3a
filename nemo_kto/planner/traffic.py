"""Communication of each rank in a step, in closed form: number of messages and bytes.

In a ring of k ranks each rank sends 2 n (k - 1) / k bytes for an all-reduce of n bytes, and half of that for each of its
halves, an all-gather or a reduce-scatter. A message is a collective, or a tensor that is sent to the next stage.
tests/distributed/planner/test_traffic.py counts both on real ranks. Not counted is communication that does not grow with
the model or the batch (sums of metrics, flags that ranks agree on), and with DoRA and dropout the products W dropout(x).
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


@dataclass(frozen=True, kw_only=True)
class Step:
    """Passes through the model in a step."""

    rows: int  # sequences of the global batch, each with a forward and a backward pass
    width: int  # tokens per sequence
    answer: int | None = None  # tokens per sequence whose log-prob is computed; None for all but the first
    # Forward passes without gradient, each over ``rows`` sequences: for KL examples, for a loss that looks ahead, and for a
    # reference that is evaluated.
    forward_only: int
    disabled: int = 0  # of these, passes of a reference that is the model with adapters disabled
    # Fractions of the tokens and of the FLOPs of separate sequences that are computed: below 1 if answers share prompts.
    computed_tokens: float = 1.0
    computed_flops: float = 1.0

    @property
    def tokens(self) -> int:
        """Number of tokens that are trained on."""
        return self.rows * self.width

    @property
    def computed(self) -> float:
        """Number of tokens of a pass, on average over the passes of a step."""
        return self.tokens * self.computed_tokens

    @property
    def answers(self) -> int:
        """Number of tokens whose log-prob is computed."""
        return self.rows * (self.width - 1 if self.answer is None else self.answer)


class Sent(NamedTuple):
    """Number of messages and bytes that one rank sends in a step."""

    messages: float
    bytes: float


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Communication of one rank in a step, by process group."""

    tensor: Sent
    pipeline: Sent
    context: Sent
    data: Sent  # between ranks that hold the same weights; with several optimizer instances, within an instance
    instances: Sent  # between optimizer instances
    expert: Sent  # tokens for experts on other ranks

    @property
    def bytes(self) -> float:
        """Total number of bytes."""
        parts = (self.tensor, self.pipeline, self.context, self.data, self.instances, self.expert)
        return sum(each.bytes for each in parts)


def step_traffic(training: Training, step: Step, *, stage: int) -> Traffic:
    """Return the communication of a rank of a pipeline stage."""
    return Traffic(
        tensor=_sum(_tensor(training, step, stage)) if training.tensor_parallel > 1 else Sent(0, 0.0),
        pipeline=_sum(_pipeline(training, step, stage)) if training.split.stages > 1 else Sent(0, 0.0),
        context=_sum(_context(training, step, stage)) if training.context_parallel > 1 else Sent(0, 0.0),
        data=_sum(_data(training, stage)) if training.replicas > 1 else Sent(0, 0.0),
        instances=_sum(_instances(training, stage)) if training.optimizer_instances > 1 else Sent(0, 0.0),
        expert=_sum(_expert(training, step, stage)) if training.expert_ranks > 1 else Sent(0, 0.0),
    )


def _sum(parts: Iterator[Sent]) -> Sent:
    messages, sent = zip(Sent(0, 0.0), *parts, strict=True)
    return Sent(sum(messages), sum(sent))


def _tensor(training: Training, step: Step, stage: int) -> Iterator[Sent]:
    """Yield the communication in the tensor-parallel group.

    Attention and an MLP or a shared expert each need one all-reduce, forward and backward. Sequence parallelism replaces
    each all-reduce by two messages with the same number of bytes in total.
    """
    ranks, micro_batches = training.tensor_parallel, _micro_batches(training)
    blocks = [block for block in training.blocks[stage] if block.name != EXPERTS]  # experts have separate process groups
    hidden = step.computed / training.replicas * training.architecture.hidden_size * training.element_bytes
    half, shards, trained = (ranks - 1) / ranks, training.sequence_parallel, training.adapters is None
    forwards = 1 + step.forward_only
    times = 2 * sum(forwards + _again(training, block) for block in blocks)  # halves of an all-reduce
    times += sum(block.enters + (block.inside if shards else block.enters) for block in blocks)
    yield Sent(times / (1 if shards else 2) * micro_batches, times * half * hidden)
    if shards and trained:  # the inputs of layers are gathered again to compute the gradients of their weights
        yield Sent(micro_batches * len(blocks), len(blocks) * half * hidden)
    if stage == 0:  # rows of the embedding, each of which is on one rank only
        yield Sent(forwards * micro_batches, forwards * half * hidden * (1 if shards else 2))
        if shards and trained:
            yield Sent(micro_batches, half * hidden)
    if stage == training.split.stages - 1:
        answers = step.answers / training.replicas
        # maximum, sum and target's logit
        yield Sent(2 * forwards * micro_batches, 2 * half * forwards * answers * 3 * _FP32)
        whole = 2 * half * answers * training.architecture.hidden_size * _FP32
        yield Sent(micro_batches, half * hidden if shards else whole)  # the gradient of the hidden states
        if shards:
            yield Sent(forwards * micro_batches, forwards * half * hidden)
    if shards:  # gradients of replicated weights: each rank has those of its part of the sequence
        replicated = sum(each.numel for each in training.parameters[stage] if each.trained and each.is_replicated)
        yield Sent(replicated > 0, 2 * half * replicated * _FP32)
    yield from _adapters(training, step, stage)


def _adapters(training: Training, step: Step, stage: int) -> Iterator[Sent]:
    """Yield the communication of adapters in the tensor-parallel group.

    The tensor is A x of each adapter, whose width is the adapter's rank, times the number of parts of a fused layer. For a
    column-parallel layer the gradient of A x is summed over the ranks; for a row-parallel layer and for an embedding A x
    itself is. Sequence parallelism gathers or scatters the tensor in the forward pass and does the reverse with its
    gradient. With DoRA, row-parallel layers also sum the squares of W and of W plus adapter for each row, once for all
    micro-batches. Adapters of experts are skipped: adapted experts are whole on their rank, which has all of their tokens.
    """
    if training.adapters is None:
        return
    ranks, micro_batches = training.tensor_parallel, _micro_batches(training)
    half, shards = (ranks - 1) / ranks, training.sequence_parallel
    width = step.computed / training.replicas * training.adapters.rank * training.element_bytes
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
    """Yield the communication between pipeline stages: hidden states to the next, their gradients to the previous one.

    If the first and the last stage both hold the embedding, they sum its gradient.
    """
    split, shards = training.split, training.tensor_parallel if training.sequence_parallel else 1
    hidden = step.computed / training.replicas * training.architecture.hidden_size * training.element_bytes / shards
    for passes, is_end in ((1 + step.forward_only, stage == split.stages - 1), (1, stage == 0)):
        times = passes * (split.chunks - is_end)  # the last chunk sends no hidden states, and the first no gradients
        yield Sent(times * _micro_batches(training), times * hidden)
    if _shares_embedding(training, stage):
        rows = training.architecture.padded_vocab_size / training.tensor_parallel
        yield Sent(1, rows * training.architecture.hidden_size * _FP32)


def _context(training: Training, step: Step, stage: int) -> Iterator[Sent]:
    """Yield the communication in the context-parallel group.

    Each rank sends the keys and values of its tokens to the others, which send back their gradients. Transformer Engine
    sends keys and values around a ring, and again in the backward pass; without it they are gathered once and kept.
    """
    architecture, others = training.architecture, training.context_parallel - 1
    groups = max(1, architecture.padded_query_groups // training.tensor_parallel)
    tokens = step.computed / training.replicas
    each = 2 * groups * architecture.head_dim * training.element_bytes * tokens * others
    again = 1 if training.recompute == "full" or "core_attn" in training.recomputed else 0
    attentions = [block for block in training.blocks[stage] if block.name == ATTENTION]
    passes = (1 + step.forward_only + again) * len(attentions)
    passes += sum(block.inside for block in attentions) * (2 if training.on_gpu else 1)
    messages = others if training.on_gpu else 1
    yield Sent(passes * messages * _micro_batches(training), passes * each)
    if stage == training.split.stages - 1:  # sums of the sequence log-probs, of which each rank has a part
        sums = 2 * others / (others + 1) * step.rows / training.data_parallel * _FP64
        yield Sent((1 + step.forward_only) * _micro_batches(training), (1 + step.forward_only) * sums)


def _data(training: Training, stage: int) -> Iterator[Sent]:
    """Yield the communication between ranks that hold the same weights.

    Gradients are reduced in fp32. Then the updated weights are gathered, or, without the distributed optimizer, the
    gradients themselves, because each rank updates all weights. Gradients of experts go to fewer ranks, in separate
    messages. Experts also have a separate optimizer, and after the step of each of the two optimizers all weights are
    gathered, unless the gathers overlap with the next step, as on GPUs.
    """
    trained = [each for each in training.parameters[stage] if each.trained]
    kinds = {each.of_expert for each in trained}
    gathers = 1 if training.on_gpu else len(kinds)
    for of_expert in kinds:
        instances = training.optimizer_instances
        sent = sum(each.numel * (1 - instances / training.copies(each)) for each in trained if each.of_expert == of_expert)
        buckets = _buckets(training, stage, of_expert=of_expert)
        yield Sent(buckets * (sent > 0), sent * _FP32)
        back = training.element_bytes if training.distributed_optimizer else _FP32
        times = gathers if training.distributed_optimizer else 1
        yield Sent(buckets * (sent > 0) * training.distributed_optimizer * times, sent * back * times)


def _instances(training: Training, stage: int) -> Iterator[Sent]:
    """Yield the communication between optimizer instances: each rank's slices of the gradients are summed over them."""
    trained, instances = [each for each in training.parameters[stage] if each.trained], training.optimizer_instances
    for of_expert in {each.of_expert for each in trained}:
        share = training.share(each for each in trained if each.of_expert == of_expert)
        yield Sent(_buckets(training, stage, of_expert=of_expert), 2 * (1 - 1 / instances) * share * _FP32)


def _buckets(training: Training, stage: int, *, of_expert: bool) -> int:
    # one bucket if communication does not overlap the backward pass, and one for an embedding on two stages
    return 1 + (_shares_embedding(training, stage) and not of_expert)


def _expert(training: Training, step: Step, stage: int) -> Iterator[Sent]:
    """Yield the communication of expert parallelism.

    In each pass tokens and their router probabilities are sent to experts on other ranks, and the outputs are sent back.
    Tokens are assumed to choose all experts equally often. Ranks that share an expert by tensor parallelism gather the
    tokens that each of them received, and sum their outputs.
    """
    architecture, experts = training.architecture, training.architecture.experts
    assert experts is not None, "only a mixture-of-experts model has experts"
    blocks, micro_batches = [block for block in training.blocks[stage] if block.name == EXPERTS], _micro_batches(training)
    forwards = sum(1 + step.forward_only + _again(training, block) for block in blocks)
    gone, back = forwards + sum(block.enters for block in blocks), forwards + sum(block.leaves for block in blocks)
    choices = experts.per_token * step.computed / training.replicas / training.tensor_parallel
    hidden = architecture.hidden_size * training.element_bytes
    for elsewhere in (1 - 1 / training.expert_parallel, architecture.expert_tensor_parallel - 1):
        messages = (2 * gone + back) * micro_batches * (elsewhere > 0)
        yield Sent(messages, (gone * (hidden + _FP32) + back * hidden) * choices * elsewhere)
    counts = forwards * micro_batches  # messages with the number of tokens that each rank has for each expert
    yield Sent(counts, counts * _INT64 * experts.number * (training.expert_ranks - 1))


def _again(training: Training, block: Block) -> int:
    return int(training.recompute == "full" or ("mlp" in training.recomputed and block.name != ATTENTION))


def _shares_embedding(training: Training, stage: int) -> bool:
    """Return whether this stage is one of two that each hold a copy of a trained, tied embedding, in a separate bucket."""
    ends = (0, training.split.stages - 1)
    return training.architecture.tied and training.adapters is None and stage in ends and len(set(ends)) == 2


def _micro_batches(training: Training) -> int:
    """Return the number of micro-batches that the schedule runs on each rank, including empty ones."""
    return training.split.micro_batches(training.micro_batches)
