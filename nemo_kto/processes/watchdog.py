"""Watchdog thread of each rank: finds the rank that the others wait for, and aborts them with its name, phase and stack.

In normal operation each rank only checks the store for a question every few seconds. A rank whose main thread has waited in
one collective for most of the timeout posts a question, all ranks answer with their state (:mod:`nemo_kto.processes.hangs`),
and the verdict is distributed through the store. A rank that does not answer has ended or is stopped. Messages are JSON;
nothing is unpickled, because on several machines outsiders may reach the store.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from nemo_kto.device import device
from nemo_kto.errors import describe
from nemo_kto.processes import hangs, ranks

Result = TypeVar("Result")
logger = logging.getLogger(__name__)

WAIT_FRACTION = 0.75  # of the timeout, spent in one collective: then the rank starts an investigation
PATIENCE_SECONDS = 24 * 3600.0  # the same limit for a rank that waits in a section
TICK_SECONDS = 5.0  # between two checks of the store, and between two heartbeats
SILENT_SECONDS = 60.0  # without a heartbeat, after which a rank counts as gone or stopped
_TICKS = 40  # checks of the store per timeout, if it is so short that they are more frequent
_ANSWER_FRACTION = 0.15  # of the timeout: how long a rank has to answer, at most _ANSWER_SECONDS
_ANSWER_SECONDS = 30.0
_EXIT_SECONDS = 5.0  # how long the process that hosts the store stays for the others at the end
_MIN_POLL, _MAX_POLL = 0.001, 0.5  # seconds between two polls: most waits are short, and a long one must cost nothing
# Messages by which torch reports that another rank is gone or late, in errors of unspecific types.
_CONNECTION = re.compile(r"gloo|NCCL|[Cc]onnection (was )?(likely )?(closed|reset|refused)|Broken pipe|[Tt]imed out waiting")


def is_lost_connection(error: BaseException) -> bool:
    """Return whether an error of torch means that another rank is gone or late."""
    of_torch = isinstance(error, RuntimeError) and _CONNECTION.search(str(error)) is not None
    return of_torch or isinstance(error, dist.DistError)


class StoreLost(RuntimeError):
    """The store does not answer; ``caller`` is the thread that still waits for it, None if the call raised an error."""

    def __init__(self, reason: str, *, caller: threading.Thread | None) -> None:
        super().__init__(reason)
        self.caller = caller


def within(seconds: float, action: Callable[[], Result]) -> Result:
    """Run an action with a time limit: torch's store calls may wait forever for a stopped or foreign process.

    Raises StoreLost if the action does not return in time, or raises an error.
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
    """A store whose calls have a time limit of ``seconds``."""

    store: dist.Store
    seconds: float
    _lost: StoreLost | None = None

    def call(self, action: Callable[[dist.Store], Result]) -> Result:
        """Run an action on the store; StoreLost if this or an earlier call is unanswered, or the connection is lost."""
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


@dataclass(frozen=True, kw_only=True)
class CheckIn:
    """The process of a rank: host name, process id on that host, and creation time in seconds since 1970."""

    host: str
    process: int
    created: float


def check_in(store: dist.Store, rank: int) -> None:
    """Register host and process of this rank in the store."""
    here = CheckIn(host=socket.gethostname(), process=os.getpid(), created=ranks.created())
    store.set(f"present/{rank}", json.dumps(asdict(here)))


def read_check_in(store: BoundedStore, rank: int) -> CheckIn | None:
    """Return the registration of a rank; None if it has none."""
    text = store.read(f"present/{rank}")
    return None if text is None else CheckIn(**json.loads(text))


class Watchdog:
    """The thread that observes this rank's main thread, answers for it, and aborts it if it waits for a lost rank."""

    def __init__(self, *, store: dist.Store, rank: int, size: int, timeout: timedelta, store_host: str) -> None:
        """Start to observe the calling thread, on every rank and after :func:`check_in`; ``store_host`` is for messages."""
        self.steps: Callable[[], int] | None = None
        self.rank, self.size, self.store_host, self.timeout = rank, size, store_host, timeout.total_seconds()
        self._answer_seconds = min(_ANSWER_SECONDS, _ANSWER_FRACTION * self.timeout)
        self._tick = min(TICK_SECONDS, self.timeout / _TICKS)
        # a separate client, because a client that waits for a key blocks all its other callers
        self.client: dist.Store = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        self._store = BoundedStore(store=self.client, seconds=self._answer_seconds)
        self._main = threading.get_ident()
        self._phases: list[str] = []
        self._failed_in = ""
        self._last_phase, self._changes, self._changed = "", 0, time.monotonic()
        self._sample = (hangs.BUSY, 0)
        self._stuck = 0.0  # seconds for which the main thread has been waiting in the same place
        self.sections: list[Section] = []  # in which this rank works
        self.sections_entered = 0
        self.in_section_wait = False
        self._question, self._quiet_until = 0, 0.0
        self._stopped, self._wake = False, threading.Event()
        self._failing, self._ending, self._found = False, False, threading.Event()
        self._finding: str | None = None
        self._reported: set[type[Exception]] = set()  # errors of this thread
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the activity of the main thread within the block."""
        self._phases.append(name)
        self._changes, self._changed = self._changes + 1, time.monotonic()
        try:
            yield
        except BaseException:
            self._failed_in = self._failed_in or "/".join(self._phases)
            raise
        finally:
            self._last_phase = "/".join(self._phases)
            self._phases.pop()
            self._changes, self._changed = self._changes + 1, time.monotonic()

    def stop(self, *, hosts_store: bool) -> None:
        """Deregister this rank and end the thread; a process that hosts the store waits a while until all have left."""
        self._stopped = True
        self._wake.set()
        self._thread.join(self._answer_seconds + self._tick)
        with contextlib.suppress(StoreLost):
            self.announce_exit("its work is done")
            left = self._store.call(lambda store: store.add("left", 1))
            deadline = time.monotonic() + _EXIT_SECONDS
            while hosts_store and left < self.size and time.monotonic() < deadline:
                time.sleep(0.02)
                left = self._store.call(lambda store: store.add("left", 0))

    def announce_exit(self, why: str) -> None:
        """Store the reason why this rank ends, for ranks that will wait for it."""
        with contextlib.suppress(StoreLost):
            self._store.call(lambda store: store.set(f"ended/{self.rank}", why))

    def find_lost(self) -> str | None:
        """Return a description of the lost rank or None; does not return if the watchdog is about to end this process."""
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
            try:
                # A longer interval means that this process itself was stopped, and perhaps all others too.
                self._observe(min(now - before, 2 * self._tick))
            except Exception as error:  # of any kind: without this thread, nobody would notice that this rank hangs
                if type(error) not in self._reported:
                    self._reported.add(type(error))
                    logger.exception("the watchdog failed, and continues")
            before = now

    def _observe(self, seconds: float) -> None:
        """Check the main thread and the store; ``seconds`` have passed since the last time."""
        self._observe_main(seconds)
        try:
            for section in [*self.sections]:
                self._store.call(section.beat)
            self._check_store()
        except StoreLost as error:  # no rank can be queried, but this rank continues unless it waits or has failed
            if self._waits_too_long() or self._failing:
                place = f"in phase '{phase}'" if (phase := self._phase()) else "between phases"
                self._end(f"{self.lost_store(error)} waits {place}", reported_by_others=False)

    def lost_store(self, error: StoreLost) -> str:
        """Return the beginning of a message, which ends with this rank."""
        return (
            f"{self.store_host} hosts the store of the process group and was stopped, has ended or cannot be reached "
            f"({error}); rank {self.rank} of {self.size} on {socket.gethostname()}"
        )

    def _phase(self) -> str:
        """Return the phases this rank is in, or in which it failed."""
        return self._failed_in if self._failing else "/".join(self._phases)

    def _doing(self) -> str:
        if self._failing:  # the main thread waits in find_lost for the result of this thread
            return hangs.WAITING
        if self.in_section_wait:
            return hangs.PATIENT
        return hangs.doing(sys._current_frames().get(self._main), device_busy=device.has_queued_work())

    def _observe_main(self, seconds: float) -> None:
        doing = self._doing()
        # Only the main thread can be probed for having run; a wait in a section runs code all the time.
        ran = self._main != threading.main_thread().ident or hangs.main_thread_ran()
        same_place = (doing, self._changes) == self._sample and (not ran or doing == hangs.PATIENT)
        self._stuck = self._stuck + seconds if same_place and doing != hangs.BUSY else 0.0
        self._sample = (doing, self._changes)

    def _waits_too_long(self) -> bool:
        return self._stuck >= (PATIENCE_SECONDS if self._sample[0] == hangs.PATIENT else WAIT_FRACTION * self.timeout)

    def _check_store(self) -> None:
        """End with the verdict if there is one, answer questions, and ask if this rank waits too long."""
        if (verdict := self._store.read("verdict")) is not None:
            self._end(verdict, reported_by_others=True)
            return
        while self._store.read(f"question/{self._question}") is not None:
            self._answer()
            self._quiet_until = time.monotonic() + 2 * self._answer_seconds
        if (self._waits_too_long() or self._failing) and time.monotonic() >= self._quiet_until:
            self._investigate()

    def _answer(self) -> None:
        answer = hangs.Answer(
            host=socket.gethostname(),
            phase=self._phase(),
            last_phase=self._last_phase,
            seconds=time.monotonic() - self._changed,
            changes=self._changes,
            steps=None if self.steps is None else self.steps(),
            doing=self._doing(),
            stack=hangs.stack_lines(sys._current_frames().get(self._main)),
        )
        key = f"answer/{self._question}/{self.rank}"
        self._question += 1
        self._store.call(lambda store: store.set(key, json.dumps(asdict(answer))))

    def _investigate(self) -> None:
        """Ask all ranks for their state, unless another rank has asked already, and end with a verdict on the answers."""
        number, me = self._question, str(self.rank)
        asker = self._store.call(lambda store: store.compare_set(f"question/{number}", "", me)).decode()
        self._answer()
        self._quiet_until = time.monotonic() + 2 * self._answer_seconds
        if asker != me:
            return
        answers: dict[int, hangs.Answer] = {}
        ended: dict[int, str] = {}
        deadline = time.monotonic() + self._answer_seconds
        while len(answers) + len(ended) < self.size and time.monotonic() < deadline:
            for rank in set(range(self.size)) - set(answers):
                if (text := self._store.read(f"answer/{number}/{rank}")) is not None:
                    answers[rank] = hangs.Answer(**json.loads(text))
                    ended.pop(rank, None)
                elif (why := self._store.read(f"ended/{rank}")) is not None:
                    ended[rank] = why
            time.sleep(min(self._tick, 0.25))
        self._observe_main(0.0)
        if not self._failing and not self._waits_too_long():  # the rank that was waited for has arrived
            return
        present = {rank: found for rank in range(self.size) if (found := read_check_in(self._store, rank)) is not None}
        verdict = hangs.judge(answers, ended=ended, hosts={rank: one.host for rank, one in present.items()}, size=self.size)
        if len(answers) == self.size:
            minutes = f"{round(self.timeout / 60, 1):g}"
            verdict += f"\nthe timeout is trainer.timeout_minutes ({minutes} min); raise it if work of one rank takes longer"
        self._store.call(lambda store: store.set("verdict", verdict))
        for rank, one in present.items():
            if rank not in answers:  # resume it if it is stopped, so that a launcher need not wait until it is killed
                ranks.resume_sibling(one.process, host=one.host, created=one.created)
        time.sleep(2 * self._tick)  # lets the others read the verdict before the store can end with this process
        self._end(verdict, reported_by_others=False)

    def _end(self, verdict: str, *, reported_by_others: bool) -> None:
        """End this process, whose main thread is in an uninterruptible call; if it is failing, only pass on the verdict."""
        self._finding, self._ending = verdict, not self._failing
        self._found.set()
        self._stopped = True
        if not self._failing:
            device.write_collectives(self.rank)
            world = ranks.World(rank=self.rank, size=self.size, local_rank=0, local_size=None)
            ranks.abort_rank(verdict, world=world, wait=reported_by_others)


class Section:
    """A part of the program in which ranks work for different times, even hours; collective, from start to :meth:`finish`.

    Ranks that have finished wait through the store, without the time limit of a collective, for those that still work, as
    long as the watchdogs of these send heartbeats.
    """

    def __init__(self, *, watchdog: Watchdog | None, doing: str) -> None:
        """Enter the section; ``watchdog`` is None for a single rank, ``doing`` an activity such as "reading the rows"."""
        self._dog, self._doing = watchdog, doing
        if watchdog is not None:
            self._store = BoundedStore(store=watchdog.client, seconds=SILENT_SECONDS)
            watchdog.sections_entered += 1  # all ranks enter the same sections in the same order
            self._prefix = f"section/{watchdog.sections_entered}"
            self._key = f"{self._prefix}/{watchdog.rank}"
            watchdog.sections.append(self)
            with contextlib.suppress(StoreLost):  # reported by finish
                self._store.call(self.beat)

    def beat(self, store: dist.Store) -> None:
        """Send a heartbeat of this rank."""
        store.add(f"{self._key}/beats", 1)

    def leave(self) -> None:
        """End this rank's work, done or failed, without waiting for other ranks."""
        if self._dog is None:
            return
        self._dog.sections.remove(self)
        with contextlib.suppress(StoreLost):
            self._store.call(lambda store: store.set(f"{self._key}/left", "1"))
            self._store.call(lambda store: store.add(f"{self._prefix}/left", 1))

    def finish(self) -> None:
        """End this rank's work and wait until all ranks have ended theirs.

        Raises a RuntimeError that names the rank if one that still works is silent for ``SILENT_SECONDS``, one has not
        entered the section within the timeout of the process group, or the store is lost.
        """
        if self._dog is None:
            return
        self._dog.in_section_wait = True
        try:
            self.leave()
            self._await_all(self._dog)
        except StoreLost as error:
            raise RuntimeError(f"{self._dog.lost_store(error)} needs it while ranks are {self._doing}") from error
        finally:
            self._dog.in_section_wait = False

    def _await_all(self, dog: Watchdog) -> None:
        """Watch the first rank that has not left; once it has, the next such rank."""
        watched, beats, silent, pause = 0, 0, 0.0, _MIN_POLL
        while self._count("left") < dog.size:
            if self._count(f"{watched}/left"):
                watched, beats, silent = watched + 1, 0, 0.0
                continue
            if (found := self._count(f"{watched}/beats")) != beats:
                beats, silent = found, 0.0
            elif not beats and silent > dog.timeout:
                raise RuntimeError(
                    f"rank {watched} has not started {self._doing} within {dog.timeout:g} s, and the others wait for it; "
                    "see its output for what it did instead"
                )
            elif beats and silent > SILENT_SECONDS:
                one = read_check_in(self._store, watched)
                who = f"rank {watched}" if one is None else f"rank {watched} (process {one.process} on {one.host})"
                raise RuntimeError(
                    f"{who} has sent no heartbeat for {SILENT_SECONDS:g} s "
                    f"while it was {self._doing} and the others waited for it; it was killed or stopped, or its machine "
                    "cannot be reached"
                )
            began = time.monotonic()
            time.sleep(pause)
            silent += min(time.monotonic() - began, 2 * _MAX_POLL)  # a longer pause means that this process was stopped
            pause = min(2 * pause, _MAX_POLL)

    def _count(self, key: str) -> int:
        return int(self._store.read(f"{self._prefix}/{key}") or 0)


_current: Watchdog | None = None


def start(*, store: dist.Store, rank: int, size: int, timeout: timedelta, store_host: str) -> None:
    """Start to observe the calling thread, see :class:`Watchdog`. A single rank waits for no other and is not observed."""
    global _current
    if size > 1:
        _current = Watchdog(store=store, rank=rank, size=size, timeout=timeout, store_host=store_host)


def stop(*, hosts_store: bool) -> None:
    """End the watchdog, if there is one; a rank that ends without this call counts as lost."""
    global _current
    if _current is not None:
        watchdog, _current = _current, None
        watchdog.stop(hosts_store=hosts_store)


def section(*, doing: str) -> Section:
    """Enter a :class:`Section`; for a process group created by other code, the first one starts the watchdog."""
    if _current is None and dist.is_initialized() and dist.get_world_size() > 1:
        rank, size, store = dist.get_rank(), dist.get_world_size(), _get_default_store()
        own = dist.PrefixStore("nemo_kto/watchdog", store)
        check_in(own, rank)
        timeout: timedelta = store.timeout  # type: ignore[attr-defined]  # torch's stubs lack it
        start(store=own, rank=rank, size=size, timeout=timeout, store_host="another process")
    return Section(watchdog=_current, doing=doing)


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
        _current.announce_exit(describe(error)[:500])
    elif (text := _current.find_lost()) is not None:
        error.args = (f"{error}\n\n{text}",)
    sys.stdout.flush()
