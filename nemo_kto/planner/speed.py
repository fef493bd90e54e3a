"""Estimate of the time of a step from its FLOPs, its communication and the pipeline bubble, and the figures of GPUs.

Communication is assumed not to overlap with computation. Not included are reading data, the optimizer update, swaps of the
reference, validation and checkpoints.

The figures of GPUs are published by the manufacturers, none measured by this project. Sources: NVIDIA's data sheets "A100
Tensor Core GPU" (2021), "H100 Tensor Core GPU" (SXM) and "H200 Tensor Core GPU", dense figures without sparsity; "DGX A100"
(eight 200 Gb/s ports) and "DGX H100/H200" (eight 400 Gb/s ports).
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_kto.models.flops import Passes
from nemo_kto.planner.memory import Training
from nemo_kto.planner.traffic import Step, Traffic, step_traffic

# Fraction of its peak that a GPU reaches in large bf16 matrix products, without waiting for other ranks: Megatron-LM's own
# tables (Narayanan et al. 2021, arXiv 2104.04473, table 1) show 44 to 52 % with all waiting included.
EFFICIENCY = 0.5
# Fraction of its peak bandwidth that a link reaches; an assumption.
LINK_EFFICIENCY = 0.6
GPUS_PER_MACHINE = 8


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Device of a rank."""

    name: str
    memory: float  # bytes
    flops: dict[int, float]  # bytes per value -> peak FLOP/s: 2 for bf16, 4 for fp32 without TF32
    capability: tuple[int, int] | None = None  # CUDA compute capability; None if unknown
    # Bytes per second that a GPU can send to GPUs of its machine and to other machines; None on a CPU, whose ranks share one
    # memory.
    link: float | None = None
    network: float | None = None
    measured: bool = False  # ``flops`` was measured on this machine just now, and is not a peak

    def reached(self, element_bytes: int) -> float:
        """Return the expected FLOP/s for values of ``element_bytes`` bytes."""
        return self.flops[element_bytes] * (1.0 if self.measured else EFFICIENCY)


_HOPPER = {2: 989e12, 4: 67e12}
GPUS = {
    "a100": Hardware(
        name="A100 80GB", memory=80e9, flops={2: 312e12, 4: 19.5e12}, capability=(8, 0), link=300e9, network=25e9
    ),
    "h100": Hardware(name="H100 80GB", memory=80e9, flops=_HOPPER, capability=(9, 0), link=450e9, network=50e9),
    "h200": Hardware(name="H200", memory=141e9, flops=_HOPPER, capability=(9, 0), link=450e9, network=50e9),
}
DEFAULT_GPU = "h100"


def known_gpu(name: str) -> Hardware | None:
    """Return the GPU with a driver's product name, such as "NVIDIA H100 80GB HBM3"; None if it is not listed."""
    return next((gpu for key, gpu in GPUS.items() if key in name.lower()), None)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Estimated speed of a step."""

    flops: int  # of the unpadded model over the global batch, as counted by perf/mfu
    traffic: Traffic  # of a rank of the stage that sends the most bytes
    bubble: float  # fraction of the time in which a rank waits for the pipeline to fill and to drain
    seconds: float  # duration of the step


def step_speed(training: Training, step: Step, hardware: Hardware) -> Speed:
    """Estimate the speed of a step; a pipeline is as fast as its slowest stage."""
    passes = Passes(forward=1 + step.forward_only - step.disabled, disabled=step.disabled, backward=1)
    operations, forward = training.flops.of_passes(passes), training.flops.forward
    # without recomputation
    flops = round(operations.of_sequences(step.rows, step.width) * step.computed_flops)
    again = 0.0  # recomputation: of all layers, of the MLPs, or of the products of the core attention
    if training.recompute == "full":
        again = step.rows * forward.of_tokens(step.width)
    if "mlp" in training.recomputed:
        again += step.tokens * forward.per_token_mlp
    if "core_attn" in training.recomputed:
        again += step.rows * forward.attention(step.width)
    again *= step.computed_tokens
    of_logprobs = operations.per_response_token * step.rows * (step.width - 1) * step.computed_flops  # on the last stage
    sizes = training.split.stage_sizes(training.architecture.num_layers)
    of_stages = [(flops + again - of_logprobs) * size / sum(sizes) for size in sizes]
    of_stages[-1] += of_logprobs
    of_stage = training.tensor_parallel * training.replicas  # ranks
    bubble = training.split.bubble(training.micro_batches)
    seconds = max(of_stages) / of_stage / hardware.reached(training.element_bytes)
    stages = range(training.split.stages)
    traffic = max((step_traffic(training, step, stage=stage) for stage in stages), key=lambda each: each.total)
    if hardware.link is not None and hardware.network is not None:
        # Number of consecutive ranks that contain a group; on one machine if they fit. Megatron numbers tensor-parallel
        # ranks first, then context- and data-parallel ones, and the stages of the pipeline last.
        for sent, reach in (
            (traffic.tensor, training.tensor_parallel),
            (traffic.context, training.tensor_parallel * training.context_parallel),
            (traffic.pipeline, of_stage * training.split.stages),
            (traffic.data, of_stage // training.optimizer_instances),
            (traffic.instances, of_stage),
            (traffic.expert, training.expert_ranks),
        ):
            bandwidth = hardware.link if reach <= GPUS_PER_MACHINE else hardware.network
            seconds += sent / (bandwidth * LINK_EFFICIENCY)
    return Speed(flops=flops, traffic=traffic, bubble=bubble, seconds=seconds / (1 - bubble))
