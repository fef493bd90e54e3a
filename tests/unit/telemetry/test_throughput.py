"""Throughput against manual values."""

from __future__ import annotations

import pytest
import torch

from nemo_kto.telemetry.watch import device_peak_flops, throughput


def test_metrics_of_a_step() -> None:
    sums = {"tokens": 400.0, "padded_tokens": 1000.0, "flops": 6000.0}
    assert throughput(sums, seconds=2.0, world_size=4, peak_flops=1000.0) == pytest.approx(
        {"tokens_per_sec": 200.0, "tokens_per_sec_per_rank": 50.0, "padding_fraction": 0.6, "mfu": 6000.0 / 2.0 / 4000.0}
    )


def test_tokens_of_kl_examples_are_counted_separately() -> None:
    """KL examples are not trained on, but they are padded and use the devices."""
    sums = {"tokens": 400.0, "kl_tokens": 300.0, "padded_tokens": 1000.0, "flops": 6000.0}
    figures = throughput(sums, seconds=2.0, world_size=4)
    assert (figures["tokens_per_sec"], figures["tokens_per_sec_per_rank"], figures["kl_tokens_per_sec"]) == (200, 50, 150)
    assert figures["padding_fraction"] == pytest.approx(0.3)


def test_no_utilisation_without_a_known_peak() -> None:
    peak = device_peak_flops(torch.device("cpu"), torch.float32, name="CPU")
    sums = {"tokens": 1.0, "padded_tokens": 1.0, "flops": 1.0}
    assert "mfu" not in throughput(sums, seconds=1.0, world_size=1, peak_flops=peak)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA B200", 2250.0),
        # of Lightning's table
        ("NVIDIA H100 80GB HBM3", 989.4),
    ],
)
def test_the_peak_is_dense_bf16(monkeypatch: pytest.MonkeyPatch, name: str, tflops: float) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert device_peak_flops(torch.device("cuda"), torch.bfloat16, name=name) == pytest.approx(tflops * 1e12)


def test_shared_prompts_are_neither_padding_nor_computed() -> None:
    sums = {"tokens": 400.0, "padded_tokens": 320.0, "shared_tokens": 160.0, "flops": 6000.0, "saved_flops": 2000.0}
    figures = throughput(sums, seconds=2.0, world_size=1, peak_flops=6000.0)
    assert (figures["padding_fraction"], figures["shared_fraction"]) == (0.25, 0.25)
    assert (figures["mfu"], figures["tokens_per_sec"]) == (0.5, 200.0)
    assert "shared_fraction" not in throughput(sums | {"saved_flops": 0.0}, seconds=2.0, world_size=1)
