"""Phases of a step, and the time of a run, on a clock that the test turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nemo_kto.telemetry.timers import PhaseTimers, RunTimer, parse_duration


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_add_up_and_are_reset_by_the_report() -> None:
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


def test_an_observer_sees_a_phase_begin_and_end_with_what_is_queued() -> None:
    seen: list[str] = []

    @contextmanager
    def observe(name: str) -> Iterator[None]:
        seen.append(f"{name} begins")
        yield
        seen.append(f"{name} ends")

    timers = PhaseTimers(synchronize=lambda: seen.append("waited"), observe=observe)
    with timers.phase("kl"):
        seen.append("work")
    assert seen == ["kl begins", "waited", "work", "waited", "kl ends"]


def test_work_queued_on_the_device_is_booked_on_the_phase_that_queued_it() -> None:
    clock, queued = Clock(), [0.0]

    def synchronize() -> None:
        clock.now += queued[0]
        queued[0] = 0.0

    timers = PhaseTimers(synchronize=synchronize, clock=clock)
    with timers.phase("forward_backward"):
        queued[0] = 3.0
    with timers.phase("optimizer"):
        clock.now += 1.0
    assert timers.report_and_reset() == {"forward_backward": 3.0, "optimizer": 1.0}


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


def test_run_timer_is_finished_at_the_limit() -> None:
    clock = Clock()
    timer = RunTimer(max_time="00:00:01:00", clock=clock)
    timer.start_time()
    clock.now += 59.9
    assert timer.is_finished() is False
    clock.now += 0.1
    assert timer.is_finished() is True


def test_run_timer_gives_the_answer_that_the_ranks_agreed_on() -> None:
    clock, asked = Clock(), []

    def agree(own: bool) -> bool:
        asked.append(own)
        return True

    timer = RunTimer(max_time="00:01:00:00", agree=agree, clock=clock)
    timer.start_time()
    assert timer.is_finished() is True
    assert asked == [False]


def test_run_timer_without_a_limit_never_ends_and_asks_nobody() -> None:
    def agree(own: bool) -> bool:
        raise AssertionError("a collective call that is not needed")

    assert RunTimer(max_time=None, agree=agree).is_finished() is False


def test_run_timer_must_be_started() -> None:
    with pytest.raises(RuntimeError, match="start_time"):
        RunTimer(max_time="00:00:00:01").is_finished()
