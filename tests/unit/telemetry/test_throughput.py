"""Throughput by hand."""

from __future__ import annotations

import pytest
import torch

from nemo_kto.telemetry.throughput import ThroughputMeter, device_peak_flops


def test_figures_of_a_step() -> None:
    meter = ThroughputMeter(world_size=4, peak_memory=lambda: 9_500_000_000, peak_flops=1000.0)
    assert meter.figures(seconds=2.0, tokens=400, padded_tokens=1000, flops=6000.0) == pytest.approx(
        {
            "tokens_per_sec": 200.0,
            "tokens_per_sec_per_rank": 50.0,
            "padding_fraction": 0.6,
            "peak_memory_gb": 9.5,
            "mfu": 6000.0 / 2.0 / 4000.0,
        }
    )


def test_no_utilisation_where_the_peak_is_not_known() -> None:
    peak = device_peak_flops(torch.device("cpu"), torch.float32)
    meter = ThroughputMeter(world_size=1, peak_memory=lambda: 0, peak_flops=peak)
    assert "mfu" not in meter.figures(seconds=1.0, tokens=1, padded_tokens=1, flops=1.0)
