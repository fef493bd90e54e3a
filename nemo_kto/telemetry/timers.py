"""Where the time of a step goes, and when the time of a run is up."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator

_DURATION = re.compile(r"(\d+):(\d{1,2}):(\d{1,2}):(\d{1,2})")


class PhaseTimers:
    """Wall-clock seconds by phase of a step, such as "reference", "kl" or "forward_backward".

    A phase that runs inside another is counted in both.
    """

    def __init__(
        self, *, synchronize: Callable[[], None] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Start with nothing measured.

        Args:
            synchronize: waits for the work queued on the device; without it the time of a kernel would be booked on the
                phase that happens to wait for it. None where nothing is ever queued.
            clock: seconds since some fixed moment.
        """
        self._synchronize = synchronize
        self._clock = clock
        self._seconds: dict[str, float] = {}

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return self._clock()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds that the block takes to phase ``name``, also where it raises."""
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
    match = _DURATION.fullmatch(text.strip())
    if match is not None:
        days, hours, minutes, seconds = (int(part) for part in match.groups())
        if hours < 24 and minutes < 60 and seconds < 60:
            return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    raise ValueError(f"a duration must be written DD:HH:MM:SS (days:hours:minutes:seconds), got {text!r}; e.g. 00:03:45:00")


class RunTimer:
    """Says when the time given to a run is over, the same on every rank."""

    def __init__(
        self,
        *,
        max_time: str | None,
        agree: Callable[[bool], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the limit; the clock starts with :meth:`start_time`.

        Args:
            max_time: DD:HH:MM:SS; None means that the run is never over.
            agree: turns this rank's answer into everybody's (say, a broadcast from rank 0); clocks of ranks differ, and
                a rank that stops before the others leaves them waiting. Not called without a limit.
            clock: seconds since some fixed moment.

        Raises:
            ValueError: ``max_time`` has another form.
        """
        self._limit = None if max_time is None else parse_duration(max_time)
        self._agree = agree
        self._clock = clock
        self._start: float | None = None

    def start_time(self) -> None:
        """Start the clock."""
        self._start = self._clock()

    def is_finished(self) -> bool:
        """True once the limit is reached. With ``agree`` this is a collective call.

        Raises:
            RuntimeError: the clock was not started.
        """
        if self._limit is None:
            return False
        if self._start is None:
            raise RuntimeError("start_time() must be called before is_finished()")
        finished = self._clock() - self._start >= self._limit
        return self._agree(finished) if self._agree is not None else finished
