"""How long a step may take: its operations, the bytes that its ranks send, and the time in which a pipeline is not full.

An estimate from published figures (planner/hardware.py). Left out: reading data, the update itself, swaps of the reference,
validation, checkpoints, and that sending overlaps with computing nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_kto.models.flops import Flops, Passes
from nemo_kto.planner.hardware import GPUS_PER_MACHINE, LINK_EFFICIENCY, Hardware
from nemo_kto.planner.memory import Training
from nemo_kto.planner.traffic import Step, Traffic, step_traffic


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Of a step.

    Attributes:
        flops: of the unpadded model over the global batch: what perf/mfu counts.
        traffic: of a rank of the stage that sends the most.
        bubble: fraction of the time in which a rank waits for the pipeline to fill and to drain.
        seconds: the estimate.
    """

    flops: int
    traffic: Traffic
    bubble: float
    seconds: float


def step_flops(training: Training, step: Step) -> int:
    """Of all forward and backward passes, in all ranks; recomputation is not counted."""
    return _operations(training, step).of_rows(step.rows, step.width)


def _operations(training: Training, step: Step) -> Flops:
    passes = Passes(forward=1 + step.forward_only - step.disabled, disabled=step.disabled, backward=1)
    return training.flops.of_passes(passes)


def _busiest(training: Training, step: Step) -> Traffic:
    """What the ranks of the stage send that sends the most."""
    stages = [step_traffic(training, step, stage=stage) for stage in range(training.split.stages)]
    return max(stages, key=lambda each: each.bytes)


def _again(training: Training, step: Step) -> int:
    """Operations of what is recomputed: of all layers, of the MLPs, or the attention's own products."""
    forward = training.flops.forward
    if training.recompute == "full":
        return step.rows * forward.of_tokens(step.width)
    of_mlps = forward.per_token_mlp * step.tokens if "mlp" in training.recomputed else 0
    return of_mlps + (step.rows * forward.attention(step.width) if "core_attn" in training.recomputed else 0)


def _slowest_stage(training: Training, step: Step) -> float:
    """The part of the work of a step that the stage with the most of it does: its layers, and the log-probs of the last."""
    of_logprobs = _operations(training, step).per_response_token * step.rows * (step.width - 1)
    whole = step_flops(training, step) + _again(training, step)
    sizes = training.split.stage_sizes(training.architecture.num_layers)
    of_layers = [(whole - of_logprobs) * size / sum(sizes) for size in sizes]
    of_layers[-1] += of_logprobs
    return max(of_layers) / whole


def step_speed(training: Training, step: Step, hardware: Hardware) -> Speed:
    """The estimate for a step: a pipeline goes at the pace of its slowest stage."""
    of_stage = training.tensor_parallel * training.replicas
    ranks = of_stage * training.split.stages
    flops, traffic = step_flops(training, step), _busiest(training, step)
    work = (flops + _again(training, step)) * _slowest_stage(training, step)
    bubble = training.split.bubble(training.micro_batches)
    seconds = work / of_stage / hardware.reached(training.element_bytes)
    if hardware.link is not None and hardware.network is not None:
        seconds += traffic.tensor.bytes / (hardware.link * LINK_EFFICIENCY)
        near = training.tensor_parallel * training.context_parallel  # the next ranks, on the same machine if they fit
        model_ranks = near * training.split.stages
        reaches = near, model_ranks, ranks, training.expert_ranks
        sent_far = traffic.context, traffic.pipeline, traffic.data, traffic.expert
        for sent, reach in zip(sent_far, reaches, strict=True):
            seconds += sent.bytes / (LINK_EFFICIENCY * (hardware.link if reach <= GPUS_PER_MACHINE else hardware.network))
    return Speed(flops=flops, traffic=traffic, bubble=bubble, seconds=seconds / (1 - bubble))
