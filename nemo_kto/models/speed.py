"""How long a step may take: its operations, the bytes that its ranks send, and the time in which a pipeline is not full.

An estimate from published figures (models/hardware.py). Left out: reading data, the update itself, swaps of the reference,
validation, checkpoints, and that sending overlaps with computing nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_kto.models.flops import ForwardFlops, training_passes
from nemo_kto.models.hardware import GPUS_PER_MACHINE, LINK_EFFICIENCY, Hardware
from nemo_kto.models.memory import Training

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
    """What is sent to each group by the rank that sends the most to it; tests/distributed/test_traffic.py counts."""
    stages = [stage_traffic(training, step, stage) for stage in range(training.split.stages)]
    return Traffic(
        tensor=max(each.tensor for each in stages),
        pipeline=max(each.pipeline for each in stages),
        data=max(each.data for each in stages),
    )


def stage_traffic(training: Training, step: Step, stage: int) -> Traffic:
    """What a rank of a stage sends: of an all-reduce of n bytes among k ranks 2 n (k - 1) / k, of its halves one half each.

    A stage sends activations once for each of its chunks and gradients as often, but for the ends of the pipeline.
    """
    data, split = training.data_parallel, training.split
    hidden = step.tokens / data * training.architecture.hidden_size * training.element_bytes
    forwards = (1 + step.forward_only) * (split.chunks - (stage == split.stages - 1))
    backwards = split.chunks - (stage == 0)
    trained = sum(each.numel for each in training.parameters(stage) if each.trained)
    gathered = training.element_bytes if training.distributed_optimizer else _FP32
    return Traffic(
        tensor=_tensor_traffic(training, step, stage) if training.tensor_parallel > 1 else 0.0,
        pipeline=hidden * (forwards + backwards) / (training.tensor_parallel if training.sequence_parallel else 1),
        data=(data - 1) / data * trained * (_FP32 + gathered),
    )


def _tensor_traffic(training: Training, step: Step, stage: int) -> float:
    """To the tensor-parallel group: of layers, and of embedding and log-probs at the ends of the pipeline.

    Three numbers of each response token make its log-prob; the gradient of its hidden state is in fp32.
    """
    architecture, split, sharded = training.architecture, training.split, training.sequence_parallel
    part = (training.tensor_parallel - 1) / training.tensor_parallel
    tokens, passes = step.tokens / training.data_parallel, 1 + step.forward_only
    half = part * tokens * architecture.hidden_size * training.element_bytes  # an all-gather or a reduce-scatter
    again = 1.0 if training.recompute == "full" else 0.5 * ("mlp" in training.recomputed)  # attention and MLP send alike
    regathered = 2 if sharded and training.adapters is None else 0  # inputs, for gradients of weights
    layers = split.stage_sizes(architecture.num_layers)[stage]
    sent = layers * (4 * half * (passes + again + 1) + regathered * half)
    if stage == 0:
        sent += half * (passes + (training.adapters is None) if sharded else 2 * passes)
    if stage == split.stages - 1:
        responses = tokens * (step.width - 1) / step.width
        sent += 2 * part * responses * 3 * _FP32 * passes
        sent += half * (passes + 1) if sharded else 2 * part * responses * architecture.hidden_size * _FP32
    return sent


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
