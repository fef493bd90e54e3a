"""Timers for the phases of a step, and the time limit of a run."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

_DURATION = re.compile(r"(\d+):(\d{1,2}):(\d{1,2}):(\d{1,2})")


@dataclass(kw_only=True, eq=False)
class PhaseTimers:
    """Wall-clock seconds of the phases of a step, such as "reference"; the time of a nested phase is counted in both phases.

    With a device clock, a time is only reached when the device has finished the work queued before, so that the time of a
    kernel belongs to the phase that queued it.
    """

    observe: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext  # context for each phase, by name
    clock: Callable[[], Any] = time.perf_counter  # the difference of two times is in seconds

    def __post_init__(self) -> None:
        self._spans: list[tuple[str, Any, Any]] = []  # (name, begin, end)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the duration of the block to phase ``name``, even if the block raises."""
        with self.observe(name):
            begin = self.clock()
            try:
                yield
            finally:
                self._spans.append((name, begin, self.clock()))

    def report_and_reset(self) -> dict[str, float]:
        """Return the seconds by phase since the last report, in order of their first end; waits for the device."""
        spans, self._spans = self._spans, []
        report: dict[str, float] = {}
        for name, begin, end in spans:
            report[name] = report.get(name, 0.0) + (end - begin)
        return report


def parse_duration(text: str) -> int:
    """Return the seconds of a duration DD:HH:MM:SS, such as "00:03:45:00"; ValueError for another format or range."""
    if match := _DURATION.fullmatch(text.strip()):
        days, hours, minutes, seconds = map(int, match.groups())
        if hours < 24 and minutes < 60 and seconds < 60:
            return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    raise ValueError(f"a duration must be written DD:HH:MM:SS (days:hours:minutes:seconds), got {text!r}; e.g. 00:03:45:00")


def duration_text(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours: 12 s, 12 min, 3.4 h."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


class StopReason(NamedTuple):
    """Reason why a run ends before its last step."""

    text: str
    early: bool  # the run must end at once, with a checkpoint but without validation and export


@dataclass(kw_only=True, eq=False)
class RunTimer:
    """Timer that decides, equally on all ranks, whether a run must stop because of its time limit or a signal.

    Raises ValueError if ``max_time`` has another format.
    """

    max_time: str | None  # time limit as DD:HH:MM:SS; None for no limit
    started: float | None = None  # start time by ``clock``; None for the time at which :meth:`start_time` is called
    received: Callable[[], int] | None = None  # number of the stop signal that this rank received, or 0
    agree: Callable[[int], int] | None = None  # maximum over all ranks, so that all stop; None for a single rank
    requeue: bool = False  # the job is requeued at once, so that the run also ends early at the time limit
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._limit = None if self.max_time is None else parse_duration(self.max_time)

    def start_time(self) -> None:
        """Set the start time to now, unless ``started`` is already set."""
        if self.started is None:
            self.started = self.clock()

    def stop_reason(self) -> StopReason | None:
        """Return why the run must stop now, or None; collective if ``agree`` is set.

        Raises RuntimeError if there is a time limit, but no start time.
        """
        number = self.received() if self.received is not None else 0
        time_is_over = False
        if not number and self._limit is not None:  # a signal takes precedence, because it leaves less time
            if self.started is None:
                raise RuntimeError("start_time() must be called before stop_reason()")
            time_is_over = self.clock() - self.started >= self._limit
        reason = 2 * number or int(time_is_over)
        if self.agree is not None:
            reason = self.agree(reason)
        if reason == 0:
            return None
        if reason == 1:
            return StopReason(f"max_time={self.max_time}", early=self.requeue)
        return StopReason(signal.Signals(reason // 2).name, early=True)
