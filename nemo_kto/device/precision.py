"""Precision names, and whether bf16 is faster than fp32 on this machine, by torch's information and a measurement."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_kto.device import device
from nemo_kto.utils import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

# Accepted values of trainer.precision -> our value: ours first, then those of Lightning and NeMo-Aligner. With any spelling
# of bf16 the optimizer keeps fp32 main weights.
PRECISIONS = {
    "auto": "auto", "bf16": "bf16", "32": "32",
    "bf16-mixed": "bf16", "bf16-true": "bf16", "32-true": "32", "fp32": "32",
}  # fmt: skip
FP8_MULTIPLE = 16  # tensor cores need fp8 matrices whose sizes are multiples of this number

_ROWS, _WIDTH = 64, 512  # size of the timed matrix product: 34 MFLOP, 60 ms with the slowest emulation of bf16
_SECONDS = 0.1  # duration of the measurement for each of the two dtypes


def dtype_of(precision: str) -> torch.dtype:
    """Return the dtype for a value of trainer.precision (bf16, 32) or of model.optim.moments_dtype (bf16, fp32)."""
    return {"bf16": torch.bfloat16, "32": torch.float32, "fp32": torch.float32}[precision]


@dataclass(frozen=True, kw_only=True)
class Bf16Support:
    """Result of the check for bf16 support."""

    native: bool  # the device has bf16 instructions, and a CPU also computes faster in bf16 than in fp32
    why: str  # explanation in words, with the measured ratio on a CPU


def bf16_support() -> Bf16Support:
    """Check bf16 support of this rank's device; on a CPU the measurement takes about 0.2 seconds."""
    if device.on_gpu():
        native = device.gpu_has_bf16()
        return Bf16Support(native=native, why=f"this GPU has {'bf16' if native else 'no bf16'} instructions")
    slowdown = bf16_slowdown()
    digits = 0 if slowdown >= 10 else 1
    measured = f"a matrix product takes {slowdown:.{digits}f} times as long in bf16 as in fp32"
    if cpu_has_bf16() is False:
        return Bf16Support(native=False, why=f"this CPU has no bf16 instructions: {measured}")
    return Bf16Support(native=slowdown < 1.0, why=f"on this CPU {measured}")


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
    return product_flops(torch.float32, threads=1, rows=rows) / product_flops(torch.bfloat16, threads=1, rows=rows)


def product_flops(dtype: torch.dtype, *, threads: int, rows: int = _ROWS) -> float:
    """Measure the FLOP/s of a matrix product on ``threads`` threads of this CPU, by its shortest time."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        left, right = torch.ones(rows, _WIDTH, dtype=dtype), torch.ones(_WIDTH, _WIDTH, dtype=dtype)
        torch.mm(left, right)  # warm-up
        shortest, began = float("inf"), time.perf_counter()
        while (start := time.perf_counter()) < began + _SECONDS:
            torch.mm(left, right)
            shortest = min(shortest, time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return 2 * rows * _WIDTH * _WIDTH / shortest
