"""How long a step may take: its operations, the bytes that its ranks send, and the time in which a pipeline is not full.

An estimate from published figures (models/hardware.py). Left out: reading data, the update itself, swaps of the reference,
validation, checkpoints, and that sending overlaps with computing nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_kto.models.flops import ForwardFlops, training_passes
from nemo_kto.models.hardware import GPUS_PER_MACHINE, LINK_EFFICIENCY, Hardware
from nemo_kto.models.memory import Training
from nemo_kto.models.traffic import Step, Traffic, step_traffic


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
    forward = ForwardFlops.of_model(training.architecture).of_rows(step.rows, step.width)
    return forward * (training_passes(frozen=training.adapters is not None) + step.forward_only)


def _busiest(training: Training, step: Step) -> Traffic:
    """What the ranks of the stage send that sends the most."""
    stages = [step_traffic(training, step, stage=stage) for stage in range(training.pipeline_parallel)]
    return max(stages, key=lambda each: each.tensor.bytes + each.pipeline.bytes + each.context.bytes + each.data.bytes)


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
    model_ranks = training.tensor_parallel * training.pipeline_parallel * training.context_parallel
    ranks = model_ranks * training.data_parallel
    flops, traffic = step_flops(training, step), _busiest(training, step)
    work = flops + _again(training, step)
    bubble = (training.pipeline_parallel - 1) / (training.micro_batches + training.pipeline_parallel - 1)
    seconds = work / ranks / hardware.reached(training.element_bytes)
    if hardware.link is not None and hardware.network is not None:
        seconds += traffic.tensor.bytes / (hardware.link * LINK_EFFICIENCY)
        near = training.tensor_parallel * training.context_parallel  # the next ranks, on the same machine if they fit
        for sent, reach in ((traffic.context, near), (traffic.pipeline, model_ranks), (traffic.data, ranks)):
            seconds += sent.bytes / (LINK_EFFICIENCY * (hardware.link if reach <= GPUS_PER_MACHINE else hardware.network))
    return Speed(flops=flops, traffic=traffic, bubble=bubble, seconds=seconds / (1 - bubble))
