"""Estimate of the time of a step from its FLOPs, its communication and the pipeline bubble.

Communication is assumed not to overlap with computation. Not included are reading data, the optimizer update, swaps of the
reference, validation and checkpoints. tests/unit/tools/plan/test_published.py compares the estimates with published figures.

The bytes that each rank sends have a closed form. In a ring of k ranks each rank sends 2 n (k - 1) / k bytes for an
all-reduce of n bytes, and half of that for each of its halves, an all-gather or a reduce-scatter.
tests/distributed/memory/test_traffic.py counts the bytes on real ranks. Not counted is communication that does not grow
with the model or the batch (sums of metrics, flags that ranks agree on), and with DoRA and dropout the products
W dropout(x).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from nemo_kto.architecture.lora import adapted_mappings
from nemo_kto.architecture.segments import split_dimension
from nemo_kto.memory.hardware import GPUS_PER_MACHINE, Hardware
from nemo_kto.memory.micro_batches import FORWARD_LAUNCHES
from nemo_kto.memory.rank_memory import Training
from nemo_kto.memory.run_plan import Plan, Step
from nemo_kto.mixers.param_mapping import Split
from nemo_kto.models.flops import EXPERTS, MIXER, Block, Flops, Passes

_FP32, _FP64, _INT64 = 4, 8, 8


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one rank sends in a step, by process group."""

    tensor: float
    pipeline: float
    context: float
    data: float  # between ranks that hold the same weights; with several optimizer instances, within an instance
    instances: float  # between optimizer instances
    expert: float  # tokens for experts on other ranks

    @property
    def total(self) -> float:
        """Sum over the groups."""
        return sum(getattr(self, field.name) for field in fields(self))


def step_traffic(training: Training, step: Step, *, stage: int) -> Traffic:
    """Return the bytes that a rank of a pipeline stage sends."""
    instances = 0.0  # each rank's slices of the gradients are summed over the optimizer instances
    if training.optimizer_instances > 1:
        share = training.share(training.parameters[stage])
        instances = 2 * (1 - 1 / training.optimizer_instances) * share * training.gradient_bytes
    return Traffic(
        tensor=_tensor(training, step, stage) if training.tensor_parallel > 1 else 0.0,
        pipeline=_pipeline(training, step, stage) if training.split.stages > 1 else 0.0,
        context=_context(training, step, stage) if training.context_parallel > 1 else 0.0,
        data=_data(training, stage) if training.replicas > 1 else 0.0,
        instances=instances,
        expert=_expert(training, step, stage) if training.expert_ranks > 1 else 0.0,
    )


def _tensor(training: Training, step: Step, stage: int) -> float:
    """Return the bytes sent in the tensor-parallel group.

    Attention and an MLP or a shared expert each need one all-reduce, forward and backward. Sequence parallelism replaces
    each all-reduce by its two halves.
    """
    width, shards, trained = training.architecture.hidden_size, training.sequence_parallel, training.adapters is None
    blocks = [block for block in training.blocks[stage] if block.name != EXPERTS]  # experts have separate process groups
    hidden = step.computed / training.replicas * width * training.element_bytes
    forwards = 1 + step.forward_only
    halves = 2 * sum(forwards + _again(training, block) for block in blocks)  # of all-reduces of the hidden states
    halves += sum(block.enters + (block.inside if shards else block.enters) for block in blocks)
    if shards and trained:  # the inputs of layers are gathered again to compute the gradients of their weights
        halves += len(blocks) + (stage == 0)
    if stage == 0:  # rows of the embedding, each of which is on one rank only
        halves += forwards * (1 if shards else 2)
    others = 0.0  # bytes of halves of other all-reduces
    if stage == training.split.stages - 1:
        answers = step.answers / training.replicas
        others += 2 * forwards * answers * 3 * _FP32  # maximum, sum and target's logit
        if shards:  # the hidden states and their gradient
            halves += forwards + 1
        else:
            others += 2 * answers * width * _FP32
    if shards:  # gradients of replicated weights: each rank has those of its part of the sequence
        replicated = sum(each.total for each in training.parameters[stage] if each.trained and each.is_replicated)
        others += 2 * training.gradient_bytes * replicated
    others += _adapters(training, step, stage)
    return (halves * hidden + others) * (training.tensor_parallel - 1) / training.tensor_parallel


def _adapters(training: Training, step: Step, stage: int) -> float:
    """Return the bytes of halves of all-reduces for adapters in the tensor-parallel group.

    The tensor is A x of each adapter, whose width is the adapter's rank, times the number of parts of a fused layer. For a
    column-parallel layer the gradient of A x is summed over the ranks; for a row-parallel layer and for an embedding A x
    itself is. Sequence parallelism gathers or scatters the tensor in the forward pass and does the reverse with its
    gradient. With DoRA, row-parallel layers also sum the squares of W and of W plus adapter for each row, once for all
    micro-batches. Adapters of experts are skipped: adapted experts are whole on their rank, which has all of their tokens.
    """
    if training.adapters is None:
        return 0.0
    width = step.computed / training.replicas * training.adapters.rank * training.element_bytes
    forwards, sent = 1 + step.forward_only - step.disabled, 0.0
    adapted = [(mapping, _again(training, block)) for block in training.blocks[stage] for mapping in block.adapted]
    if stage == 0:
        of_model = adapted_mappings(training.architecture, training.adapters)
        adapted += [(mapping, 0) for mapping in of_model if mapping.split is Split.VOCABULARY]
    for mapping, again in adapted:
        if mapping.of_expert:
            continue
        by_columns = split_dimension(mapping) == 0 and mapping.split is not Split.VOCABULARY
        parts = len(mapping.hf_names) if by_columns else 1
        if training.sequence_parallel:
            sent += (forwards + again + 1) * parts * width
        else:
            sent += 2 * (1 if by_columns else forwards + again) * parts * width
        if training.adapters.dora and not by_columns:
            sent += 2 * forwards * 2 * training.architecture.hidden_size * _FP32
    return sent


def _pipeline(training: Training, step: Step, stage: int) -> float:
    """Return the bytes sent between pipeline stages: hidden states to the next, their gradients to the previous one.

    If the first and the last stage both hold the embedding, they sum its gradient.
    """
    split, width = training.split, training.architecture.hidden_size
    shards = training.tensor_parallel if training.sequence_parallel else 1
    hidden = step.computed / training.replicas * width * training.element_bytes / shards
    # the last chunk sends no hidden states, and the first no gradients
    times = (1 + step.forward_only) * (split.chunks - (stage == split.stages - 1)) + split.chunks - (stage == 0)
    shares_embedding = training.architecture.tied and training.adapters is None and stage in (0, split.stages - 1)
    rows = training.architecture.padded_vocab_size / training.tensor_parallel if shares_embedding else 0
    return times * hidden + rows * width * training.gradient_bytes


def _context(training: Training, step: Step, stage: int) -> float:
    """Return the bytes sent in the context-parallel group.

    Each rank sends keys and values of its tokens, or what takes their place, to the others, which send back their gradients.
    Transformer Engine sends keys and values around a ring, and again in the backward pass; without it they are gathered
    once and kept.
    """
    architecture, others = training.architecture, training.context_parallel - 1
    again = 1 if training.recompute == "full" or "core_attn" in training.recomputed else 0
    back = 2 if training.on_gpu and not architecture.unsupported_by_te else 1
    values = sum(
        architecture.mixers[block.layer].context_values(architecture, training.context_parallel)
        * (1 + step.forward_only + again + back * block.inside)
        for block in training.blocks[stage]
        if block.name == MIXER
    )
    sums = 0.0
    if stage == training.split.stages - 1:  # of the sequence log-probs, of which each rank has a part
        sums = (1 + step.forward_only) * 2 * others / (others + 1) * step.rows / training.data_parallel * _FP64
    return values * training.element_bytes * step.computed / training.replicas + sums


def _data(training: Training, stage: int) -> float:
    """Return the bytes sent between ranks that hold the same weights.

    Gradients are reduced. Then the updated weights are gathered, or, without the distributed optimizer, the
    gradients themselves, because each rank updates all weights. Gradients of experts go to fewer ranks. Experts also have a
    separate optimizer, and after the step of each of the two optimizers all weights are gathered, unless the gathers overlap
    with the next step, as on GPUs.
    """
    trained = [each for each in training.parameters[stage] if each.trained]
    gathers = 1 if training.on_gpu else len({each.of_expert for each in trained})
    back = training.element_bytes * gathers if training.distributed_optimizer else training.gradient_bytes
    instances = training.optimizer_instances
    return sum(each.total * (1 - instances / training.copies(each)) for each in trained) * (training.gradient_bytes + back)


def _expert(training: Training, step: Step, stage: int) -> float:
    """Return the bytes sent for expert parallelism.

    In each pass tokens and their router probabilities are sent to experts on other ranks, and the outputs are sent back.
    Tokens are assumed to choose all experts equally often. Ranks that share an expert by tensor parallelism gather the
    tokens that each of them received, and sum their outputs.
    """
    architecture, experts = training.architecture, training.architecture.experts
    assert experts is not None, "only a mixture-of-experts model has experts"
    blocks = [block for block in training.blocks[stage] if block.name == EXPERTS]
    forwards = sum(1 + step.forward_only + _again(training, block) for block in blocks)
    gone, back = forwards + sum(block.enters for block in blocks), forwards + sum(block.leaves for block in blocks)
    choices = experts.per_token * step.computed / training.replicas / training.tensor_parallel
    hidden = architecture.hidden_size * training.element_bytes
    elsewhere = 1 - 1 / training.expert_parallel + architecture.expert_tensor_parallel - 1
    # the number of tokens that each rank has for each expert; the schedule also runs empty micro-batches
    counts = forwards * training.split.micro_batches(step.micro_batches) * experts.number * (training.expert_ranks - 1)
    return (gone * (hidden + _FP32) + back * hidden) * choices * elsewhere + counts * _INT64


def _again(training: Training, block: Block) -> int:
    """Return how often the forward pass of a block is computed again."""
    return int(training.recompute == "full" or ("mlp" in training.recomputed and block.name != MIXER))


# Fraction of its peak that a GPU reaches in large bf16 matrix products, without waiting for other ranks: Megatron-LM's own
# tables (Narayanan et al. 2021, arXiv 2104.04473, table 1) show 44 to 52 % with all waiting included.
EFFICIENCY = 0.5
# Fraction of its peak bandwidth that a link, and the memory of a GPU, reaches; assumptions.
LINK_EFFICIENCY, MEMORY_EFFICIENCY = 0.6, 0.85
# Bytes that the memory of a GPU moves for a dequantized value: codes as integers, values in fp32, their scaling, and bf16.
_DEQUANTIZED_BYTES = 22
# Seconds in which the host launches the kernels of a layer backward, and how many times longer all launches take with
# adapters; assumptions.
_BACKWARD_LAUNCHES, _ADAPTER_LAUNCHES = 3e-4, 2
# Tokens of an expert in a micro-batch with which its products are half as fast as large ones: fitted to the published
# figures of experts in tests/unit/tools/plan/test_published.py.
_SMALL_PRODUCT = 1024


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Estimated speed of a step."""

    flops: int  # of the unpadded model over the global batch, as counted by perf/mfu
    traffic: Traffic  # of a rank of the stage that sends the most bytes
    bubble: float  # fraction of the time in which a rank waits for the pipeline to fill and to drain
    seconds: float  # duration of the step


def speed_of(plan: Plan) -> Speed:
    """Estimate the speed of a step of a plan."""
    return step_speed(plan.training, plan.step, plan.machines.hardware)


def step_speed(training: Training, step: Step, hardware: Hardware) -> Speed:
    """Estimate the speed of a step; a pipeline is as fast as its slowest stage."""
    passes = Passes(forward=1 + step.forward_only - step.disabled, disabled=step.disabled, backward=1)
    operations = training.flops.of_passes(passes)
    sent = [step_traffic(training, step, stage=stage) for stage in range(training.split.stages)]
    flops = enumerate(zip(_stage_flops(training, step, operations, hardware), sent, strict=True))
    seconds = max(_stage_seconds(training, step, hardware, stage, of_stage, traffic) for stage, (of_stage, traffic) in flops)
    bubble = training.split.bubble(step.micro_batches)
    return Speed(
        flops=round(operations.of_sequences(step.rows, step.width) * step.computed_flops),  # without recomputation
        traffic=max(sent, key=lambda each: each.total),
        bubble=bubble,
        seconds=seconds / (1 - bubble),
    )


def _reached_flops(hardware: Hardware, element_bytes: int) -> float:
    """Return the expected FLOP/s for values of ``element_bytes`` bytes."""
    return hardware.flops[element_bytes] * (1.0 if hardware.measured else EFFICIENCY)


def _stage_flops(training: Training, step: Step, operations: Flops, hardware: Hardware) -> list[float]:
    """Return the FLOPs of each stage, on all its ranks; ``operations`` are those of all passes, without recomputation.

    In fp8 the linear layers count as the FLOPs that take as long in bf16. With experts they take as long as in bf16: their
    products are small, and tests/unit/tools/plan/test_published.py has figures of the same model in both.
    """
    forward = training.flops.forward
    again = 0.0  # recomputation: of all layers, of the MLPs, or of the products of the core attention
    if training.recompute == "full":
        again = step.rows * forward.of_tokens(step.width)
    if "mlp" in training.recomputed:
        again += step.tokens * forward.per_token_mlp
    if "core_attn" in training.recomputed:
        again += step.rows * forward.attention(step.width)
    of_layers = step.rows * operations.of_tokens(step.width) * step.computed_flops + again * step.computed_tokens
    if training.fp8 and training.architecture.experts is None and 1 in hardware.flops:
        linear = operations.per_token * step.computed_flops
        linear += forward.per_token * step.computed_tokens if training.recompute == "full" else 0
        of_layers -= step.tokens * linear * (1 - hardware.flops[2] / hardware.flops[1])
    sizes = training.split.stage_sizes(training.architecture.num_layers)
    of_stages = [of_layers * size / sum(sizes) for size in sizes]
    of_stages[-1] += operations.per_response_token * step.rows * (step.width - 1) * step.computed_flops  # log-probs
    return of_stages


def _stage_seconds(training: Training, step: Step, hardware: Hardware, stage: int, flops: float, traffic: Traffic) -> float:
    """Return the seconds of a rank of a stage without the bubble; ``flops`` are those of all ranks of the stage.

    A GPU waits for the host if launching the kernels takes longer than running them.
    """
    seconds = flops / (training.tensor_parallel * training.replicas) / _reached_flops(hardware, training.element_bytes)
    if hardware.link is None or hardware.network is None or hardware.bandwidth is None:
        return seconds
    seconds += _experts_seconds(training, step, hardware, stage) + _dequantized_seconds(training, step, hardware, stage)
    seconds += _sending_seconds(training, traffic, hardware.link * LINK_EFFICIENCY, hardware.network * LINK_EFFICIENCY)
    passes = 1 + step.forward_only + (training.recompute == "full")
    layers = len({block.layer for block in training.blocks[stage]})
    launches = (passes * FORWARD_LAUNCHES + _BACKWARD_LAUNCHES) * (1 if training.adapters is None else _ADAPTER_LAUNCHES)
    return max(seconds, layers * training.split.micro_batches(step.micro_batches) * launches)


def _experts_seconds(training: Training, step: Step, hardware: Hardware, stage: int) -> float:
    """Return the seconds of a rank for small products of experts and for moving tokens to them, beyond those of the FLOPs.

    A product of few tokens is less efficient. Each layer moves the copies of its tokens within the memory of the GPU four
    times, forward and backward: into the order of the ranks, of the experts, back, and to their sum.
    """
    experts, architecture = training.architecture.experts, training.architecture
    blocks = [block for block in training.blocks[stage] if block.name == EXPERTS]
    if experts is None or not blocks:
        return 0.0
    assert hardware.bandwidth is not None, "only for GPUs"
    choices = experts.per_token * step.computed / training.replicas / training.tensor_parallel  # of this rank
    tokens = choices / step.micro_batches * training.expert_ranks / experts.number  # of an expert
    passes = sum(1 + step.forward_only + _again(training, block) for block in blocks)
    weights = (2 + architecture.family.gated_mlp) * architecture.hidden_size * experts.ffn_hidden_size
    products = 2 * weights * choices * (passes + len(blocks) * (2 if training.adapters is None else 1))
    lost = products * _SMALL_PRODUCT / tokens / _reached_flops(hardware, training.element_bytes)
    moved = 4 * 2 * architecture.hidden_size * training.element_bytes * choices * (passes + len(blocks))
    return lost + moved / (hardware.bandwidth * MEMORY_EFFICIENCY)


def _dequantized_seconds(training: Training, step: Step, hardware: Hardware, stage: int) -> float:
    """Return the seconds in which a rank dequantizes its weights, once for each product of a micro-batch."""
    assert hardware.bandwidth is not None, "only for GPUs"
    values = sum(each.total for each in training.quantized(training.parameters[stage]))
    passes = 2 + step.forward_only + (training.recompute == "full")
    moved = values * passes * training.split.micro_batches(step.micro_batches) * _DEQUANTIZED_BYTES
    return moved / (hardware.bandwidth * MEMORY_EFFICIENCY)


def _sending_seconds(training: Training, traffic: Traffic, link: float, network: float) -> float:
    """Return the seconds for sending; ``link`` and ``network``: bytes per second that a GPU reaches.

    Megatron numbers tensor-parallel ranks first, then context- and data-parallel ones, and the stages of the pipeline last.
    A group is on one machine if the ranks that it spans are. The ring of a larger group leaves each machine over the network
    ports of all its ranks there. A rank sends tokens to experts on its machine and on others separately.
    """

    def ring(spans: int, *, apart: int) -> float:
        return link if spans <= GPUS_PER_MACHINE else min(link, max(1, GPUS_PER_MACHINE // apart) * network)

    def neighbour(spans: int) -> float:
        return link if spans <= GPUS_PER_MACHINE else network

    of_stage, tensor = training.tensor_parallel * training.replicas, training.tensor_parallel
    instance, experts = of_stage // training.optimizer_instances, training.expert_ranks
    here = (min(experts, GPUS_PER_MACHINE) - 1) / max(1, experts - 1)  # of the other ranks with experts
    return (
        traffic.tensor / ring(tensor, apart=1)
        + traffic.context / neighbour(tensor * training.context_parallel)
        + traffic.pipeline / neighbour(of_stage * training.split.stages)
        + traffic.data / ring(instance, apart=tensor)
        + traffic.instances / ring(of_stage, apart=instance)
        + traffic.expert * (here / link + (1 - here) / network)
    )
