"""Starts the ranks of a run on this machine, passes signals on to them, and says which one failed first."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from types import FrameType

import psutil

from nemo_kto.errors import UserError
from nemo_kto.processes import ranks, rendezvous, signals

_POLL_SECONDS = 0.05
_SECONDS_TO_FAIL = 0.2  # after the first failure, in which the rank that caused it may be seen to have ended too
_SECONDS_TO_FOLLOW = 10  # that the other ranks get to end by themselves where one was stopped
_NO_LOOPBACK = (
    "the ranks of one machine need the loopback interface with the address 127.0.0.1, got none; bring it up "
    "(ip link set lo up) or use trainer.devices=1"
)
_SAYS_WHY = (ranks.USAGE_ERROR, signals.ENDED_EARLY)  # statuses of ranks that leave a message for the user, or said it
# Other signals are 0 as well, errors 1. A rank that was stopped is missed by the others.
_LIKELY_CAUSE = {signals.ENDED_EARLY: -1, -signal.SIGTERM: 2, ranks.USAGE_ERROR: 0}
_PR_SET_CHILD_SUBREAPER = 36


def spawn_ranks(count: int, command: Sequence[str], *, stop_signals: Sequence[str]) -> None:
    """Start ``count`` ranks of a Python command on this machine and wait for them; nothing is restarted.

    When one fails, the others are ended at once. The processors are shared: each rank gets as many threads as there are
    processors a rank, unless OMP_NUM_THREADS says otherwise.

    Signals that ask the run to stop are passed on, and the ranks take as long as they need. A second SIGINT ends them at
    once, and so do signals that are not among ``stop_signals``.

    They meet in a file without a name, which is gone with the last of them, and listen on the loopback interface only.
    What they leave behind is killed; processes that this one had started otherwise are spared.

    Args:
        count: number of ranks.
        command: arguments of the Python interpreter.
        stop_signals: names of the signals that ask the run to stop, see ``signals.NAMES``.

    Raises:
        SystemExit: a rank failed (with its status), all ended early (85), a signal ended the run (128 + its number), or
            the loopback interface is down (2, with a message).
    """
    if rendezvous.loopback() is None:
        ranks.fail(UserError(_NO_LOOPBACK), world=None)
    ranks.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a killed rank leaves behind becomes ours, and is ended below
    with contextlib.ExitStack() as files:
        store, *errors = (files.enter_context(_file_in_memory()) for _ in range(1 + count))
        started: list[_Rank] = []
        try:
            with _passing_on(stop_signals, started) as arrived:
                with signals.blocked():
                    for rank, error in enumerate(errors):
                        started.append(_start(rank, count, command, store=store, error=error))
                for number in tuple(arrived):  # meanwhile, by way of another thread
                    _send(number, started)
                failures = _wait(started)
        except _Ended as end:
            sys.exit(128 + end.number)
        finally:
            _end_descendants(started)
        if failures:
            sys.exit(_report(_first(failures), count))


@contextlib.contextmanager
def _file_in_memory() -> Iterator[int]:
    """The number of an open file without a name: it cannot be cleaned out of /tmp, and ends with the last process."""
    number = os.memfd_create("nemo_kto")
    try:
        yield number
    finally:
        os.close(number)


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """A rank that was started here; ``error_file`` is where it leaves the message with which it ends."""

    number: int
    process: Popen[bytes]
    error_file: str


def _start(rank: int, count: int, command: Sequence[str], *, store: int, error: int) -> _Rank:
    """``store``, ``error``: numbers of open files, which the rank inherits: one of all ranks, one of its own."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // count))
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": rendezvous.LOCAL,  # nothing listens there: they meet in the file
        "MASTER_PORT": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
        ranks.ERROR_FILE: _path_of(error),
        ranks.STARTED_BY: str(os.getpid()),
        ranks.STARTED_AT: str(ranks.started_at()),
        ranks.STORE_FILE: _path_of(store),
    }
    environment = {**os.environ, **_search_path(), **variables}
    process = Popen([sys.executable, *command], env=environment, start_new_session=True, pass_fds=(store, error))
    return _Rank(number=rank, process=process, error_file=_path_of(error))


def _search_path() -> dict[str, str]:
    """PYTHONPATH, if this package was found in the working directory (``python -m``), which the ranks do not search."""
    root = str(Path(__file__).parents[2])
    if sys.path[0] != root:
        return {}
    return {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}


def _path_of(number: int) -> str:
    """A path to an open file, in this process and in those that inherit it."""
    return f"/proc/self/fd/{number}"


class _Ended(BaseException):
    """A signal ends the launcher and with it the ranks."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def _passing_on(stop_signals: Sequence[str], started: Sequence[_Rank]) -> Iterator[set[int]]:
    """Within the block the signals that ask for a stop go to the ranks; the others, and a second SIGINT, end the block.

    Gives the signals that have arrived.
    """
    stopping = signals.numbers(stop_signals)
    arrived: set[int] = set()

    def act(number: int, frame: FrameType | None) -> None:
        if number not in stopping or (number == signal.SIGINT and number in arrived):
            raise _Ended(number)
        arrived.add(number)
        _send(number, started)

    others = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handled = {*stopping, *(number for number in others if signal.getsignal(number) != signal.SIG_IGN)}  # nohup's stay so
    before = {number: signal.signal(number, act) for number in handled}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(number: int, to: Iterable[_Rank]) -> None:
    for rank in to:
        rank.process.send_signal(number)


def _wait(started: Sequence[_Rank]) -> list[_Failure]:
    """Wait for the end of all ranks. What failed, when one failed; the others are ended, and are not among it."""
    running, failures = list(started), list[_Failure]()
    patience: float | None = None
    while running and (patience is None or time.monotonic() < patience):
        time.sleep(_POLL_SECONDS)
        ended = [rank for rank in running if rank.process.poll() is not None]
        running = [rank for rank in running if rank not in ended]
        failures += [_Failure.of(rank) for rank in ended if rank.process.returncode != 0]
        if failures and patience is None:
            # a rank that was asked to stop before the first step may be the only one that knows
            early = all(failure.exitcode == signals.ENDED_EARLY for failure in failures)
            patience = time.monotonic() + (_SECONDS_TO_FOLLOW if early else _SECONDS_TO_FAIL)
            _send(signal.SIGTERM, running if early else ())
    for rank in running:
        rank.process.kill()
    return failures


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """A rank that failed. ``exitcode`` is negative where a signal ended it, ``timestamp`` in seconds since 1970."""

    local_rank: int
    exitcode: int
    error_file: str
    timestamp: int

    @classmethod
    def of(cls, rank: _Rank) -> _Failure:
        """That of a rank that has ended."""
        status = rank.process.returncode
        return cls(local_rank=rank.number, exitcode=status, error_file=rank.error_file, timestamp=int(time.time()))


def _first(failures: Iterable[_Failure]) -> _Failure:
    """The failure that caused the others.

    A rank that was killed is noticed late, after those that missed it; one that was ended by SIGTERM was not the cause.
    """
    return min(failures, key=lambda failure: (_LIKELY_CAUSE.get(failure.exitcode, failure.exitcode >= 0), _when(failure)))


def _when(failure: _Failure) -> int:
    """Nanoseconds; ranks fail within milliseconds of each other, and the ends of processes are noticed later."""
    with contextlib.suppress(OSError):
        if (written := os.stat(failure.error_file)).st_size:
            return written.st_mtime_ns
    return failure.timestamp * 10**9


def _report(failure: _Failure, count: int) -> int:
    """Say which rank failed first and why; the exit status to end with."""
    who, code = f"nemo-kto: rank {failure.local_rank} of {count}", failure.exitcode
    if code < 0:
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        print(f"{who} was killed by {signal.Signals(-code).name}{hint}; the other ranks were ended", file=sys.stderr)
        return 1
    recorded = _recorded(failure.error_file)
    if recorded and (code in _SAYS_WHY or not recorded.startswith("Traceback")):  # words, which name the rank if need be
        print(f"nemo-kto: {recorded}", file=sys.stderr)
    elif recorded:
        print(f"{who} failed; the other ranks were ended. Its error:\n\n{recorded}", file=sys.stderr)
    elif code not in _SAYS_WHY:
        print(f"{who} ended with status {code}; the other ranks were ended. Its error is above.", file=sys.stderr)
    return code


def _recorded(error_file: str) -> str:
    """The traceback of a rank, or the message of its UserError; empty if it left neither."""
    with contextlib.suppress(OSError):
        return Path(error_file).read_text(encoding="utf-8", errors="replace")
    return ""


def _end_descendants(started: Sequence[_Rank]) -> None:
    """Kill the ranks and what they started, but nothing else that descends from this process.

    What a rank starts is in its session or has its environment, also when the rank is gone; a daemon that has left both
    lives on.
    """
    sessions = {rank.process.pid for rank in started}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) in sessions or process.environ().get(ranks.STARTED_BY) == str(os.getpid()):
                process.kill()
