"""Signals that ask a run to stop.

Before there is anything to save a signal raises :class:`Stopped` where the program is. Inside :func:`deferred` it is only
noted: the ranks ask for it at points where all of them can leave together (see ``telemetry.timers.RunTimer``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

NAMES = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGUSR2")  # that may ask a run to stop
ENDED_EARLY = 85  # exit status of a run that was asked to stop; the same command resumes it
_NOTHING_SAVED = "before the first step, so that there was nothing to save; start the same command again"


class Stopped(BaseException):
    """The run was asked to stop. The message is for the user; it is empty where everything has been said.

    No Exception, because libraries catch those and go on.
    """


@dataclass(eq=False)
class _Listener:
    """What has arrived in this process."""

    process: int = 0
    first: int = 0  # number of the first signal
    deferred: bool = False
    raised: Stopped | None = None
    ends_at_second_interrupt: bool = True


_listener = _Listener()


def numbers(names: Sequence[str]) -> list[signal.Signals]:
    """Of signals by their names."""
    return [signal.Signals[name] for name in names]


def listen(names: Sequence[str], *, ends_at_second_interrupt: bool) -> None:
    """Let the signals of these names stop the run in this process; only the main thread can, others do nothing.

    Those that arrived while they were blocked count.

    Args:
        names: among :data:`NAMES`.
        ends_at_second_interrupt: a second SIGINT raises KeyboardInterrupt at once.
    """
    global _listener
    if threading.current_thread() is not threading.main_thread():
        return
    _listener = _Listener(process=os.getpid(), ends_at_second_interrupt=ends_at_second_interrupt)
    for number in numbers(names):
        signal.signal(number, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers(NAMES))


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Let signals wait until the end of the block; a process that is started in it has them wait until it listens."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers(NAMES))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Only note the signals that arrive in the block; who runs in it asks for them with :func:`received`.

    A block that is left by :class:`Stopped` ends the run. Signals stay deferred then: where another rank has ended before,
    the one that started them ends this one too.
    """
    before, _listener.deferred = _listener.deferred, True
    _listener.raised = None  # nobody left because of it, or this would not be reached
    try:
        yield
    except Stopped:
        before = True
        raise
    finally:
        _listener.deferred = before


def received() -> int:
    """Number of the first signal that has arrived; 0 if none has."""
    return _listener.first


def raised() -> Stopped | None:
    """What was raised where nothing is saved, if it was: another error that is raised after it there may have come of it."""
    return _listener.raised


def _note(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _listener.process:
        _in_helper(number)
        return
    if number == signal.SIGINT and _listener.first == signal.SIGINT and _listener.ends_at_second_interrupt:
        raise KeyboardInterrupt
    _listener.first = _listener.first or number
    if not _listener.deferred and _listener.raised is None:
        _listener.raised = Stopped(f"stopped by {signal.Signals(number).name} {_NOTHING_SAVED}")
        raise _listener.raised


def _in_helper(number: int) -> None:
    """A process that was forked from a rank leaves the decision to the rank, which may end it with SIGTERM."""
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
