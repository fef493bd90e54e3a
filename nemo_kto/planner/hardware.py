"""What a plan knows of GPUs. Everything here is what makers publish; nothing of it was measured by this project.

Sources: NVIDIA's data sheets "A100 Tensor Core GPU" (2021), "H100 Tensor Core GPU" (SXM) and "H200 Tensor Core GPU", dense
figures without sparsity; "DGX A100" (eight 200 Gb/s ports) and "DGX H100/H200" (eight 400 Gb/s ports).
"""

from __future__ import annotations

from dataclasses import dataclass

# The part of its peak that a GPU reaches in large matrix products of bf16, without waiting for others: Megatron-LM's own
# tables (Narayanan et al. 2021, arXiv 2104.04473, table 1) show 44 to 52 % with all waiting included.
EFFICIENCY = 0.5
# The part of its peak that a link reaches; an assumption.
LINK_EFFICIENCY = 0.6
GPUS_PER_MACHINE = 8
CONTEXT = 2e9  # bytes of a GPU that CUDA, its libraries and NCCL take; an assumption


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A device of a rank.

    Attributes:
        name: what it is called.
        memory: bytes.
        flops: operations a second at best, by the bytes of a value: 2 for bf16, 4 for fp32 without TF32.
        capability: NVIDIA's version of its instructions; None where it is not known.
        link, network: bytes a second that a GPU can send, to GPUs of its machine and to other machines; None on a CPU, whose
            ranks share one memory.
        measured: ``flops`` was measured on this machine just now, and is no peak.
    """

    name: str
    memory: float
    flops: dict[int, float]
    capability: tuple[int, int] | None = None
    link: float | None = None
    network: float | None = None
    measured: bool = False

    def reached(self, element_bytes: int) -> float:
        """Operations a second to expect."""
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
    """The GPU that a driver calls so, such as "NVIDIA H100 80GB HBM3"; None for others."""
    return next((gpu for key, gpu in GPUS.items() if key in name.lower()), None)
