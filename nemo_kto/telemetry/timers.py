"""Where the time of a step goes, and when the time of a run is up."""

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
    """Wall-clock seconds by phase of a step, such as "reference", "kl" or "forward_backward".

    A phase that runs inside another is counted in both.

    Attributes:
        observe: gives a context for each phase, which begins and ends with it.
        clock: the present moment, of which earlier ones are subtracted: seconds, or that of a device, which has not come yet
            while the device has work left. The time of a kernel then belongs to the phase that queued it.
    """

    observe: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext
    clock: Callable[[], Any] = time.perf_counter

    def __post_init__(self) -> None:
        self._spans: list[tuple[str, Any, Any]] = []  # name, begin and end

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds that the block takes to phase ``name``, also where it raises."""
        with self.observe(name):
            begin = self.clock()
            try:
                yield
            finally:
                self._spans.append((name, begin, self.clock()))

    def report_and_reset(self) -> dict[str, float]:
        """Seconds by phase since the last report, in the order in which the phases first ended; waits until all are over."""
        spans, self._spans = self._spans, []
        report: dict[str, float] = {}
        for name, begin, end in spans:
            report[name] = report.get(name, 0.0) + (end - begin)
        return report


def parse_duration(text: str) -> int:
    """Seconds of a duration written DD:HH:MM:SS, such as "00:03:45:00".

    Raises:
        ValueError: the text has another form, or hours, minutes or seconds are out of range.
    """
    if match := _DURATION.fullmatch(text.strip()):
        days, hours, minutes, seconds = map(int, match.groups())
        if hours < 24 and minutes < 60 and seconds < 60:
            return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    raise ValueError(f"a duration must be written DD:HH:MM:SS (days:hours:minutes:seconds), got {text!r}; e.g. 00:03:45:00")


def duration_text(seconds: float) -> str:
    """A duration in the unit that suits it: 12 s, 12 min, 3.4 h."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


class StopReason(NamedTuple):
    """Why a run ends before its last step.

    Attributes:
        text: in words.
        early: at once and with as little as possible: a checkpoint of the last step, no validation, no export.
    """

    text: str
    early: bool


@dataclass(kw_only=True, eq=False)
class RunTimer:
    """Says when a run must stop, the same on every rank: because its time is over, or because it was asked to.

    Attributes:
        max_time: DD:HH:MM:SS; None for no limit.
        started: when the time began, by ``clock``; None for the moment of :meth:`start_time`.
        received: the number of the signal that asked this rank to stop; 0 while none has.
        agree: the largest of what the ranks answer; they leave together, or some would wait for others. None where there
            is one rank.
        requeue: the run is started again at once, so that it ends early when its time is over too.
        clock: seconds since some fixed moment.

    Raises:
        ValueError: ``max_time`` has another form.
    """

    max_time: str | None
    started: float | None = None
    received: Callable[[], int] | None = None
    agree: Callable[[int], int] | None = None
    requeue: bool = False
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._limit = None if self.max_time is None else parse_duration(self.max_time)

    def start_time(self) -> None:
        """Start the clock, unless it is known when the time began."""
        if self.started is None:
            self.started = self.clock()

    def stop_reason(self) -> StopReason | None:
        """Why the run must stop now; None if it need not. With ``agree`` this is a collective call.

        Raises:
            RuntimeError: there is a limit, and the clock was not started.
        """
        number = self.received() if self.received is not None else 0
        answer = 2 * number or int(self._time_is_over())  # a signal leaves less time
        if self.agree is not None:
            answer = self.agree(answer)
        if answer == 0:
            return None
        if answer == 1:
            return StopReason(f"max_time={self.max_time}", early=self.requeue)
        return StopReason(signal.Signals(answer // 2).name, early=True)

    def _time_is_over(self) -> bool:
        if self._limit is None:
            return False
        if self.started is None:
            raise RuntimeError("start_time() must be called before stop_reason()")
        return self.clock() - self.started >= self._limit
