"""GPU figures of the planner: published by the manufacturers, none measured by this project.

Sources: NVIDIA's data sheets "A100 Tensor Core GPU" (2021), "H100 Tensor Core GPU" (SXM) and "H200 Tensor Core GPU", dense
figures without sparsity; "DGX A100" (eight 200 Gb/s ports) and "DGX H100/H200" (eight 400 Gb/s ports).
"""

from __future__ import annotations

from dataclasses import dataclass

# Fraction of its peak that a GPU reaches in large bf16 matrix products, without waiting for other ranks: Megatron-LM's own
# tables (Narayanan et al. 2021, arXiv 2104.04473, table 1) show 44 to 52 % with all waiting included.
EFFICIENCY = 0.5
# Fraction of its peak bandwidth that a link reaches; an assumption.
LINK_EFFICIENCY = 0.6
GPUS_PER_MACHINE = 8
CONTEXT = 2e9  # bytes of GPU memory for CUDA, its libraries and NCCL; an assumption


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
