"""Throughput by hand."""

from __future__ import annotations

import pytest
import torch

from nemo_kto.telemetry.throughput import ThroughputMeter, device_peak_flops


def test_figures_over_two_steps() -> None:
    meter = ThroughputMeter(world_size=4, peak_memory=lambda: 9_500_000_000, peak_flops=1000.0)
    meter.update(seconds=1.5, tokens=300, positions=400, flops=4000.0)
    meter.update(seconds=0.5, tokens=100, positions=600, flops=2000.0)
    assert meter.report_and_reset() == pytest.approx(
        {
            "tokens_per_sec": 200.0,
            "tokens_per_sec_per_rank": 50.0,
            "padding_share": 0.6,
            "peak_memory_gb": 9.5,
            "mfu": 6000.0 / 2.0 / 4000.0,
        }
    )
    assert meter.report_and_reset() == {}


def test_no_utilisation_where_the_peak_is_not_known() -> None:
    meter = ThroughputMeter(
        world_size=1, peak_memory=lambda: 0, peak_flops=device_peak_flops(torch.device("cpu"), torch.float32)
    )
    meter.update(seconds=1.0, tokens=1, positions=1, flops=1.0)
    assert "mfu" not in meter.report_and_reset()
