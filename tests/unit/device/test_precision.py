"""Automatic precision: the report of a GPU, or a measurement on a CPU."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_kto.device import device, precision
from nemo_kto.device.precision import Bf16Support
from tests.helpers.messages import Message


@pytest.mark.parametrize(
    ("slowdown", "native", "shown"), [(0.31, True, "0.3"), (1.0, False, "1.0"), (6.5, False, "6.5"), (75.2, False, "75")]
)
def test_on_a_cpu(slowdown: float, native: bool, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "on_gpu", lambda: False)
    monkeypatch.setattr(precision, "bf16_slowdown", lambda: slowdown)
    assert precision.bf16_support() == Bf16Support(native=native, why=Message("CPU", shown))  # type: ignore[arg-type]


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
