"""Precision names, and whether bf16 is faster than fp32 on this machine, by torch's information and a measurement."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from nemo_kto.device import device
from nemo_kto.utils import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

FORCED = "bf16-forced"  # also on a CPU where bf16 is too slow
# Accepted values of trainer.precision -> our value: ours first, then those of Lightning and NeMo-Aligner. With any spelling
# of bf16 the optimizer keeps fp32 main weights.
PRECISIONS = {
    "auto": "auto", "bf16": "bf16", "32": "32", FORCED: "bf16",
    "bf16-mixed": "bf16", "bf16-true": "bf16", "32-true": "32", "fp32": "32",
}  # fmt: skip
FP8_MULTIPLE = 16  # tensor cores need fp8 matrices whose sizes are multiples of this number

_ROWS, _WIDTH = 64, 512  # size of the timed matrix product: 34 MFLOP, 60 ms with the slowest emulation of bf16
_SECONDS, _PRODUCTS = 0.1, 5  # least duration of a measurement, and least number of products in it
_TURNS = 4  # of the measurement of each dtype, if two are compared
_BUSY = 1.5  # from this ratio of the mean and the shortest duration on, other programs use the CPU
MAX_SLOWDOWN = 10  # of bf16 relative to fp32; with instructions for bf16 it is about 1 or less, without them up to 75


def dtype_of(precision: str) -> torch.dtype:
    """Return the dtype for a value of trainer.precision (bf16, 32) or of model.optim.moments_dtype (bf16, fp32)."""
    return {"bf16": torch.bfloat16, "32": torch.float32, "fp32": torch.float32}[precision]


@dataclass(frozen=True, kw_only=True)
class Bf16Support:
    """Result of the check for bf16 support."""

    native: bool  # the device has bf16 instructions, and a CPU also computes faster in bf16 than in fp32
    why: str  # explanation in words, with the measured ratio on a CPU
    too_slow: bool = False  # bf16 takes more than MAX_SLOWDOWN times as long as fp32


class CPUSpeed(NamedTuple):
    """Result of the measurement of a CPU."""

    flops: float  # FLOP/s of the fastest of several matrix products
    busy: float  # how many times slower it is on average, because other programs use it; 1 if none do


def bf16_support() -> Bf16Support:
    """Check bf16 support of this rank's device; on a CPU the measurement takes about 0.2 seconds."""
    if device.on_gpu():
        native = device.gpu_has_bf16()
        return Bf16Support(native=native, why=f"this GPU has {'bf16' if native else 'no bf16'} instructions")
    slowdown = bf16_slowdown()
    digits, too_slow = 0 if slowdown >= 10 else 1, slowdown > MAX_SLOWDOWN
    measured = f"a matrix product takes {slowdown:.{digits}f} times as long in bf16 as in fp32"
    if cpu_has_bf16() is False:
        return Bf16Support(native=False, why=f"this CPU has no bf16 instructions: {measured}", too_slow=too_slow)
    return Bf16Support(native=slowdown < 1.0, why=f"on this CPU {measured}", too_slow=too_slow)


def cpu_has_bf16() -> bool | None:
    """Return whether torch reports bf16 instructions of this CPU; None if this version of torch cannot report them."""
    if not hasattr(torch.cpu, "get_capabilities"):  # older versions of torch
        return None
    return any(bool(present) for name, present in torch.cpu.get_capabilities().items() if "bf16" in name)


def bf16_slowdown(*, rows: int = _ROWS) -> float:
    """Return the ratio of the times of a matrix product in bf16 and in fp32, on one thread of this CPU.

    ``rows``: rows of the left matrix; 1 for a model that generates one token at a time.
    """
    # other ranks may be busy, so a second thread might have to wait for a core
    times: dict[torch.dtype, list[float]] = {torch.bfloat16: [], torch.float32: []}
    for _ in range(_TURNS):  # in turns, so that other work slows both
        for dtype, of_dtype in times.items():
            of_dtype += product_times(dtype, threads=1, rows=rows, seconds=_SECONDS / _TURNS, products=1)
    return min(times[torch.bfloat16]) / min(times[torch.float32])


def product_times(
    dtype: torch.dtype, *, threads: int, rows: int = _ROWS, seconds: float = _SECONDS, products: int = _PRODUCTS
) -> list[float]:
    """Return the durations in seconds of equal matrix products on ``threads`` threads of this CPU.

    There are at least ``products`` of them, and they take at least ``seconds``.
    """
    before, times = torch.get_num_threads(), list[float]()
    torch.set_num_threads(threads)
    try:
        left, right = torch.ones(rows, _WIDTH, dtype=dtype), torch.ones(_WIDTH, _WIDTH, dtype=dtype)
        torch.mm(left, right)  # warm-up
        while len(times) < products or sum(times) < seconds:
            start = time.perf_counter()
            torch.mm(left, right)
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return times


def cpu_speed(dtype: torch.dtype, *, threads: int) -> CPUSpeed:
    """Measure the speed of this CPU in matrix products on ``threads`` threads.

    On a busy CPU the threads of a product wait for each other, so that one thread may be faster than ``threads``.
    """
    single = product_times(dtype, threads=1)
    shortest = min(single if threads == 1 else [*single, *product_times(dtype, threads=threads)])
    busy = busy_factor(single, load=os.getloadavg()[0], cpus=os.cpu_count() or 1)
    return CPUSpeed(2 * _ROWS * _WIDTH * _WIDTH / shortest, busy)


def busy_factor(times: Sequence[float], *, load: float, cpus: int) -> float:
    """Return how many times slower a CPU is than in its fastest product, because other programs use it; 1 if none do.

    ``times``: durations of equal products on one thread; ``load``: the load average of the machine with ``cpus`` CPUs, to
    which a run adds as many threads as there are CPUs.
    """
    factor = max(sum(times) / len(times) / min(times), 1 + load / cpus if load > cpus else 1)
    return factor if factor >= _BUSY else 1.0
