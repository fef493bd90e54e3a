"""Watchdogs of several ranks in one process, the state of a main thread, and the rank that others wait for."""

from __future__ import annotations

import linecache
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import psutil
import pytest
import torch.distributed
import torch.distributed as dist

from nemo_kto.processes import hangs, ranks, watchdog
from nemo_kto.processes.hangs import BUSY, WAITING, Answer
from nemo_kto.processes.watchdog import BoundedStore, Section, StoreLost, Watchdog
from tests.helpers.messages import Message, raises


class World:
    """Ranks as threads; what would end a process is written down."""

    def __init__(self) -> None:
        self.ended: dict[int, str] = {}
        self.errors: dict[int, str] = {}
        self.timeout = timedelta(seconds=20)
        self.done, self.store = threading.Event(), dist.HashStore()
        self._dogs: list[Watchdog] = []
        self._threads: list[threading.Thread] = []

    def abort_rank(self, message: str, *, world: ranks.World, wait: bool) -> None:
        self.ended[world.rank] = message

    def start(self, *bodies: Callable[[Watchdog], None]) -> World:
        for rank in range(len(bodies)):
            watchdog.check_in(self.store, rank)
        for rank, body in enumerate(bodies):
            self._threads.append(threading.Thread(target=self._rank, args=(rank, len(bodies), body)))
            self._threads[-1].start()
        return self

    def _rank(self, rank: int, size: int, body: Callable[[Watchdog], None]) -> None:
        dog = Watchdog(store=self.store, rank=rank, size=size, timeout=self.timeout, store_host="the test")
        self._dogs.append(dog)
        with dog.phase("data"):
            try:
                body(dog)
            except RuntimeError as error:
                self.errors[rank] = str(error)

    def stay(self, _: Watchdog) -> None:
        """Busy until the test is over."""
        self.done.wait()

    def await_error(self, rank: int) -> None:
        deadline = time.monotonic() + 20
        while rank not in self.errors and time.monotonic() < deadline:
            time.sleep(0.05)

    def close(self) -> None:
        self.done.set()
        for thread in self._threads:
            thread.join()
        for dog in self._dogs:
            dog.stop(hosts_store=False)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World()
    monkeypatch.setattr(ranks, "abort_rank", world.abort_rank)
    yield world
    world.close()


def works(dog: Watchdog, world: World) -> None:
    section = Section(watchdog=dog, doing="loading")
    world.stay(dog)
    section.finish()


def waits(dog: Watchdog) -> None:
    Section(watchdog=dog, doing="loading").finish()


def gone(dog: Watchdog) -> None:
    """In a section, without a heartbeat."""
    Section(watchdog=dog, doing="loading")
    dog._stopped = True


def test_a_rank_without_a_heartbeat_is_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "SILENT_SECONDS", 0.5)
    world.start(waits, gone)
    world.await_error(0)
    assert world.errors[0] == Message("rank 1", str(os.getpid()), socket.gethostname(), "0.5 s", "loading")


def test_a_rank_that_does_not_enter_the_section_is_named(world: World) -> None:
    world.timeout = timedelta(seconds=0.5)
    world.start(waits, world.stay)
    world.await_error(0)
    assert world.errors[0] == Message("rank 1", "loading", "0.5 s")


def test_waiting_for_a_rank_has_a_timeout(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "PATIENCE_SECONDS", 0.5)
    world.start(waits, partial(works, world=world))
    deadline = time.monotonic() + 20
    while len(world.ended) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert set(world.ended) == {0, 1}
    assert world.ended[0].startswith("rank 1 of 2 on ")
    assert " has been in phase 'data' for " in world.ended[0]
    assert world.ended[0] == world.ended[1]


def test_a_store_without_answer_is_retried() -> None:
    class Slow:
        waits = threading.Event()

        def get(self) -> str:
            self.waits.wait(20)
            return "it"

    slow = Slow()
    store = BoundedStore(store=dist.HashStore(), seconds=0.2)
    with raises(StoreLost, "answer", "0.2"):
        store.call(lambda _: slow.get())
    with pytest.raises(StoreLost):
        store.call(lambda _: "not asked while the first call is open")
    slow.waits.set()
    assert store._lost is not None
    assert store._lost.caller is not None
    store._lost.caller.join()
    assert store.call(lambda _: slow.get()) == "it"
    assert store.read("absent") is None


@pytest.fixture
def child() -> Iterator[psutil.Process]:
    with subprocess.Popen(["sleep", "60"]) as started:
        yield psutil.Process(started.pid)
        started.kill()


def test_only_the_same_process_is_continued(child: psutil.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal goes to a stopped child of the same launcher with the same start, on this machine."""

    def resumed(*, parent: int, host: str = socket.gethostname(), created: float = child.create_time()) -> bool:
        child.suspend()
        while child.status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)
        monkeypatch.setattr(os, "getppid", lambda: parent)
        ranks.resume_sibling(child.pid, host=host, created=created)
        return child.status() != psutil.STATUS_STOPPED

    assert resumed(parent=os.getpid())
    assert not resumed(parent=os.getpid() + 1), "another process's child"
    assert not resumed(parent=os.getpid(), created=child.create_time() - 1), "its process id was reused"
    assert not resumed(parent=os.getpid(), host="elsewhere")
    for process in (-1, 0, 2**40):  # not of a process
        ranks.resume_sibling(process, host=socket.gethostname(), created=child.create_time())


def test_an_error_of_the_watchdog_does_not_end_it(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 is found although its watchdog failed before; its error is logged once."""
    monkeypatch.setattr(watchdog, "TICK_SECONDS", 0.05)
    observe, failures = Watchdog._observe_main, list[int]()

    def failing(dog: Watchdog, seconds: float) -> None:
        if dog.rank == 0 and len(failures) < 5:
            failures.append(0)
            raise TypeError("f_lineno")
        observe(dog, seconds)

    monkeypatch.setattr(Watchdog, "_observe_main", failing)
    world.start(world.stay, world.stay)
    while len(failures) < 5:
        time.sleep(0.01)
    world.store.set("verdict", "rank 1 has ended")
    deadline = time.monotonic() + 20
    while len(world.ended) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert world.ended == {0: "rank 1 has ended", 1: "rank 1 has ended"}
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [TypeError]


WAITS = Answer(
    host="a", phase="kl", last_phase="data", seconds=95.4, changes=7, steps=11, doing=WAITING, stack=["x.py:1 in f: g()"]
)
WORKS = replace(WAITS, doing=BUSY)
STACK = "    x.py:1 in f: g()"


@pytest.mark.parametrize(
    ("answers", "lines"),
    [
        # the busy rank among those with the fewest steps
        (
            [WAITS, replace(WORKS, host="b", phase=""), replace(WORKS, changes=9, phase="optimizer")],
            [Message("1", "3", "data", "95", "11"), Message("1", "last"), STACK],
        ),
        # one that waits in an earlier phase
        (
            [WAITS, WAITS, replace(WAITS, host="c", changes=5, steps=None, phase="loading the model")],
            [Message("2", "3", "95"), Message("2", "last"), STACK],
        ),
        # all wait at the same place
        (
            [WAITS, replace(WAITS, host="b", steps=1)],
            [
                Message("all", "2", "other", "0"),
                STACK,
                Message("phases"),
                "  rank 0 on a: in phase 'kl' for 95 s (11 steps done)",
                "  rank 1 on b: in phase 'kl' for 95 s (1 step done)",
            ],
        ),
        # one has failed, and one does not answer
        ([WORKS, None, None], ["rank 2 of 3 on c has ended: ValueError: no", Message("1", "3", "answer", "kl", "95", "11")]),
        ([replace(WORKS, stack=[])] * 100, [Message("100")] * 6 + ["and 94 more", Message("last")]),
    ],
    ids=["busy", "behind", "all", "ended and silent", "many"],
)
def test_the_rank_that_the_others_wait_for(answers: list[Answer | None], lines: list[str]) -> None:
    given = {rank: answer for rank, answer in enumerate(answers) if answer is not None}
    ended = {2: "ValueError: no"} if None in answers else {}
    assert hangs.judge(given, ended=ended, hosts={0: "a", 1: "b", 2: "c"}, size=len(answers)).splitlines() == lines


def frame_in(file: str, line: str) -> FrameType:
    """Frame of a function that was written in ``file`` and is at ``line``."""
    linecache.cache[file] = (len(line), None, [line], file)
    space: dict[str, object] = {"sys": sys, "handle": SimpleNamespace(wait=lambda: sys._getframe(1)), "found": []}
    exec(compile(line, file, "exec"), space)
    frame = space["frame"]
    assert isinstance(frame, FrameType)
    return frame


def test_states_of_a_thread() -> None:
    inside = str(Path(torch.distributed.__file__).with_name("distributed_c10d.py"))
    ours = "frame = sys._getframe()"
    assert hangs.doing(frame_in("/x/callback.py", ours), device_busy=False) == BUSY
    assert hangs.doing(frame_in("/x/callback.py", ours), device_busy=True) == WAITING
    assert hangs.doing(frame_in("/x/schedule.py", "frame = handle.wait()"), device_busy=False) == WAITING
    assert hangs.doing(frame_in(inside, ours), device_busy=False) == WAITING
    assert hangs.doing(None, device_busy=False) == BUSY
    between_lines: Any = SimpleNamespace(f_code=SimpleNamespace(co_filename="/x/callback.py"), f_lineno=None)
    assert hangs.doing(between_lines, device_busy=False) == BUSY


def test_the_main_thread_is_busy_in_a_loop_but_not_inside_one_call() -> None:
    """The calls of the loop are at the same place each time, as the collectives of a step are."""
    ran, inside = threading.Event(), list[bool]()

    def until_it_ran() -> None:
        hangs.main_thread_ran()
        while not hangs.main_thread_ran():
            pass
        ran.set()

    def until_it_stays() -> None:  # within the main thread's one call of join()
        while inside[-3:] != [False] * 3 and len(inside) < 10_000:
            ran.wait()
            inside.append(hangs.main_thread_ran())

    threading.Thread(target=until_it_ran).start()
    while not ran.is_set():
        pass
    watcher = threading.Thread(target=until_it_stays)
    watcher.start()
    watcher.join()
    assert inside[-3:] == [False] * 3


def test_a_stack_is_short_and_ends_at_the_current_line() -> None:
    def deeper(depth: int) -> list[str]:
        return deeper(depth - 1) if depth else hangs.stack_lines(sys._getframe())

    lines = deeper(20)
    assert len(lines) == hangs.MAX_FRAMES
    assert lines[-1].endswith("in deeper: return deeper(depth - 1) if depth else hangs.stack_lines(sys._getframe())")
    torch_line = hangs.stack_lines(frame_in("/v/site-packages/torch/x.py", "frame = sys._getframe()"))[-1]
    assert torch_line == "torch/x.py:1 in <module>: frame = sys._getframe()"
