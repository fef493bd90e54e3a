"""Automatic precision: the report of a GPU, or the report of torch about a CPU, confirmed by a measurement."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from nemo_kto.device import device, precision
from nemo_kto.device.precision import Bf16Support
from tests.helpers.messages import Message


@pytest.mark.parametrize(
    ("instructions", "slowdown", "native", "why"),
    [
        (True, 0.31, True, Message("CPU", "0.3")),
        (True, 1.0, False, Message("CPU", "1.0")),
        (True, 6.5, False, Message("CPU", "6.5")),  # torch was asked, the measurement denies it
        (False, 75.2, False, Message("CPU", "bf16", "instructions", "75")),
        (False, 0.9, False, Message("CPU", "bf16", "instructions", "0.9")),
        (None, 0.5, True, Message("CPU", "0.5")),  # a torch that cannot tell
        (None, 12.4, False, Message("CPU", "12")),
    ],
)
def test_on_a_cpu(
    instructions: bool | None, slowdown: float, native: bool, why: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "on_gpu", lambda: False)
    monkeypatch.setattr(precision, "cpu_has_bf16", lambda: instructions)
    monkeypatch.setattr(precision, "bf16_slowdown", lambda: slowdown)
    assert precision.bf16_support() == Bf16Support(native=native, why=why, too_slow=slowdown > 10)


@pytest.mark.parametrize(
    ("capabilities", "has"),
    [
        ({"avx2": True, "avx512_bf16": False, "amx_bf16": False}, False),
        ({"avx512_bf16": True, "amx_bf16": False}, True),
        ({"avx512_bf16": False, "amx_bf16": True}, True),
        ({"neon": True, "bf16": True}, True),
        ({"avx2": True}, False),
    ],
)
def test_precision_by_the_report_of_torch(capabilities: dict[str, Any], has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert precision.cpu_has_bf16() is has
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert precision.cpu_has_bf16() is None


@pytest.mark.parametrize(("has", "why"), [(True, Message("GPU", "bf16")), (False, Message("GPU", "no", "bf16"))])
def test_on_a_gpu(has: bool, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.setattr(device, "gpu_has_bf16", lambda: has)
    assert precision.bf16_support() == Bf16Support(native=has, why=why)


def test_a_busy_machine_does_not_change_the_measured_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other work slows every product of the first half of the measurement twentyfold."""
    now = [0.0]

    def product(left: torch.Tensor, right: torch.Tensor) -> None:
        now[0] += {torch.float32: 1e-3, torch.bfloat16: 0.5e-3}[left.dtype] * (20 if now[0] < 0.1 else 1)

    monkeypatch.setattr(precision.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch, "mm", product)
    assert precision.bf16_slowdown() == pytest.approx(0.5)


def test_the_measurement_restores_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_SECONDS", 0.001)
    threads = torch.get_num_threads()
    slowdown = precision.bf16_slowdown()
    assert math.isfinite(slowdown)
    assert slowdown > 0
    assert torch.get_num_threads() == threads


def test_the_fastest_of_several_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock jumps as for a process that waits for a CPU."""
    durations = {1: [9.0, 1.0, 4.0, 3.0, 3.0], 2: [7.0, 0.5, 7.0, 7.0, 7.0]}
    steps = iter(step for each in (*durations[1], *durations[2]) for step in (100.0, each))
    now = [0.0]
    monkeypatch.setattr(precision.time, "perf_counter", lambda: now.append(now[-1] + next(steps)) or now[-1])
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    flop = 2 * 64 * 512 * 512
    assert precision.cpu_speed(torch.float32, threads=2) == (flop / 0.5, 4.0)
    assert next(steps, None) is None


@pytest.mark.parametrize(
    ("times", "load", "factor"),
    [
        ([2.0, 2.0, 2.5], 2.0, 1.0),  # as many threads as CPUs are at work: these may be this command's own
        ([2.0, 2.0, 8.0], 0.0, 2.0),  # products that waited for a CPU
        ([2.0, 2.0, 2.0], 6.0, 4.0),  # 6 other threads and 2 of the run share 2 CPUs
        ([1.0, 9.0], 3.0, 5.0),  # the larger of both
    ],
)
def test_a_busy_cpu(times: list[float], load: float, factor: float) -> None:
    assert precision.busy_factor(times, load=load, cpus=2) == factor
