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
    assert precision.bf16_support() == Bf16Support(native=native, why=why)


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


def test_the_measurement_restores_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_SECONDS", 0.001)
    threads = torch.get_num_threads()
    slowdown = precision.bf16_slowdown()
    assert math.isfinite(slowdown)
    assert slowdown > 0
    assert torch.get_num_threads() == threads
