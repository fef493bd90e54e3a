"""Phases of a step and the time of a run, with a simulated clock."""

from __future__ import annotations

import pytest

from nemo_kto.telemetry.watch import PhaseTimers, RunTimer, StopReason, parse_duration


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
