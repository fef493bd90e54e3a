"""Machines of a run: GPUs with their published figures, or the processors of this machine.

The figures of GPUs are published by the manufacturers, none measured by this project. Sources: NVIDIA's data sheets "A100
Tensor Core GPU" (2021), "H100 Tensor Core GPU" (SXM), "H200 Tensor Core GPU", "L40S", "DGX B200" and "GB200 NVL72", dense
figures without sparsity; "DGX A100" (eight 200 Gb/s ports), "DGX H100/H200" and "DGX B200" (eight 400 Gb/s ports). An L40S
sends over PCIe.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.device import device
from nemo_kto.device.precision import cpu_speed

GPUS_PER_MACHINE = 8


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Device of a rank."""

    name: str
    memory: float  # bytes
    flops: dict[int, float]  # bytes per value -> peak FLOP/s: 1 for fp8, 2 for bf16, 4 for fp32 without TF32
    capability: tuple[int, int] | None = None  # CUDA compute capability; None if unknown
    # Bytes per second that a GPU can send to GPUs of its machine and to other machines; None on a CPU, whose ranks share one
    # memory.
    link: float | None = None
    network: float | None = None
    bandwidth: float | None = None  # bytes per second of a GPU's memory
    measured: bool = False  # ``flops`` was measured on this machine just now, and is not a peak
    busy: float = 1.0  # how many times slower it is while other programs use it; 1 if none do, or if it was not measured


_AMPERE, _HOPPER = {2: 312e12, 4: 19.5e12}, {1: 1979e12, 2: 989e12, 4: 67e12}
_GB200, _B200 = {1: 5000e12, 2: 2500e12, 4: 80e12}, {1: 4500e12, 2: 2250e12, 4: 80e12}
_ADA = {1: 733e12, 2: 362e12, 4: 91.6e12}
# Key: name, memory, FLOP/s, compute capability, link, network, bandwidth. A more specific key stands before the key that it
# contains.
_FIGURES = {
    "a100-40": ("A100 40GB", 40e9, _AMPERE, (8, 0), 300e9, 25e9, 1.56e12),
    "a100": ("A100 80GB", 80e9, _AMPERE, (8, 0), 300e9, 25e9, 2.04e12),
    "h100": ("H100 80GB", 80e9, _HOPPER, (9, 0), 450e9, 50e9, 3.35e12),
    "h200": ("H200", 141e9, _HOPPER, (9, 0), 450e9, 50e9, 4.8e12),
    "gb200": ("GB200", 186e9, _GB200, (10, 0), 900e9, 50e9, 8e12),
    "b200": ("B200", 180e9, _B200, (10, 0), 900e9, 50e9, 8e12),
    "l40s": ("L40S", 48e9, _ADA, (8, 9), 32e9, 25e9, 0.864e12),
}
GPUS = {
    key: Hardware(
        name=name, memory=memory, flops=flops, capability=capability, link=link, network=network, bandwidth=bandwidth
    )
    for key, (name, memory, flops, capability, link, network, bandwidth) in _FIGURES.items()
}
DEFAULT_GPU = "h100"


def known_gpu(name: str) -> Hardware | None:
    """Return the GPU with a driver's product name, such as "NVIDIA H100 80GB HBM3"; None if it is not listed."""
    return next((gpu for key, gpu in GPUS.items() if all(part in name.lower() for part in key.split("-"))), None)


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Machines of a run."""

    ranks: int
    hardware: Hardware  # device of each rank; its memory is that of one rank
    on_gpu: bool
    repeats_keys: bool = False  # their attention of packed sequences gets keys and values repeated for each query head

    def with_memory(self, memory: float) -> Machines:
        """Return the same machines with another memory size per rank."""
        return replace(self, hardware=replace(self.hardware, memory=memory))


def gpus_elsewhere(ranks: int, gpu: str) -> Machines:
    """Return machines with ``ranks`` GPUs of a kind in :data:`GPUS`, by its short name ``gpu``."""
    return Machines(ranks=ranks, hardware=GPUS[gpu], on_gpu=True)


def these_machines(run: ResolvedRun, *, ranks: int | None = None, local: int | None = None, timed: bool = True) -> Machines:
    """Return the machines of a run that is started on this machine; without GPUs its ranks share memory and processors.

    The precision of the run must not be auto. ``ranks``, and ``local`` on this machine, are those that already run; None to
    use the configuration's. ``timed``: time matrix products on a CPU, which an estimate of the speed needs.
    """
    ranks, local = ranks or run.world_size(), local or run.local_ranks
    if run.gpus:
        name, memory = device.device_name(), float(device.total_memory_bytes())
        known = known_gpu(name) or GPUS[DEFAULT_GPU]
        return Machines(ranks=ranks, hardware=replace(known, name=name, memory=memory), on_gpu=True)
    threads = max(1, len(os.sched_getaffinity(0)) // local)
    speed = cpu_speed(run.dtype, threads=threads) if timed else None
    hardware = Hardware(
        name="this machine" if local == 1 else f"this machine, shared by {local} ranks",
        memory=device.host_memory_bytes() / local,
        flops={} if speed is None else {run.dtype.itemsize: speed.flops},
        measured=True,
        busy=1.0 if speed is None else speed.busy,
    )
    return Machines(ranks=ranks, hardware=hardware, on_gpu=False)
