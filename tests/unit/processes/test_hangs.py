"""State of the main thread seen from another thread, and identification of the rank that others wait for."""

from __future__ import annotations

import linecache
import re
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace

import torch.distributed

from nemo_kto.processes import hangs
from nemo_kto.processes.hangs import BUSY, WAITING, Answer
from tests.helpers.messages import Message

WAITS = Answer(
    host="a",
    phase="kl",
    last_phase="data",
    seconds=95.4,
    changes=7,
    steps=11,
    doing=WAITING,
    stack=["x.py:1 in f: g()"],
)
HOSTS = {0: "a", 1: "b", 2: "c"}


def verdict(*answers: Answer | None, ended: dict[int, str] | None = None) -> list[str]:
    given = {rank: answer for rank, answer in enumerate(answers) if answer is not None}
    return hangs.judge(given, ended=ended or {}, hosts=HOSTS, size=len(answers)).splitlines()


def test_the_busy_rank_among_those_with_the_fewest_steps() -> None:
    ahead = replace(WAITS, changes=9, phase="optimizer", doing=BUSY)
    busy = replace(WAITS, host="b", doing=BUSY, phase="")
    assert verdict(WAITS, busy, ahead) == [
        Message("1", "3", "data", "95", "11"),
        Message("1", "last"),
        "    x.py:1 in f: g()",
    ]


def test_a_rank_waiting_in_an_earlier_phase() -> None:
    behind = replace(WAITS, host="c", changes=5, steps=None, phase="loading the model")
    assert verdict(WAITS, WAITS, behind)[0] == Message("2", "3", "95")


def test_all_ranks_waiting_at_the_same_place() -> None:
    assert verdict(WAITS, replace(WAITS, host="b", steps=1)) == [
        Message("all", "2", "other", "0"),
        "    x.py:1 in f: g()",
        Message("phases"),
        "  rank 0 on a: in phase 'kl' for 95 s (11 steps done)",
        "  rank 1 on b: in phase 'kl' for 95 s (1 step done)",
    ]


def test_order_of_failed_silent_and_busy_ranks() -> None:
    busy = replace(WAITS, doing=BUSY)
    assert verdict(busy, None, None, ended={2: "ValueError: no"}) == [
        "rank 2 of 3 on c has ended: ValueError: no",
        Message("1", "3", "answer", "kl", "95", "11"),
    ]


def test_many_ranks_are_reported_in_few_lines() -> None:
    lines = hangs.judge(dict.fromkeys(range(100), replace(WAITS, doing=BUSY, stack=[])), ended={}, hosts={}, size=100)
    assert len(lines.splitlines()) == 8
    assert "and 94 more" in lines.splitlines()


def frame_in(file: str, line: str) -> FrameType:
    """The frame of a function that was written in ``file`` and is at ``line``."""
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


def test_the_main_thread_is_busy_in_a_loop_but_not_inside_one_call() -> None:
    """The calls of the loop are at the same place each time, as the collectives of a step are."""

    def look(found: list[bool]) -> None:
        for _ in range(6):
            time.sleep(0.05)
            found.append(hangs.main_thread_ran())

    in_a_loop, inside = list[bool](), list[bool]()
    watcher = threading.Thread(target=look, args=(in_a_loop,))
    watcher.start()
    while watcher.is_alive():
        time.sleep(0.001)
    assert any(in_a_loop[2:])
    watcher = threading.Thread(target=look, args=(inside,))
    watcher.start()
    watcher.join()
    assert not any(inside[2:])


def test_a_stack_is_short_and_ends_at_the_current_line() -> None:
    def deeper(depth: int) -> list[str]:
        return deeper(depth - 1) if depth else hangs.stack_lines(sys._getframe())

    lines = deeper(20)
    assert len(lines) == hangs.MAX_FRAMES
    assert re.fullmatch(r".*test_hangs.py:\d+ in deeper: return deeper\(depth - 1\) if depth else .*", lines[-1])
    torch_line = hangs.stack_lines(frame_in("/v/site-packages/torch/x.py", "frame = sys._getframe()"))[-1]
    assert torch_line == "torch/x.py:1 in <module>: frame = sys._getframe()"
