"""Phases of a step and the time of a run, with a simulated clock; throughput, stragglers and loss spikes."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable

import pytest
import torch

from nemo_kto.telemetry.watch import (
    LossSpikes,
    PhaseTimers,
    RankTimes,
    RunTimer,
    StopReason,
    StragglerFinder,
    device_peak_flops,
    parse_duration,
    slowest,
    throughput,
)
from tests.helpers.messages import Message


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_are_summed_and_reset_by_the_report() -> None:
    clock = Clock()
    timers = PhaseTimers(clock=clock)
    with timers.phase("reference"):
        clock.now += 2.0
    with timers.phase("kl"):
        clock.now += 0.5
    clock.now += 7.0  # belongs to no phase
    with timers.phase("reference"):
        clock.now += 1.0
    assert timers.report_and_reset() == {"reference": 3.0, "kl": 0.5}
    assert timers.report_and_reset() == {}


def test_durations() -> None:
    assert [parse_duration(text) for text in ("10:23:59:59", "0:0:5:0")] == [950_399, 300]
    for text in ("03:45:00", "00:24:00:00", "-1:00:00:00"):
        with pytest.raises(ValueError, match=r"DD:HH:MM:SS.*got"):
            parse_duration(text)


def test_run_timer_reports_the_end_of_the_time() -> None:
    clock = Clock()
    timer = RunTimer(max_time="00:00:01:00", clock=clock)
    timer.start_time()
    clock.now += 59.9
    assert timer.stop_reason() is None
    clock.now += 0.1
    assert timer.stop_reason() == StopReason("max_time=00:00:01:00", early=False)
    timer.requeue = True
    assert timer.stop_reason() == StopReason("max_time=00:00:01:00", early=True)


@pytest.mark.parametrize(
    ("own", "agreed", "reason"),
    [
        (0, 0, None),
        (0, 1, StopReason("max_time=00:01:00:00", early=False)),  # another clock is ahead
        (0, 30, StopReason("SIGTERM", early=True)),  # another rank got it
        (10, 20, StopReason("SIGUSR1", early=True)),
    ],
)
def test_run_timer_returns_the_decision_of_all_ranks(own: int, agreed: int, reason: StopReason | None) -> None:
    asked = []

    def agree(answer: int) -> int:
        asked.append(answer)
        return agreed

    timer = RunTimer(max_time="00:01:00:00", agree=agree, received=lambda: own, clock=Clock())
    timer.start_time()
    assert timer.stop_reason() == reason
    assert asked == [2 * own]


def test_a_signal_leaves_less_time_than_max_time() -> None:
    clock = Clock()
    timer = RunTimer(max_time="00:00:01:00", started=clock.now - 60, received=lambda: 15, clock=clock)
    assert timer.stop_reason() == StopReason("SIGTERM", early=True)


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
