"""Phases of a step and the time of a run, with a simulated clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from nemo_kto.telemetry.timers import PhaseTimers, RunTimer, StopReason, parse_duration


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


def test_a_phase_that_raises_is_counted() -> None:
    clock = Clock()
    timers = PhaseTimers(clock=clock)

    def fail() -> None:
        clock.now += 4.0
        raise KeyError("row")

    with pytest.raises(KeyError), timers.phase("data"):
        fail()
    assert timers.report_and_reset() == {"data": 4.0}


@dataclass(kw_only=True)
class Device:
    """Does what is queued, one after the other, while the host goes on; both clocks are turned by the test."""

    host: float = 0.0
    busy_until: float = 0.0

    def queue(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, self.host) + seconds

    def moment(self) -> DeviceMoment:
        return DeviceMoment(self, max(self.busy_until, self.host))


class DeviceMoment(NamedTuple):
    device: Device
    seconds: float

    def __sub__(self, earlier: DeviceMoment) -> float:
        self.device.host = max(self.device.host, self.seconds)  # the host waits
        return self.seconds - earlier.seconds


def test_an_observer_gets_start_and_end_times_of_phases() -> None:
    seen: list[str] = []

    @contextmanager
    def observe(name: str) -> Iterator[None]:
        seen.append(f"{name} begins")
        yield
        seen.append(f"{name} ends")

    def clock() -> float:
        seen.append("noted")
        return 0.0

    timers = PhaseTimers(clock=clock, observe=observe)
    with timers.phase("kl"):
        seen.append("work")
    assert seen == ["kl begins", "noted", "work", "noted", "kl ends"]


def test_device_time_is_assigned_to_the_phase_that_queued_it() -> None:
    device = Device()
    timers = PhaseTimers(clock=device.moment)
    with timers.phase("forward_backward"):
        device.queue(3.0)
        device.host += 0.5  # to queue it
    with timers.phase("optimizer"):
        device.queue(1.0)
    assert device.host == 0.5, "no phase waits for the device"
    assert timers.report_and_reset() == {"forward_backward": 3.0, "optimizer": 1.0}
    assert device.host == 4.0, "the report waits for all of them"


def test_idle_time_of_the_device_is_counted() -> None:
    device = Device()
    timers = PhaseTimers(clock=device.moment)
    with timers.phase("data"):
        device.host += 2.0
    with timers.phase("kl"):
        device.queue(1.0)
    assert timers.report_and_reset() == {"data": 2.0, "kl": 1.0}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:00:00:30", 30), ("00:03:45:00", 13_500), ("01:00:00:00", 86_400), ("10:23:59:59", 950_399), ("0:0:5:0", 300)],
)
def test_duration(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "03:45:00", "00:24:00:00", "00:00:60:00", "00:00:00:60", "1d", "-1:00:00:00"])
def test_a_duration_in_another_form_is_refused(text: str) -> None:
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


def test_run_timer_starts_at_the_known_start_of_the_run() -> None:
    clock = Clock()
    timer = RunTimer(max_time="00:00:01:00", started=clock.now - 60, clock=clock)
    timer.start_time()
    assert timer.stop_reason() is not None


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
