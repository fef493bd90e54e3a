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
    """Bytes that a rank sends in a step to its tensor-, pipeline- and data-parallel group."""

    tensor: float
    pipeline: float
    data: float


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
    split = training.split
    layers = max(split.stage_sizes(architecture.num_layers))
    again = 1.0 if training.recompute == "full" else 0.5 * ("mlp" in training.recomputed)  # attention and MLP send alike
    forwards = 1 + step.forward_only + again
    regathered = 2 if training.sequence_parallel and training.adapters is None else 0  # inputs, for gradients of weights
    of_layers = layers * (4 * half * (forwards + 1) + regathered * half)
    logprobs = 2 * (tensor - 1) / tensor * tokens * architecture.hidden_size * _FP32
    between_chunks = hidden * (2 + step.forward_only) / (tensor if training.sequence_parallel else 1)
    sent = 0.0 if split.stages == 1 else between_chunks * split.chunks
    largest = max(stages_memory(training), key=lambda memory: memory.trained)
    gathered = largest.trained * (training.element_bytes if training.distributed_optimizer else _FP32)
    return Traffic(
        tensor=of_layers + logprobs if tensor > 1 else 0.0,
        pipeline=sent,
        data=(data - 1) / data * (largest.trained * _FP32 + gathered),
    )


def _again(training: Training, step: Step) -> int:
    """Operations of what is recomputed: of all layers, of the MLPs, or the attention's own products."""
    forward = ForwardFlops.of_model(training.architecture)
    pairs = step.rows * step.width * (step.width + 1) // 2
    if training.recompute == "full":
        return forward.per_token * step.tokens + forward.per_token_pair * pairs
    of_mlps = forward.per_token_mlp * step.tokens if "mlp" in training.recomputed else 0
    return of_mlps + (forward.per_token_pair * pairs if "core_attn" in training.recomputed else 0)


def _slowest_stage(training: Training, step: Step) -> float:
    """The part of the work of a step that the stage with the most of it does: its layers, and the log-probs of the last."""
    forward, passes = ForwardFlops.of_model(training.architecture), training_passes(frozen=training.adapters is not None)
    of_logprobs = forward.per_response_token * step.rows * (step.width - 1) * (passes + step.forward_only)
    whole = step_flops(training, step) + _again(training, step)
    sizes = training.split.stage_sizes(training.architecture.num_layers)
    of_layers = [(whole - of_logprobs) * size / sum(sizes) for size in sizes]
    of_layers[-1] += of_logprobs
    return max(of_layers) / whole


def step_speed(training: Training, step: Step, hardware: Hardware) -> Speed:
    """The estimate for a step: a pipeline goes at the pace of its slowest stage."""
    model_ranks = training.tensor_parallel * training.split.stages
    ranks = model_ranks * training.data_parallel
    flops, traffic = step_flops(training, step), step_traffic(training, step)
    work = (flops + _again(training, step)) * _slowest_stage(training, step)
    bubble = training.split.bubble(training.micro_batches)
    seconds = work / (training.tensor_parallel * training.data_parallel) / hardware.reached(training.element_bytes)
    if hardware.link is not None and hardware.network is not None:
        seconds += traffic.tensor / (hardware.link * LINK_EFFICIENCY)
        for sent, reach in ((traffic.pipeline, model_ranks), (traffic.data, ranks)):
            seconds += sent / (LINK_EFFICIENCY * (hardware.link if reach <= GPUS_PER_MACHINE else hardware.network))
    return Speed(flops=flops, traffic=traffic, bubble=bubble, seconds=seconds / (1 - bubble))
