"""Watchdog thread of each rank: finds the rank that the others wait for, and aborts them with its name, phase and stack.

Nothing is sent in normal operation: each rank only checks the store for a question every few seconds. A rank whose main
thread has waited in one collective for most of the timeout posts a question, all ranks answer with their current state
(:mod:`nemo_kto.processes.hangs`), and the verdict is distributed through the store. A rank that does not answer has ended or
is stopped. Messages in the store are JSON; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from nemo_kto.device import device
from nemo_kto.processes import hangs, ranks

Result = TypeVar("Result")

WAIT_FRACTION = 0.75  # of the timeout, spent in one collective: then the rank starts an investigation
PATIENCE_SECONDS = 24 * 3600.0  # the same limit for a rank that waits through the store while another one works long
_ANSWER_FRACTION = 0.15  # of the timeout: how long a rank has to answer, at most _ANSWER_SECONDS
_ANSWER_SECONDS = 30.0
_TICKS = 40  # checks of the store per timeout, at least one in _TICK_SECONDS
_TICK_SECONDS = 5.0
_LEAVE_SECONDS = 5.0  # how long the process that holds the store stays for the others at the end
_REMEDY = "the timeout is trainer.timeout_minutes ({minutes} min); raise it if work of one rank takes longer"
# Messages by which torch reports that another rank is gone or late, in errors of unspecific types.
_CONNECTION = re.compile(r"gloo|NCCL|[Cc]onnection (was )?(likely )?(closed|reset|refused)|Broken pipe|[Tt]imed out waiting")


def is_lost_connection(error: BaseException) -> bool:
    """Return whether an error of torch means that another rank is gone or late."""
    of_torch = isinstance(error, RuntimeError) and _CONNECTION.search(str(error)) is not None
    return of_torch or isinstance(error, dist.DistError)


class StoreLost(RuntimeError):
    """The store does not answer.

    Attributes:
        caller: the thread that still waits for the answer; None if the call raised an error instead.
    """

    def __init__(self, reason: str, *, caller: threading.Thread | None) -> None:
        super().__init__(reason)
        self.caller = caller


def within(seconds: float, action: Callable[[], Result]) -> Result:
    """Run an action with a time limit: torch's store calls may wait forever for a stopped or foreign process.

    Returns:
        The result of the action.

    Raises:
        StoreLost: the action did not return in time, or raised an error.
    """
    results: list[Result] = []
    problems: list[Exception] = []

    def run() -> None:
        try:
            results.append(action())
        except Exception as error:
            problems.append(error)

    caller = threading.Thread(target=run, name="store call", daemon=True)
    caller.start()
    caller.join(seconds)
    if problems:
        raise StoreLost(str(problems[0]).splitlines()[0], caller=None)
    if not results:
        raise StoreLost(f"no answer within {seconds:g} s", caller=caller)
    return results[0]


@dataclass(kw_only=True, eq=False)
class BoundedStore:
    """A store whose calls have a time limit.

    Attributes:
        store: a separate client, because a client that waits for a key blocks all its other callers.
        seconds: time limit of a call.
    """

    store: dist.Store
    seconds: float

    def __post_init__(self) -> None:
        self._lost: StoreLost | None = None

    def call(self, action: Callable[[dist.Store], Result]) -> Result:
        """Run an action on the store and return its result.

        Raises:
            StoreLost: this call was not answered, an earlier one is still unanswered, or the connection is lost.
        """
        if self._lost is not None and (self._lost.caller is None or self._lost.caller.is_alive()):
            raise self._lost
        try:
            return within(self.seconds, lambda: action(self.store))
        except StoreLost as error:
            self._lost = error
            raise

    def read(self, key: str) -> str | None:
        """Return the value of a key; None if there is none."""
        return self.call(lambda store: store.get(key).decode() if store.check([key]) else None)


class Watchdog:
    """Observer of this rank's main thread, which answers for it and aborts it if it waits for a lost rank."""

    def __init__(self, *, store: dist.Store, rank: int, size: int, timeout: timedelta, holder: str) -> None:
        """Start to observe the calling thread; every rank must do this.

        Args:
            store: store in which every rank has registered its host and process (:func:`check_in`).
            rank: rank of this process.
            size: number of ranks.
            timeout: timeout of the collectives.
            holder: description of the process that holds the store, for messages.
        """
        self.steps: Callable[[], int] | None = None
        self._timeout = timeout.total_seconds()
        self._answer_seconds = min(_ANSWER_SECONDS, _ANSWER_FRACTION * self._timeout)
        self._tick = min(_TICK_SECONDS, self._timeout / _TICKS)
        own_client: dist.Store = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        self._store = BoundedStore(store=own_client, seconds=self._answer_seconds)
        self._rank, self._size, self._holder = rank, size, holder
        self._main = threading.get_ident()
        self._phases: list[str] = []
        self._failed_in = ""
        self._last_phase, self._changes, self._changed = "", 0, time.monotonic()
        self._sample = (hangs.BUSY, 0)
        self._stuck = 0.0  # seconds for which the main thread has been waiting in the same place
        self._question, self._quiet_until = 0, 0.0
        self._stopped, self._wake = False, threading.Event()
        self._failing, self._ending, self._found = False, False, threading.Event()
        self._finding: str | None = None
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the activity of the main thread within the block."""
        self._phases.append(name)
        self._change()
        try:
            yield
        except BaseException:
            self._failed_in = self._failed_in or "/".join(self._phases)
            raise
        finally:
            self._last_phase = "/".join(self._phases)
            self._phases.pop()
            self._change()

    def _change(self) -> None:
        self._changes, self._changed = self._changes + 1, time.monotonic()

    def stop(self, *, holds_store: bool) -> None:
        """Deregister this rank, so that the others do not take it for lost, and end the watchdog.

        Args:
            holds_store: the store ends with this process, which therefore waits a while until all ranks have left.
        """
        self._stopped = True
        self._wake.set()
        self._thread.join(self._answer_seconds + self._tick)
        with contextlib.suppress(StoreLost):
            self.announce_exit("its work is done")
            left = self._store.call(lambda store: store.add("left", 1))
            deadline = time.monotonic() + _LEAVE_SECONDS
            while holds_store and left < self._size and time.monotonic() < deadline:
                time.sleep(0.02)
                left = self._store.call(lambda store: store.add("left", 0))

    def announce_exit(self, why: str) -> None:
        """Store the reason why this rank ends, for ranks that will wait for it."""
        with contextlib.suppress(StoreLost):
            self._store.call(lambda store: store.set(f"ended/{self._rank}", why))

    def find_lost(self) -> str | None:
        """Return a description of the rank to which this rank lost its connection; None if it cannot be found.

        Does not return if the watchdog is about to end this process.
        """
        self._failing = True
        self._wake.set()
        self._found.wait(2 * self._answer_seconds + 4 * self._tick)
        while self._ending:
            time.sleep(1)
        return self._finding

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stopped:
            self._wake.wait(self._tick)
            self._wake.clear()
            now = time.monotonic()
            # A longer interval means that this process itself was stopped, and perhaps all others too.
            self._look_at_main(min(now - before, 2 * self._tick))
            before = now
            try:
                self._look_at_store()
            except StoreLost as error:
                self._on_lost_store(str(error))

    def _phase(self) -> str:
        """Return the phases this rank is in, or in which it failed."""
        return self._failed_in if self._failing else "/".join(self._phases)

    def _doing(self) -> str:
        if self._failing:  # the main thread waits in find_lost for the result of this thread
            return hangs.WAITING
        return hangs.doing(hangs.main_frame(self._main), device_busy=device.has_queued_work())

    def _look_at_main(self, seconds: float) -> None:
        doing = self._doing()
        # Only the main thread can be probed for having run; a wait through the store runs code all the time.
        ran = self._main != threading.main_thread().ident or hangs.main_thread_ran()
        same_place = (doing, self._changes) == self._sample and (not ran or doing == hangs.PATIENT)
        self._stuck = self._stuck + seconds if same_place and doing != hangs.BUSY else 0.0
        self._sample = (doing, self._changes)

    def _waits_too_long(self) -> bool:
        return self._stuck >= (PATIENCE_SECONDS if self._sample[0] == hangs.PATIENT else WAIT_FRACTION * self._timeout)

    def _look_at_store(self) -> None:
        if (verdict := self._store.read("verdict")) is not None:
            self._end(verdict, said_by_others=True)
            return
        while self._store.read(f"question/{self._question}") is not None:
            self._answer()
            self._quiet_until = time.monotonic() + 2 * self._answer_seconds
        if (self._waits_too_long() or self._failing) and time.monotonic() >= self._quiet_until:
            self._investigate()

    def _answer(self) -> None:
        """Publish the state of this rank as the answer to the current question."""
        frame = hangs.main_frame(self._main)
        answer = hangs.Answer(
            host=socket.gethostname(),
            process=os.getpid(),
            phase=self._phase(),
            last_phase=self._last_phase,
            seconds=time.monotonic() - self._changed,
            changes=self._changes,
            steps=None if self.steps is None else self.steps(),
            doing=self._doing(),
            stack=hangs.stack_lines(frame),
        )
        key = f"answer/{self._question}/{self._rank}"
        self._question += 1
        self._store.call(lambda store: store.set(key, answer.to_json()))

    def _investigate(self) -> None:
        """Ask all ranks for their state, unless another rank has asked already, and end with a verdict on the answers."""
        number, me = self._question, str(self._rank)
        asker = self._store.call(lambda store: store.compare_set(f"question/{number}", "", me)).decode()
        self._answer()
        self._quiet_until = time.monotonic() + 2 * self._answer_seconds
        if asker != me:
            return
        answers, ended = self._collect(number)
        self._look_at_main(0.0)
        if not self._failing and not self._waits_too_long():  # the rank that was waited for has arrived
            return
        present = {rank: check_in_of(self._store.read(f"present/{rank}")) for rank in range(self._size)}
        verdict = hangs.judge(answers, ended=ended, hosts={rank: one.host for rank, one in present.items()}, size=self._size)
        if len(answers) == self._size:
            verdict += "\n" + _REMEDY.format(minutes=f"{round(self._timeout / 60, 1):g}")
        self._store.call(lambda store: store.set("verdict", verdict))
        self._wake_stopped({rank: present[rank] for rank in range(self._size) if rank not in answers})
        time.sleep(2 * self._tick)  # lets the others read the verdict before the store can end with this process
        self._end(verdict, said_by_others=False)

    def _collect(self, number: int) -> tuple[dict[int, hangs.Answer], dict[int, str]]:
        """Return the answers that arrive in time, and the reasons of ranks that have announced their end."""
        answers: dict[int, hangs.Answer] = {}
        ended: dict[int, str] = {}
        deadline = time.monotonic() + self._answer_seconds
        while True:
            for rank in range(self._size):
                if rank in answers:
                    continue
                if (text := self._store.read(f"answer/{number}/{rank}")) is not None:
                    answers[rank] = hangs.Answer.from_json(text)
                elif (why := self._store.read(f"ended/{rank}")) is not None:
                    ended[rank] = why
            if len(answers) + len(ended) >= self._size or time.monotonic() > deadline:
                return answers, {rank: why for rank, why in ended.items() if rank not in answers}
            time.sleep(min(self._tick, 0.25))

    def _wake_stopped(self, lost: Mapping[int, CheckIn]) -> None:
        """Resume a stopped rank on this machine, so that a launcher need not wait until it is killed."""
        for one in lost.values():
            if one.host == socket.gethostname():
                ranks.resume_sibling(one.process, created=one.created)

    def _on_lost_store(self, reason: str) -> None:
        """Handle a store without answers: no rank can be queried, but this rank continues unless it waits or has failed."""
        if self._waits_too_long() or self._failing:
            place = f"in phase '{phase}'" if (phase := self._phase()) else "between phases"
            text = (
                f"{self._holder} holds the store through which the ranks meet and is gone, stopped or out of reach "
                f"({reason}); rank {self._rank} of {self._size} on {socket.gethostname()} waits {place}"
            )
            self._end(text, said_by_others=False)

    def _end(self, verdict: str, *, said_by_others: bool) -> None:
        """End this process, whose main thread is in an uninterruptible call; if it is failing, only pass on the verdict."""
        self._finding, self._ending = verdict, not self._failing
        self._found.set()
        self._stopped = True
        if self._failing:
            return
        device.write_collectives(self._rank)
        world = ranks.World(rank=self._rank, size=self._size, local_rank=0, local_size=None)
        ranks.abort_rank(verdict, world=world, wait=said_by_others)


@dataclass(frozen=True, kw_only=True)
class CheckIn:
    """The process of a rank.

    Attributes:
        host: host name.
        process: process id on that host.
        created: creation time of the process, in seconds since 1970.
    """

    host: str
    process: int
    created: float


def check_in(store: dist.Store, rank: int) -> None:
    """Register host and process of this rank in the store."""
    here = CheckIn(host=socket.gethostname(), process=os.getpid(), created=ranks.created())
    store.set(f"present/{rank}", json.dumps(asdict(here)))


def check_in_of(text: str | None) -> CheckIn:
    """Parse the registration of a rank; a placeholder if it has none."""
    return CheckIn(host="an unknown machine", process=0, created=0) if text is None else CheckIn(**json.loads(text))


_current: Watchdog | None = None


def start(*, store: dist.Store, rank: int, size: int, timeout: timedelta, holder: str) -> None:
    """Start to observe the calling thread, see :class:`Watchdog`. A single rank waits for no other and is not observed."""
    global _current
    if size > 1:
        _current = Watchdog(store=store, rank=rank, size=size, timeout=timeout, holder=holder)


def stop(*, holds_store: bool) -> None:
    """End the watchdog, if there is one; a rank that ends without this call counts as lost."""
    global _current
    if _current is not None:
        watchdog, _current = _current, None
        watchdog.stop(holds_store=holds_store)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Name the activity of this rank within the block, for reports of other ranks; no effect without a watchdog."""
    with contextlib.nullcontext() if _current is None else _current.phase(name):
        yield


def count_steps(steps: Callable[[], int]) -> None:
    """Set the function that returns the number of optimizer steps done; it is called at any time from another thread."""
    if _current is not None:
        _current.steps = steps


def explain(error: BaseException) -> None:
    """Explain an error with which this rank ends: add the lost rank that caused it, or announce the error to the others."""
    if _current is None:
        return
    if not is_lost_connection(error):
        _current.announce_exit(f"{type(error).__name__}: {error}"[:500])
    elif (text := _current.find_lost()) is not None:
        error.args = (f"{error}\n\n{text}",)
    sys.stdout.flush()
