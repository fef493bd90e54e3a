"""Throughput, stragglers and loss spikes."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable

import pytest
import torch

from nemo_kto.telemetry.watch import LossSpikes, RankTimes, StragglerFinder, device_peak_flops, slowest, throughput
from tests.helpers.messages import Message

STEP = {"tokens": 400.0, "padded_tokens": 1000.0, "flops": 6000.0}
SHARED = {"tokens": 400.0, "padded_tokens": 320.0, "shared_tokens": 160.0, "flops": 6000.0, "saved_flops": 2000.0}
PER_SECOND = {"tokens_per_sec": 200.0, "tokens_per_sec_per_rank": 50.0}


@pytest.mark.parametrize(
    ("sums", "ranks", "peak", "expected"),
    [
        (STEP, 4, 1000.0, {**PER_SECOND, "padding_fraction": 0.6, "mfu": 6000.0 / 2.0 / 4000.0}),
        (STEP, 4, None, {**PER_SECOND, "padding_fraction": 0.6}),
        # KL examples are not trained on, but they are padded and use the devices
        (STEP | {"kl_tokens": 300.0}, 4, None, {**PER_SECOND, "padding_fraction": 0.3, "kl_tokens_per_sec": 150.0}),
        # shared prompts are neither padding nor computed
        (SHARED, 4, 1500.0, {**PER_SECOND, "padding_fraction": 0.25, "shared_fraction": 0.25, "mfu": 0.5}),
        (SHARED | {"saved_flops": 0.0}, 4, None, {**PER_SECOND, "padding_fraction": 0.25}),
    ],
)
def test_throughput(sums: dict[str, float], ranks: int, peak: float | None, expected: dict[str, float]) -> None:
    assert throughput(sums, seconds=2.0, world_size=ranks, peak_flops=peak) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("device", "dtype", "name", "tflops"),
    [
        ("cpu", torch.float32, "CPU", None),
        ("cuda", torch.bfloat16, "NVIDIA B200", 2250.0),
        ("cuda", torch.bfloat16, "NVIDIA H100 80GB HBM3", 989.4),  # of Lightning's table
    ],
)
def test_the_peak_is_dense(
    device: str, dtype: torch.dtype, name: str, tflops: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = device_peak_flops(torch.device(device), dtype, name=name)
    assert found == (None if tflops is None else pytest.approx(tflops * 1e12))


def rank(*, data: float = 0.1, forward: float = 0.4, stage: int = 0, step: float = 2.0) -> RankTimes:
    phases = {"data": data, "forward": forward, "forward_backward": 1.5}
    return RankTimes(host=f"node{stage}", stage=stage, step=step, phases=phases)


def test_the_slowest_rank_of_each_phase() -> None:
    assert slowest([rank(), rank(data=0.3), rank(forward=0.6)]) == {
        "data_max": 0.3,
        "data_max_rank": 1,
        "forward_max": 0.6,
        "forward_max_rank": 2,
        "forward_backward_max": 1.5,
        "forward_backward_max_rank": 0,
    }


def test_a_rank_that_is_slow_twice_in_a_row_is_named_once() -> None:
    finder = StragglerFinder()
    slow, well = [rank(), rank(), rank(data=1.9), rank()], [rank()] * 4
    assert finder.find(slow) == []
    assert finder.find(well) == []
    assert finder.find(slow) == []
    assert finder.find(slow) == [Message("2", "4", "node0", "work", "2.30", "1.90", "0.40", "0.50", "20", "all")]
    assert finder.find(slow) == []


def twice(*times: RankTimes) -> list[str]:
    finder = StragglerFinder()
    return finder.find(times) + finder.find(times)


def test_stages_of_a_pipeline_have_different_work() -> None:
    assert twice(rank(), rank(stage=1, forward=1.5)) == []
    (warning,) = twice(rank(), rank(), rank(stage=1, forward=1.5), rank(stage=1, forward=3.0))
    assert warning.startswith("rank 3 of 4 on node1")


def test_small_delays_are_not_reported() -> None:
    assert twice(rank(data=0.001, forward=0.001), rank(data=0.0, forward=0.001)) == []
    assert twice(rank(forward=0.5), rank(forward=0.4)) == []


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[list[float]], list[int]]:
    """Steps with a warning."""

    def steps(losses: list[float]) -> list[int]:
        caplog.clear()
        spikes = LossSpikes()
        for step, loss in enumerate(losses, start=1):
            spikes.watch(step, loss)
        return [int(record.getMessage().split(":")[0].removeprefix("step ")) for record in caplog.records]

    return steps


def noise(count: int, *, scale: float = 0.05) -> list[float]:
    draw = random.Random(3)
    return [0.5 + draw.gauss(0, scale) for _ in range(count)]


def test_a_spike_is_reported_once_in_fifty_steps(warned: Callable[[list[float]], list[int]]) -> None:
    losses = noise(200)
    for step in (30, 31, 79, 80, 150):
        losses[step - 1] = 5.0
    assert warned(losses) == [30, 80, 150]


def test_values_that_are_not_spikes(warned: Callable[[list[float]], list[int]]) -> None:
    assert warned(noise(2000)) == []
    assert warned([0.5 * 0.99**step for step in range(500)]) == []  # it falls
    assert warned([0.5] * 100 + [0.54] * 100) == []  # it hardly moves
    assert warned([*noise(19), 50.0]) == []  # too little is known
    assert warned([*noise(30), math.nan, math.inf]) == []  # reported elsewhere


def test_the_warning_about_a_spike(caplog: pytest.LogCaptureFixture) -> None:
    spikes = LossSpikes()
    with caplog.at_level(logging.WARNING):
        for step, loss in enumerate([0.5, 0.55, 0.6] * 10 + [4.0], start=1):
            spikes.watch(step, loss)
    expected = Message("31", "4", "last", "30", "0.55")
    assert [record.getMessage() for record in caplog.records] == [expected]
