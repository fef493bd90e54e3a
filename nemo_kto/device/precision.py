"""Names of precisions, and whether bf16 is worth having on this machine: what torch says, confirmed by a measurement."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_kto.device import device
from nemo_kto.utils.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

# Values of trainer.precision with what they mean here: ours, then Lightning's and NeMo-Aligner's. In bf16 the optimizer
# keeps fp32 main weights however it is spelled.
PRECISIONS = {
    "auto": "auto", "bf16": "bf16", "32": "32",
    "bf16-mixed": "bf16", "bf16-true": "bf16", "32-true": "32", "fp32": "32",
}  # fmt: skip
FP8_MULTIPLE = 16  # tensor cores multiply matrices in fp8 whose sizes are multiples of it

_ROWS, _WIDTH = 64, 512  # of the matrices that are timed: 34 MFLOP, 60 ms where bf16 is emulated at its slowest
_SECONDS = 0.1  # for each of the two types


@dataclass(frozen=True, kw_only=True)
class Bf16Support:
    """What bf16 is worth on this machine.

    Attributes:
        native: the machine has instructions for bf16, and computes faster with it than in fp32.
        why: the same in words, with the measured figure.
    """

    native: bool
    why: str


def bf16_support() -> Bf16Support:
    """What bf16 is worth on the device of this rank; on a CPU it takes about a fifth of a second to tell."""
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
    """Whether torch knows of bf16 instructions of this CPU; None where this torch cannot tell."""
    if not hasattr(torch.cpu, "get_capabilities"):  # an older torch
        return None
    return any(bool(present) for name, present in torch.cpu.get_capabilities().items() if "bf16" in name)


def bf16_slowdown() -> float:
    """How many times as long a matrix product takes in bf16 as in fp32, on one thread of this CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # other ranks may be busy: a second thread would wait for its turn
    try:
        return _shortest(torch.bfloat16) / _shortest(torch.float32)
    finally:
        torch.set_num_threads(threads)


def product_flops(dtype: torch.dtype, *, threads: int) -> float:
    """Operations a second of a matrix product on so many threads of this CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return 2 * _ROWS * _WIDTH * _WIDTH / _shortest(dtype)
    finally:
        torch.set_num_threads(before)


def _shortest(dtype: torch.dtype) -> float:
    """Seconds of a matrix product at best."""
    left, right = torch.ones(_ROWS, _WIDTH, dtype=dtype), torch.ones(_WIDTH, _WIDTH, dtype=dtype)
    torch.mm(left, right)  # the first one sets things up
    shortest, began = float("inf"), time.perf_counter()
    while (start := time.perf_counter()) < began + _SECONDS:
        torch.mm(left, right)
        shortest = min(shortest, time.perf_counter() - start)
    return shortest
