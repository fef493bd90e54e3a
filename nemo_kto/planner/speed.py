"""Estimate of the time of a step from its FLOPs, its communication and the pipeline bubble.

It uses published hardware figures (planner/hardware.py), and assumes that communication does not overlap with computation.
Not included are reading data, the optimizer update, swaps of the reference, validation and checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_kto.models.flops import Flops, Passes
from nemo_kto.planner.hardware import GPUS_PER_MACHINE, LINK_EFFICIENCY, Hardware
from nemo_kto.planner.memory import Training
from nemo_kto.planner.traffic import Step, Traffic, step_traffic


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Estimated speed of a step."""

    flops: int  # of the unpadded model over the global batch, as counted by perf/mfu
    traffic: Traffic  # of a rank of the stage that sends the most bytes
    bubble: float  # fraction of the time in which a rank waits for the pipeline to fill and to drain
    seconds: float  # duration of the step


def step_flops(training: Training, step: Step) -> int:
    """Return the FLOPs of all forward and backward passes on all ranks, without recomputation."""
    return _operations(training, step).of_sequences(step.rows, step.width)


def _operations(training: Training, step: Step) -> Flops:
    passes = Passes(forward=1 + step.forward_only - step.disabled, disabled=step.disabled, backward=1)
    return training.flops.of_passes(passes)


def _again(training: Training, step: Step) -> int:
    """Return the FLOPs of recomputation: of all layers, of the MLPs, or of the products of the core attention."""
    forward = training.flops.forward
    if training.recompute == "full":
        return step.rows * forward.of_tokens(step.width)
    of_mlps = forward.per_token_mlp * step.tokens if "mlp" in training.recomputed else 0
    return of_mlps + (step.rows * forward.attention(step.width) if "core_attn" in training.recomputed else 0)


def _slowest_stage(training: Training, step: Step) -> float:
    """Return the fraction of the FLOPs of a step on the stage with the most; the last stage also computes log-probs."""
    of_logprobs = _operations(training, step).per_response_token * step.rows * (step.width - 1)
    whole = step_flops(training, step) + _again(training, step)
    sizes = training.split.stage_sizes(training.architecture.num_layers)
    of_layers = [(whole - of_logprobs) * size / sum(sizes) for size in sizes]
    of_layers[-1] += of_logprobs
    return max(of_layers) / whole


def step_speed(training: Training, step: Step, hardware: Hardware) -> Speed:
    """Estimate the speed of a step; a pipeline is as fast as its slowest stage."""
    of_stage = training.tensor_parallel * training.replicas
    ranks = of_stage * training.split.stages
    flops, stages = step_flops(training, step), range(training.split.stages)
    traffic = max((step_traffic(training, step, stage=stage) for stage in stages), key=lambda each: each.bytes)
    work = (flops + _again(training, step)) * _slowest_stage(training, step)
    bubble = training.split.bubble(training.micro_batches)
    seconds = work / of_stage / hardware.reached(training.element_bytes)
    if hardware.link is not None and hardware.network is not None:
        seconds += traffic.tensor.bytes / (hardware.link * LINK_EFFICIENCY)
        near = training.tensor_parallel * training.context_parallel  # consecutive ranks, on one machine if they fit
        model_ranks = near * training.split.stages
        reaches = near, model_ranks, ranks, training.expert_ranks
        sent_far = traffic.context, traffic.pipeline, traffic.data, traffic.expert
        for sent, reach in zip(sent_far, reaches, strict=True):
            seconds += sent.bytes / (LINK_EFFICIENCY * (hardware.link if reach <= GPUS_PER_MACHINE else hardware.network))
    return Speed(flops=flops, traffic=traffic, bubble=bubble, seconds=seconds / (1 - bubble))
