"""State of the main thread seen from another thread, and identification of the rank that others wait for."""

from __future__ import annotations

import linecache
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed

from nemo_kto.processes import hangs
from nemo_kto.processes.hangs import BUSY, WAITING, Answer
from tests.helpers.messages import Message

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
