"""Signals that ask a run to stop.

Before there is anything to save, a signal raises :class:`Stopped` in the running code. Inside :func:`deferred` it is only
recorded: the ranks check for it at points where all of them can stop together (see ``telemetry.watch.RunTimer``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

NAMES = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGUSR2")  # signals that can be configured to stop a run
ENDED_EARLY = 85  # exit status of a run that was asked to stop; the same command resumes it
_NOTHING_SAVED = "before the first step, with nothing to save; start the same command again"


class Stopped(BaseException):
    """The run was asked to stop. The message is for the user; it is empty if everything has been printed already.

    Not a subclass of Exception, because libraries catch those and continue.
    """


@dataclass(eq=False)
class _Listener:
    process: int = 0
    first: int = 0  # number of the first signal
    deferred: bool = False
    raised: Stopped | None = None
    has_launcher: bool = False


_listener = _Listener()


def numbers(names: Sequence[str]) -> list[signal.Signals]:
    return [signal.Signals[name] for name in names]


def listen(names: Sequence[str], *, has_launcher: bool) -> None:
    """Make the named signals, also those that arrived while blocked, stop the run; no effect outside the main thread.

    Without a launcher, rank 0 confirms the signal, and a second SIGINT raises KeyboardInterrupt at once.
    """
    global _listener
    if threading.current_thread() is not threading.main_thread():
        return
    _listener = _Listener(process=os.getpid(), has_launcher=has_launcher)
    for number in numbers(names):
        signal.signal(number, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers(NAMES))


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Block signals until the end of the block; a process started in it has them blocked until it listens."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers(NAMES))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Only record the signals that arrive in the block; the code in it checks for them with :func:`received`.

    If :class:`Stopped` leaves the block, signals stay deferred: the run ends, and its launcher may end this rank too.
    """
    before, _listener.deferred = _listener.deferred, True
    _listener.raised = None  # a Stopped raised earlier was caught, or this line would not be reached
    try:
        yield
    except Stopped:
        before = True
        raise
    finally:
        _listener.deferred = before


def confirm(number: int) -> None:
    """Print that a stop signal was received; for signal handlers, which may interrupt a print in the middle of a line."""
    text = f"nemo-kto: {signal.Signals(number).name} received; the run stops after this step, and saves its state\n"
    with contextlib.suppress(OSError):  # the terminal may be closed
        os.write(2, text.encode())


def received() -> int:
    """Return the number of the first signal that has arrived; 0 if none has."""
    return _listener.first


def raised() -> Stopped | None:
    """Return the exception raised outside :func:`deferred`, if any: it may have caused another error raised later."""
    return _listener.raised


def _note(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _listener.process:  # a process forked from a rank: the rank decides, and may end it with SIGTERM
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        return
    if number == signal.SIGINT and _listener.first == signal.SIGINT and not _listener.has_launcher:
        raise KeyboardInterrupt
    # a launcher has confirmed the signal, or sends one itself to ranks that it no longer needs
    confirms = not _listener.has_launcher and os.environ.get("RANK", "0") == "0"
    if confirms and _listener.deferred and not _listener.first:
        confirm(number)
    _listener.first = _listener.first or number
    if not _listener.deferred and _listener.raised is None:
        _listener.raised = Stopped(f"stopped by {signal.Signals(number).name} {_NOTHING_SAVED}")
        raise _listener.raised
