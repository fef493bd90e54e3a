"""Launcher of the ranks on this machine: starts them, forwards signals to them, and reports the one that failed first."""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
_SECONDS_TO_DIE = 5  # for killed processes, at most
_NO_LOOPBACK = (
    "the ranks of one machine need the loopback interface with the address 127.0.0.1, got none; bring it up "
    "(ip link set lo up) or use trainer.devices=1"
)
_REPORTED = (ranks.USAGE_ERROR, signals.ENDED_EARLY)  # statuses of ranks that record a message or have printed it
# Order of exit statuses as likely causes, lowest first: other signals are 0 too, errors 1. A rank that has ended early makes
# the others fail, because they miss it.
_LIKELY_CAUSE = {signals.ENDED_EARLY: -1, -signal.SIGTERM: 2, ranks.USAGE_ERROR: 0, 0: 0}
_PR_SET_CHILD_SUBREAPER = 36


class RanksEnded(Exception):
    """The ranks ended without success.

    Attributes:
        status: exit status for the process that started them: that of the rank that failed first, 85 if all ended early,
            128 + its number if a signal ended the run.
        message: why; empty if it was already printed.
        received: signals that this process received meanwhile.
    """

    def __init__(self, status: int, message: str, received: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.status, self.message, self.received = status, message, frozenset(received)


def spawn_ranks(
    count: int,
    command: Sequence[str],
    *,
    stop_signals: Sequence[str],
    payload: bytes = b"",
    output: Callable[[str], object] | None = None,
) -> None:
    """Start ``count`` ranks with these arguments of Python on this machine and wait for them; nothing is restarted.

    When a rank fails, the others are ended at once. Each rank gets as many threads as there are cores per rank, unless
    OMP_NUM_THREADS is set. Signals named in ``stop_signals`` are forwarded, and the ranks take as long as they need; a
    second SIGINT and other signals end them at once. Processes that the ranks leave behind are killed. The ranks rendezvous
    in an unnamed file, which disappears with the last of them, and listen only on the loopback interface. They can read
    ``payload`` from the file that OBJECTS_FILE names. ``output`` receives what they print; None if they print it
    themselves. A rank that ends with status 0 without :func:`ranks.confirm_end` has failed.

    Raises:
        RanksEnded: a rank failed, all ended early, or a signal ended the run.
        UserError: the loopback interface is down.
    """
    if rendezvous.loopback() is None:
        raise UserError(_NO_LOOPBACK)
    ranks.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # this process inherits the children of killed ranks, and ends them below
    with contextlib.ExitStack() as files:
        # unnamed files, which no cleanup of /tmp removes and which end with the last process
        store, objects, *errors = (os.memfd_create("nemo_kto") for _ in range(2 + count))
        for number in (store, objects, *errors):
            files.callback(os.close, number)
        Path(f"/proc/self/fd/{objects}").write_bytes(payload)
        printed = None if output is None else files.enter_context(_Printed(output))
        started: list[_Rank] = []
        try:
            with _forwarded(stop_signals, started) as arrived:
                with signals.blocked():
                    for rank, error in enumerate(errors):
                        inherited = {ranks.STORE_FILE: store, ranks.OBJECTS_FILE: objects, ranks.ERROR_FILE: error}
                        started.append(_start(rank, count, command, inherited, printed))
                for number in tuple(arrived):  # signals that another thread received during the start
                    _send(number, started)
                failed = _wait(started, printed)
        except _Ended as end:
            (number,) = end.args
            raise RanksEnded(128 + number, "", [number]) from None
        finally:
            _end_descendants(started, store=f"/proc/self/fd/{store}")
            if printed is not None:
                printed.pass_on()
        if failed:
            raise RanksEnded(*_report(_first(failed), count), arrived)


class _Printed(contextlib.AbstractContextManager["_Printed"]):
    """Pipe to which the ranks print, for a process whose output is not its file descriptors, such as a notebook's."""

    def __init__(self, output: Callable[[str], object]) -> None:
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._output, self._decoder = output, codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __exit__(self, *error: object) -> None:
        os.close(self._reading)
        os.close(self.writing)

    def pass_on(self) -> None:
        """Pass on what was printed since the last call."""
        with contextlib.suppress(BlockingIOError):
            while content := os.read(self._reading, 2**16):
                self._output(self._decoder.decode(content))


@dataclass(kw_only=True, eq=False)
class _Rank:
    number: int
    process: Popen[bytes]
    error_file: str  # where the rank writes the message with which it ends
    ended_ns: int = 0  # when its end was noticed, in ns since 1970

    @property
    def status(self) -> int:
        """Exit status; negative if a signal ended the rank."""
        return self.process.returncode

    @property
    def recorded(self) -> str:
        """Traceback of the rank, message of its UserError, or that it ended as it should."""
        with contextlib.suppress(OSError):
            return Path(self.error_file).read_text(encoding="utf-8", errors="replace")
        return ""

    @property
    def failed(self) -> bool:
        return self.status != 0 or self.recorded != ranks.ENDED


def _start(rank: int, count: int, command: Sequence[str], inherited: Mapping[str, int], printed: _Printed | None) -> _Rank:
    """Start a rank with the file descriptors that it inherits, by the environment variable that names them."""
    files = {name: f"/proc/self/fd/{number}" for name, number in inherited.items()}  # valid in both processes
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": rendezvous.LOCAL,  # required but unused: the ranks rendezvous in the file
        "MASTER_PORT": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count))),
        ranks.STARTED_BY: str(os.getpid()),
        ranks.STARTED_AT: str(ranks.started_at()),
        **files,
    }
    output = None if printed is None else printed.writing
    process = Popen(
        [sys.executable, *command],
        env={**os.environ, **_search_path(), **variables},
        start_new_session=True,
        pass_fds=[*inherited.values()],
        stdout=output,
        stderr=output,
    )
    return _Rank(number=rank, process=process, error_file=files[ranks.ERROR_FILE])


def _search_path() -> dict[str, str]:
    """Return PYTHONPATH if this package was found in the working directory (``python -m``), which ranks do not search."""
    root = str(Path(__file__).parents[2])
    if sys.path[0] != root:
        return {}
    return {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}


class _Ended(BaseException):
    """A signal, whose number is the argument, ends the launcher, and the ranks with it."""


@contextlib.contextmanager
def _forwarded(stop_signals: Sequence[str], started: Sequence[_Rank]) -> Iterator[set[int]]:
    """Forward stop signals to the ranks within the block; others, and a second SIGINT, end it. Yields those that arrived."""
    stopping = signals.numbers(stop_signals)
    arrived: set[int] = set()
    if threading.current_thread() is not threading.main_thread():  # which alone can handle signals
        yield arrived
        return

    def act(number: int, frame: FrameType | None) -> None:
        if number not in stopping or (number == signal.SIGINT and number in arrived):
            raise _Ended(number)
        if not arrived:
            signals.confirm(number)
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


def _wait(started: Sequence[_Rank], printed: _Printed | None) -> list[_Rank]:
    """Wait for all ranks to end and return those that failed, without those that are ended because one failed."""
    running, failed = list(started), list[_Rank]()
    deadline: float | None = None
    while running and (deadline is None or time.monotonic() < deadline):
        time.sleep(_POLL_SECONDS)
        if printed is not None:
            printed.pass_on()
        ended = [rank for rank in running if rank.process.poll() is not None]
        running = [rank for rank in running if rank not in ended]
        for rank in ended:
            rank.ended_ns = int(time.time()) * 10**9  # in whole seconds: a recorded error is often a consequence
            failed += [rank] if rank.failed else []
        if failed and deadline is None:
            # a rank that was asked to stop before the first step may be the only one that got the signal
            early = all(rank.status == signals.ENDED_EARLY for rank in failed)
            deadline = time.monotonic() + (_SECONDS_TO_FOLLOW if early else _SECONDS_TO_FAIL)
            _send(signal.SIGTERM, running if early else ())
    for rank in running:
        rank.process.kill()
    return failed


def _first(failed: Iterable[_Rank]) -> _Rank:
    """Return the rank whose failure caused the others; a killed rank is noticed only after the ranks that missed it."""

    def when_ns(rank: _Rank) -> int:  # ranks fail within milliseconds, and the ends of processes are noticed later
        with contextlib.suppress(OSError):
            if (written := os.stat(rank.error_file)).st_size:
                return written.st_mtime_ns
        return rank.ended_ns

    return min(failed, key=lambda rank: (_LIKELY_CAUSE.get(rank.status, rank.status >= 0), when_ns(rank)))


def _report(rank: _Rank, count: int) -> tuple[int, str]:
    """Return the exit status of the launcher, and which rank failed first and why."""
    who, status = f"rank {rank.number} of {count}", rank.status
    if status < 0:
        hint = " (out of memory?)" if status == -signal.SIGKILL else ""
        return 1, f"{who} was killed by {signal.Signals(-status).name}{hint}; the other ranks were ended"
    if status == 0:
        text = "ended with status 0 before the end of the run: code in it, such as a callback, has ended the process"
        return 1, f"{who} {text}; the other ranks were ended"
    recorded = "" if rank.recorded == ranks.ENDED else rank.recorded
    if status not in _REPORTED and recorded.startswith("Traceback"):
        return status, f"{who} failed; the other ranks were ended. Its error:\n\n{recorded}"
    if recorded or status in _REPORTED:  # a message, which names the rank if needed, or was printed by it
        return status, recorded
    return status, f"{who} ended with status {status}; the other ranks were ended. Its error is above."


def _end_descendants(started: Sequence[_Rank], *, store: str) -> None:
    """Kill the ranks and the processes they started, in a rank's session or with its environment, and wait for their end.

    No others, such as the ranks that another thread of this process has started.
    """
    sessions = {rank.process.pid for rank in started}
    inherited = {ranks.STARTED_BY: str(os.getpid()), ranks.STORE_FILE: store}.items()
    others = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) in sessions or inherited <= process.environ().items():
                others += [process] if process.pid not in sessions else []
                process.kill()
    deadline = time.monotonic() + _SECONDS_TO_DIE
    while any(rank.process.poll() is None for rank in started) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS / 5)
    psutil.wait_procs(others, timeout=max(0, deadline - time.monotonic()))  # or zombies would stay in a notebook
