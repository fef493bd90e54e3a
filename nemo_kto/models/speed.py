"""How long a step may take: its operations, the bytes that its ranks send, and the time in which a pipeline is not full.

An estimate from published figures (models/hardware.py). Left out: reading data, the update itself, swaps of the reference,
validation, checkpoints, and that sending overlaps with computing nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_kto.models.flops import ForwardFlops, training_passes
from nemo_kto.models.hardware import GPUS_PER_MACHINE, LINK_EFFICIENCY, Hardware
from nemo_kto.models.memory import Training, stages_memory

_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step asks of the model.

    Attributes:
        rows: sequences of the global batch that go forward and backward.
        width: tokens of each, all but the first of them an answer.
        forward_only: forward passes without gradient over as many sequences: KL examples, and a reference that is evaluated.
    """

    rows: int
    width: int
    forward_only: int

    @property
    def tokens(self) -> int:
        """That are trained on."""
        return self.rows * self.width


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that a rank sends in a step to its tensor-, pipeline- and data-parallel group, and to experts elsewhere."""

    tensor: float
    pipeline: float
    data: float
    expert: float


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Of a step.

    Attributes:
        flops: of the unpadded model over the global batch: what perf/mfu counts.
        bubble: fraction of the time in which a rank waits for the pipeline to fill and to drain.
        seconds: the estimate.
    """

    flops: int
    traffic: Traffic
    bubble: float
    seconds: float


def step_flops(training: Training, step: Step) -> int:
    """Of all forward and backward passes, in all ranks; recomputation is not counted."""
    forward = ForwardFlops.of_model(training.architecture).of_rows(step.rows, step.width)
    return forward * (training_passes(frozen=training.adapters is not None) + step.forward_only)


def step_traffic(training: Training, step: Step) -> Traffic:
    """What a rank sends: of an all-reduce of n bytes among k ranks 2 n (k - 1) / k, of its two halves one half each."""
    architecture, tensor, data = training.architecture, training.tensor_parallel, training.data_parallel
    tokens = step.tokens / data
    hidden = tokens * architecture.hidden_size * training.element_bytes
    half = (tensor - 1) / tensor * hidden  # an all-gather or a reduce-scatter
    layers = architecture.num_layers / training.pipeline_parallel
    again = 1.0 if training.recompute == "full" else 0.5 * ("mlp" in training.recomputed)  # attention and MLP send alike
    forwards = 1 + step.forward_only + again
    regathered = 2 if training.sequence_parallel and training.adapters is None else 0  # inputs, for gradients of weights
    of_layers = layers * (4 * half * (forwards + 1) + regathered * half)
    logprobs = 2 * (tensor - 1) / tensor * tokens * architecture.hidden_size * _FP32
    stages = training.pipeline_parallel
    sent = 0.0 if stages == 1 else hidden * (2 + step.forward_only) / (tensor if training.sequence_parallel else 1)
    largest = max(stages_memory(training), key=lambda memory: memory.trained)
    trained = [each for each in training.parameters(largest.stage) if each.trained]
    to_others = sum(each.numel * (1 - 1 / training.copies(each)) for each in trained)
    return Traffic(
        tensor=of_layers + logprobs if tensor > 1 else 0.0,
        pipeline=sent,
        data=to_others * (_FP32 + (training.element_bytes if training.distributed_optimizer else _FP32)),
        expert=_to_experts(training) * tokens * (forwards + 1),
    )


def _to_experts(training: Training) -> float:
    """Bytes that a token brings to experts of other ranks in one pass, and back; it chooses all alike."""
    architecture, experts = training.architecture, training.architecture.experts
    if experts is None:
        return 0.0
    elsewhere = 1 - 1 / training.expert_parallel
    layers = architecture.sparse_layers.count(True) / training.pipeline_parallel
    hidden = architecture.hidden_size * training.element_bytes / training.tensor_parallel
    return layers * 2 * experts.per_token * elsewhere * hidden


def _again(training: Training, step: Step) -> int:
    """Operations of what is recomputed: of all layers, of the MLPs, or the attention's own products."""
    forward = ForwardFlops.of_model(training.architecture)
    pairs = step.rows * step.width * (step.width + 1) // 2
    if training.recompute == "full":
        return forward.per_token * step.tokens + forward.per_token_pair * pairs
    of_mlps = forward.per_token_mlp * step.tokens if "mlp" in training.recomputed else 0
    return of_mlps + (forward.per_token_pair * pairs if "core_attn" in training.recomputed else 0)


def step_speed(training: Training, step: Step, hardware: Hardware) -> Speed:
    """The estimate for a step."""
    ranks = training.tensor_parallel * training.pipeline_parallel * training.data_parallel
    flops, traffic = step_flops(training, step), step_traffic(training, step)
    work = flops + _again(training, step)
    bubble = (training.pipeline_parallel - 1) / (training.micro_batches + training.pipeline_parallel - 1)
    seconds = work / ranks / hardware.reached(training.element_bytes)
    if hardware.link is not None and hardware.network is not None:
        model_ranks = training.tensor_parallel * training.pipeline_parallel
        seconds += traffic.tensor / (hardware.link * LINK_EFFICIENCY)
        experts = training.expert_parallel * training.architecture.expert_tensor_parallel
        for sent, reach in ((traffic.pipeline, model_ranks), (traffic.data, ranks), (traffic.expert, experts)):
            seconds += sent / (LINK_EFFICIENCY * (hardware.link if reach <= GPUS_PER_MACHINE else hardware.network))
    return Speed(flops=flops, traffic=traffic, bubble=bubble, seconds=seconds / (1 - bubble))
