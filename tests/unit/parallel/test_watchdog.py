"""The watchdogs of several ranks in one process, each of which watches a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from nemo_kto.parallel import hangs, ranks, watchdog
from nemo_kto.parallel.watchdog import BoundedStore, StoreLost, Watchdog
from tests.messages import raises

TIMEOUT = timedelta(seconds=3)


class World:
    """Ranks as threads; what would end a process is written down."""

    def __init__(self) -> None:
        self.ended: dict[int, str] = {}
        self.done, self.store = threading.Event(), dist.HashStore()
        self._dogs: list[Watchdog] = []
        self._threads: list[threading.Thread] = []

    def give_up(self, message: str, *, world: ranks.World, wait: bool) -> None:
        self.ended[world.rank] = message

    def start(self, *bodies: Callable[[Watchdog], None]) -> World:
        for rank in range(len(bodies)):
            watchdog.check_in(self.store, rank)
        for rank, body in enumerate(bodies):
            self._threads.append(threading.Thread(target=self._rank, args=(rank, len(bodies), body)))
            self._threads[-1].start()
        return self

    def _rank(self, rank: int, size: int, body: Callable[[Watchdog], None]) -> None:
        dog = Watchdog(store=self.store, rank=rank, size=size, timeout=TIMEOUT, holder="the test")
        self._dogs.append(dog)
        with dog.phase("data"):
            body(dog)

    def stay(self, _: Watchdog) -> None:
        """Busy until the test is over."""
        self.done.wait()

    def close(self) -> None:
        self.done.set()
        for thread in self._threads:
            thread.join()
        for dog in self._dogs:
            dog.stop(holds_store=False)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World()
    monkeypatch.setattr(ranks, "give_up", world.give_up)
    yield world
    world.close()


def wait_in(file: Path, world: World) -> Callable[[Watchdog], None]:
    """A function that waits until the test is over, in a frame of this file."""
    space: dict[str, Callable[[Watchdog], None]] = {"stay": world.stay}
    exec(compile("def waits(dog):\n    stay(dog)\n", str(file), "exec"), space)
    return space["waits"]


PATIENT = Path(hangs.__file__).with_name("waits.py")


def test_a_rank_that_works_long_is_waited_for_through_the_store(world: World) -> None:
    world.start(wait_in(PATIENT, world), world.stay)
    time.sleep(TIMEOUT.total_seconds())
    assert world.ended == {}


def test_but_not_for_ever(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "PATIENCE_SECONDS", 0.5)
    world.start(wait_in(PATIENT, world), world.stay)
    deadline = time.monotonic() + 20
    while len(world.ended) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert set(world.ended) == {0, 1}
    assert world.ended[0].startswith("rank 1 of 2 on ")
    assert " has been in phase 'data' for " in world.ended[0]
    assert world.ended[0] == world.ended[1]


def test_all_ranks_may_work_for_as_long_as_they_like(world: World) -> None:
    world.start(world.stay, world.stay)
    time.sleep(1.2 * TIMEOUT.total_seconds())
    assert world.ended == {}


def test_who_has_lost_a_connection_hears_who_has_ended_and_why(world: World) -> None:
    found: list[str | None] = []

    def fail(dog: Watchdog) -> None:
        dog.say_farewell("ValueError: enough")
        dog._stopped = True

    def lose(dog: Watchdog) -> None:
        time.sleep(0.5)
        found.append(dog.find_lost())

    world.start(lose, fail)
    deadline = time.monotonic() + 20
    while not found and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [text.split(" on ")[0] + text[text.index(" has ended") :] for text in found if text] == [
        "rank 1 of 2 has ended: ValueError: enough"
    ]


def test_a_store_that_does_not_answer_is_given_up_and_taken_up_again() -> None:
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
    time.sleep(0.3)
    assert store.call(lambda _: slow.get()) == "it"
    assert store.read("absent") is None


def test_alone_nobody_watches() -> None:
    watchdog.start(store=dist.HashStore(), rank=0, size=1, timeout=TIMEOUT, holder="the test")
    with watchdog.phase("data"):
        watchdog.count_steps(lambda: 1)
    watchdog.explain(RuntimeError("Connection closed by peer"))
    watchdog.stop(holds_store=False)
    assert watchdog._current is None
