"""Launcher of the ranks on this machine: starts them, forwards signals to them, and reports the one that failed first."""

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
_SECONDS_TO_FAIL = 0.2  # after the first failure, so that the rank that caused it is seen to have ended too
_SECONDS_TO_FOLLOW = 10  # for the other ranks to end by themselves after one has stopped early
_NO_LOOPBACK = (
    "the ranks of one machine need the loopback interface with the address 127.0.0.1, got none; bring it up "
    "(ip link set lo up) or use trainer.devices=1"
)
_SAYS_WHY = (ranks.USAGE_ERROR, signals.ENDED_EARLY)  # statuses of ranks that leave a message or have printed it
# Order of exit statuses as likely causes, lowest first: other signals are 0 too, errors 1. A rank that has ended early makes
# the others fail, because they miss it.
_LIKELY_CAUSE = {signals.ENDED_EARLY: -1, -signal.SIGTERM: 2, ranks.USAGE_ERROR: 0}
_PR_SET_CHILD_SUBREAPER = 36


def spawn_ranks(count: int, command: Sequence[str], *, stop_signals: Sequence[str]) -> None:
    """Start ``count`` ranks of a Python command on this machine and wait for them; nothing is restarted.

    When a rank fails, the others are ended at once. The CPU cores are divided among the ranks: each gets as many threads as
    there are cores per rank, unless OMP_NUM_THREADS is set.

    Signals that ask the run to stop are forwarded, and the ranks take as long as they need. A second SIGINT ends them at
    once, and so do signals that are not among ``stop_signals``.

    The ranks rendezvous in an unnamed file, which disappears with the last of them, and listen only on the loopback
    interface. Processes that the ranks leave behind are killed; other child processes of this process are spared.

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
    ranks.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # this process inherits the children of killed ranks, and ends them below
    with contextlib.ExitStack() as files:
        store, *errors = (files.enter_context(_file_in_memory()) for _ in range(1 + count))
        started: list[_Rank] = []
        try:
            with _passing_on(stop_signals, started) as arrived:
                with signals.blocked():
                    for rank, error in enumerate(errors):
                        started.append(_start(rank, count, command, store=store, error=error))
                for number in tuple(arrived):  # signals that another thread received during the start
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
    """Yield the descriptor of an unnamed file, which no cleanup of /tmp removes and which ends with the last process."""
    number = os.memfd_create("nemo_kto")
    try:
        yield number
    finally:
        os.close(number)


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """A rank that was started by this process; it leaves the message with which it ends in ``error_file``."""

    number: int
    process: Popen[bytes]
    error_file: str


def _start(rank: int, count: int, command: Sequence[str], *, store: int, error: int) -> _Rank:
    """Start a rank, which inherits the descriptors ``store``, shared by all ranks, and ``error``, its own."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // count))
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": rendezvous.LOCAL,  # required but unused: the ranks rendezvous in the file
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
    """Return PYTHONPATH if this package was found in the working directory (``python -m``), which ranks do not search."""
    root = str(Path(__file__).parents[2])
    if sys.path[0] != root:
        return {}
    return {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}


def _path_of(number: int) -> str:
    """Return a path to an open file, valid in this process and in those that inherit the descriptor."""
    return f"/proc/self/fd/{number}"


class _Ended(BaseException):
    """A signal ends the launcher, and the ranks with it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def _passing_on(stop_signals: Sequence[str], started: Sequence[_Rank]) -> Iterator[set[int]]:
    """Forward the signals that ask for a stop to the ranks within the block; others, and a second SIGINT, end the block.

    Yields the set of signals that have arrived.
    """
    stopping = signals.numbers(stop_signals)
    arrived: set[int] = set()

    def act(number: int, frame: FrameType | None) -> None:
        if number not in stopping or (number == signal.SIGINT and number in arrived):
            raise _Ended(number)
        arrived.add(number)
        _send(number, started)

    others = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handled = {*stopping, *(number for number in others if signal.getsignal(number) != signal.SIG_IGN)}  # not under nohup
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
    """Wait for all ranks to end and return the failures; ranks that are ended because one failed are not among them."""
    running, failures = list(started), list[_Failure]()
    patience: float | None = None
    while running and (patience is None or time.monotonic() < patience):
        time.sleep(_POLL_SECONDS)
        ended = [rank for rank in running if rank.process.poll() is not None]
        running = [rank for rank in running if rank not in ended]
        failures += [_Failure.of(rank) for rank in ended if rank.process.returncode != 0]
        if failures and patience is None:
            # a rank that was asked to stop before the first step may be the only one that got the signal
            early = all(failure.exitcode == signals.ENDED_EARLY for failure in failures)
            patience = time.monotonic() + (_SECONDS_TO_FOLLOW if early else _SECONDS_TO_FAIL)
            _send(signal.SIGTERM, running if early else ())
    for rank in running:
        rank.process.kill()
    return failures


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """A rank that failed. ``exitcode`` is negative if a signal ended it; ``timestamp`` is in seconds since 1970."""

    local_rank: int
    exitcode: int
    error_file: str
    timestamp: int

    @classmethod
    def of(cls, rank: _Rank) -> _Failure:
        """Return the failure of a rank that has ended."""
        status = rank.process.returncode
        return cls(local_rank=rank.number, exitcode=status, error_file=rank.error_file, timestamp=int(time.time()))


def _first(failures: Iterable[_Failure]) -> _Failure:
    """Return the failure that caused the others.

    A killed rank is noticed only after the ranks that missed it; a rank that was ended by SIGTERM was not the cause.
    """
    return min(failures, key=lambda failure: (_LIKELY_CAUSE.get(failure.exitcode, failure.exitcode >= 0), _when(failure)))


def _when(failure: _Failure) -> int:
    """Return the time of a failure in ns: ranks fail within milliseconds, and the ends of processes are noticed later."""
    with contextlib.suppress(OSError):
        if (written := os.stat(failure.error_file)).st_size:
            return written.st_mtime_ns
    return failure.timestamp * 10**9


def _report(failure: _Failure, count: int) -> int:
    """Print which rank failed first and why, and return the exit status of the launcher."""
    who, code = f"nemo-kto: rank {failure.local_rank} of {count}", failure.exitcode
    if code < 0:
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        print(f"{who} was killed by {signal.Signals(-code).name}{hint}; the other ranks were ended", file=sys.stderr)
        return 1
    recorded = _recorded(failure.error_file)
    if recorded and (code in _SAYS_WHY or not recorded.startswith("Traceback")):  # a message, which names the rank if needed
        print(f"nemo-kto: {recorded}", file=sys.stderr)
    elif recorded:
        print(f"{who} failed; the other ranks were ended. Its error:\n\n{recorded}", file=sys.stderr)
    elif code not in _SAYS_WHY:
        print(f"{who} ended with status {code}; the other ranks were ended. Its error is above.", file=sys.stderr)
    return code


def _recorded(error_file: str) -> str:
    """Return the traceback of a rank, or the message of its UserError; empty if it left neither."""
    with contextlib.suppress(OSError):
        return Path(error_file).read_text(encoding="utf-8", errors="replace")
    return ""


def _end_descendants(started: Sequence[_Rank]) -> None:
    """Kill the ranks and the processes they started, but no other descendants of this process.

    A process started by a rank is in the rank's session or has its environment, even if the rank has ended; a daemon that
    has left both survives.
    """
    sessions = {rank.process.pid for rank in started}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) in sessions or process.environ().get(ranks.STARTED_BY) == str(os.getpid()):
                process.kill()
