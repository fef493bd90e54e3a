"""Heartbeats of ranks that work while others wait for them, without the time limit of a collective.

Through the store of the default process group each rank signals that it is alive, and when its work is done. Only names and
counts pass through the store and nothing is unpickled, because on several machines outsiders may reach it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

Item = TypeVar("Item")

BEAT_SECONDS = 5.0  # between two heartbeats
SILENT_SECONDS = 60.0  # without a heartbeat, after which a rank counts as gone or stopped
_MIN_POLL, _MAX_POLL = 0.001, 0.5  # seconds between two polls: most waits are short, and a long one must cost nothing


class Section(threading.Thread):
    """A part of the program in which ranks work for different times; collective, from its creation to :meth:`finish`.

    This thread is the heartbeat of the rank. It also does the waiting, because a call to the store never returns if the
    process that holds the store is stopped.
    """

    def __init__(self, *, doing: str) -> None:
        """Enter the section and start the heartbeat.

        Args:
            doing: activity of a rank that works in the section, such as "reading the rows".
        """
        super().__init__(name=f"heartbeat while {doing}", daemon=True)
        self._doing = doing
        self._left, self._awaits_others = threading.Event(), False
        self._problem: Exception | None = None
        self._answers = 0  # number of calls that the store has answered
        self._has_others = dist.is_initialized() and dist.get_world_size() > 1
        if self._has_others:
            self._store, self._rank, self._size = _get_default_store(), dist.get_rank(), dist.get_world_size()
            self.start()

    def leave(self) -> None:
        """End this rank's work, done or failed, without waiting for other ranks."""
        self._left.set()
        answers, unanswered = self._answers, 0
        while self._has_others and self.is_alive():
            self.join(timeout=1)
            answers, unanswered = self._answers, unanswered + 1 if self._answers == answers else 0
            if unanswered > SILENT_SECONDS:
                self._problem = RuntimeError(
                    f"the store through which the ranks meet has not answered rank {self._rank} for {SILENT_SECONDS:g} s "
                    f"while ranks were {self._doing}; the process that holds it (rank 0 under srun) was stopped, or is "
                    "out of reach"
                )
                return

    def finish(self) -> None:
        """End this rank's work and wait until all ranks have ended theirs.

        Raises:
            RuntimeError: a rank that still works has been silent for ``SILENT_SECONDS``, or has not entered the section
                within the timeout of the process group; names the rank.
        """
        self._awaits_others = True
        self.leave()
        if self._problem is not None:
            raise self._problem

    def run(self) -> None:
        """Send heartbeats until the rank leaves, then wait for the other ranks if required."""
        try:
            self._beat_until_left()
            if self._awaits_others:
                self._await_all()
        except RuntimeError as error:
            self._problem = error

    def _beat_until_left(self) -> None:
        counted = f"nemo_kto/sections/{self._rank}"
        # each rank counts its own sections, and all arrive at the same number
        self._prefix = f"nemo_kto/section/{self._ask(lambda: self._store.add(counted, 1))}"
        who = f"rank {self._rank} (process {os.getpid()} on {socket.gethostname()})"
        self._ask(lambda: self._store.set(self._key("who"), who))
        beats = self._key("beats")
        while True:
            self._ask(lambda: self._store.add(beats, 1))
            if self._left.wait(BEAT_SECONDS):
                break
        self._ask(lambda: self._store.set(self._key("left"), "1"))
        self._ask(lambda: self._store.add(f"{self._prefix}/left", 1))

    def _await_all(self) -> None:
        """Watch the first rank that has not left; once it has, the next such rank."""
        watched, beats, silent, pause = 0, 0, 0.0, _MIN_POLL
        while self._count(f"{self._prefix}/left") < self._size:
            if self._count(self._key("left", watched)):
                watched, beats, silent = watched + 1, 0, 0.0
                continue
            if (found := self._count(self._key("beats", watched))) != beats:
                beats, silent = found, 0.0
            self._judge(watched, beats, silent)
            began = time.monotonic()
            time.sleep(pause)
            silent += min(time.monotonic() - began, 2 * _MAX_POLL)  # a longer pause means that this process was stopped
            pause = min(2 * pause, _MAX_POLL)

    def _judge(self, rank: int, beats: int, silent: float) -> None:
        timeout = self._store.timeout.total_seconds()  # type: ignore[attr-defined]  # missing in its stub
        if not beats and silent > timeout:
            raise RuntimeError(
                f"rank {rank} has not come within {timeout:g} s to where the ranks were {self._doing}; look what it did"
            )
        if beats and silent > SILENT_SECONDS:
            who = self._ask(lambda: self._store.get(self._key("who", rank))).decode()
            raise RuntimeError(
                f"{who} has given no sign of life for {SILENT_SECONDS:g} s while it was {self._doing} and the others waited "
                "for it; it was killed or stopped, or its machine is out of reach"
            )

    def _key(self, name: str, rank: int | None = None) -> str:
        return f"{self._prefix}/{self._rank if rank is None else rank}/{name}"

    def _count(self, key: str) -> int:
        if not self._ask(lambda: self._store.check([key])):
            return 0
        return int(self._ask(lambda: self._store.get(key)))

    def _ask(self, question: Callable[[], Item]) -> Item:
        try:
            answer = question()
        except dist.DistError as error:
            raise RuntimeError(
                f"the store through which the ranks meet is gone while ranks were {self._doing}; the process that holds it "
                f"(rank 0 under srun) has ended ({str(error).splitlines()[0]})"
            ) from error
        self._answers += 1
        return answer
