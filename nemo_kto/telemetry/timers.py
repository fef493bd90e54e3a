"""Where the time of a step goes, and when the time of a run is up."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

_DURATION = re.compile(r"(\d+):(\d{1,2}):(\d{1,2}):(\d{1,2})")


@dataclass(kw_only=True, eq=False)
class PhaseTimers:
    """Wall-clock seconds by phase of a step, such as "reference", "kl" or "forward_backward".

    A phase that runs inside another is counted in both.

    Attributes:
        synchronize: waits for the work queued on the device; without it the time of a kernel would be booked on the phase
            that happens to wait for it. None where nothing is ever queued.
        observe: gives a context for each phase, which begins and ends with it.
        clock: seconds since some fixed moment.
    """

    synchronize: Callable[[], None] | None = None
    observe: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def _now(self) -> float:
        if self.synchronize is not None:
            self.synchronize()
        return self.clock()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds that the block takes to phase ``name``, also where it raises."""
        with self.observe(name):
            start = self._now()
            try:
                yield
            finally:
                self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start

    def report_and_reset(self) -> dict[str, float]:
        """Seconds by phase since the last report, in the order in which the phases first ran."""
        report, self._seconds = self._seconds, {}
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


@dataclass(kw_only=True, eq=False)
class RunTimer:
    """Says when the time given to a run is over, the same on every rank.

    Attributes:
        max_time: DD:HH:MM:SS; None means that the run is never over.
        agree: turns this rank's answer into everybody's (say, a broadcast from rank 0); clocks of ranks differ, and a rank
            that stops before the others leaves them waiting. Not called without a limit.
        clock: seconds since some fixed moment.

    Raises:
        ValueError: ``max_time`` has another form.
    """

    max_time: str | None
    agree: Callable[[bool], bool] | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._limit = None if self.max_time is None else parse_duration(self.max_time)
        self._start: float | None = None

    def start_time(self) -> None:
        """Start the clock."""
        self._start = self.clock()

    def is_finished(self) -> bool:
        """True once the limit is reached. With ``agree`` this is a collective call.

        Raises:
            RuntimeError: the clock was not started.
        """
        if self._limit is None:
            return False
        if self._start is None:
            raise RuntimeError("start_time() must be called before is_finished()")
        finished = self.clock() - self._start >= self._limit
        return self.agree(finished) if self.agree is not None else finished
