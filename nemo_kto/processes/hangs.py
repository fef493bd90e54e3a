"""Finding the rank that the others wait for: the state of each rank, and the verdict. No communication."""

from __future__ import annotations

import ctypes
import json
import linecache
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch.distributed

MAX_FRAMES = 10  # frames of a printed stack, so that the cause is within the last 20 lines of an error
_MAX_RANKS = 6  # ranks that are described individually
_TORCH_DISTRIBUTED = os.path.dirname(torch.distributed.__file__) + os.sep
_PATIENT_WAITS = str(Path(__file__).with_name("waits.py"))  # these waits check for themselves that the other ranks live
_WAIT = re.compile(r"\.wait\(")  # wait for a collective that runs in the background; megatron-core calls it directly

BUSY, WAITING, PATIENT = "busy", "waiting", "patient"
"""States of a rank: own work; in a collective; waiting through the store while another rank works long."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """State of a rank, as reported by the rank.

    Attributes:
        host: host name.
        process: process id on that host.
        phase: current phases, outermost first, such as "validation/reference"; "" between phases.
        last_phase: the phase that ended last; "" if none has.
        seconds: time since a phase last began or ended.
        changes: phases begun and ended so far; all ranks go through the same phases in the same order.
        steps: optimizer steps done; None before the training.
        doing: BUSY, WAITING or PATIENT.
        stack: a line for each of the innermost frames of the main thread, innermost last.
    """

    host: str
    process: int
    phase: str
    last_phase: str
    seconds: float
    changes: int
    steps: int | None
    doing: str
    stack: Sequence[str]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Answer:
        return cls(**json.loads(text))

    def place(self) -> str:
        """Return text such as "in phase 'data' for 95 s (11 steps done)"."""
        if self.phase:
            phase = f"in phase '{self.phase}'"
        else:
            phase = f"between phases, after '{self.last_phase}'," if self.last_phase else "before the first phase"
        done = "" if self.steps is None else f" ({self.steps} step{'s' * (self.steps != 1)} done)"
        return f"{phase} for {self.seconds:.0f} s{done}"


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def main_frame(thread_id: int) -> FrameType | None:
    """Return the current frame of a thread."""
    return sys._current_frames().get(thread_id)


_awaits_main_thread = False


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def _in_main_thread(_: int | None) -> int:
    global _awaits_main_thread
    _awaits_main_thread = False
    return 0


def main_thread_ran() -> bool:
    """Return whether the main thread has run Python code since the last call; it runs none during a library call.

    The interpreter runs pending calls in the main thread, between two instructions. Frames would be less reliable (a loop of
    collectives passes the same place again and again), and keeping or marking frames would keep tensors alive or disturb a
    debugger.
    """
    global _awaits_main_thread
    ran = not _awaits_main_thread
    if ran:
        _awaits_main_thread = True
        if ctypes.pythonapi.Py_AddPendingCall(_in_main_thread, None) != 0:  # too many are pending
            _awaits_main_thread = False
    return ran


def doing(frame: FrameType | None, *, device_busy: bool) -> str:
    """Return the state of a main thread: BUSY, WAITING or PATIENT.

    Args:
        frame: its innermost frame.
        device_busy: the device has unfinished work; a collective on the device waits for the other ranks.
    """
    stack = list(frames(frame))
    if any(one.f_code.co_filename == _PATIENT_WAITS for one in stack[:8]):
        return PATIENT
    if stack and stack[0].f_code.co_filename.startswith(_TORCH_DISTRIBUTED):
        return WAITING
    if stack and _WAIT.search(linecache.getline(stack[0].f_code.co_filename, stack[0].f_lineno)):
        return WAITING
    return WAITING if device_busy else BUSY


def stack_lines(frame: FrameType | None, limit: int = MAX_FRAMES) -> list[str]:
    """Return a line for each of the innermost frames, innermost last."""
    found = []
    for one, _ in zip(frames(frame), range(limit), strict=False):
        code = one.f_code
        source = linecache.getline(code.co_filename, one.f_lineno).strip()
        found.append(f"{_short(code.co_filename)}:{one.f_lineno} in {code.co_name}: {source}"[:160])
    return found[::-1]


def _short(file: str) -> str:
    """Return a path relative to site-packages, or starting at this package, without the installation folder."""
    for part in ("site-packages/", "nemo_kto/"):
        if part in file:
            return file[file.rindex(part) + (len(part) if part.startswith("site") else 0) :]
    return file


def judge(answers: Mapping[int, Answer], *, ended: Mapping[int, str], hosts: Mapping[int, str], size: int) -> str:
    """Return a message that names the rank or ranks that the others wait for.

    Ranks that do not answer are blamed first; then, among the ranks with the least progress, those that do their own work;
    then those that wait in an earlier phase than the others.

    Args:
        answers: answer of each rank that gave one.
        ended: reason of each rank that announced its end.
        hosts: host name of each rank.
        size: number of ranks.
    """
    if lost := [rank for rank in range(size) if rank not in answers]:
        return _of_lost(lost, answers, ended, hosts, size)
    least = min(answer.changes for answer in answers.values())
    behind = [rank for rank in sorted(answers) if answers[rank].changes == least]
    if culprits := [rank for rank in behind if answers[rank].doing == BUSY] or (behind if len(behind) < size else []):
        return _of_stuck(culprits, answers, size)
    lines = [f"  rank {rank} on {answers[rank].host}: {answers[rank].place()}" for rank in range(size)[:_MAX_RANKS]]
    lines += [f"  and {size - _MAX_RANKS} more"] * (size > _MAX_RANKS)
    return "\n".join(
        [
            f"all {size} ranks wait for each other: they disagree on the next collective or the network fails; rank 0 is at",
            *(f"    {line}" for line in answers[0].stack[-6:]),
            "and the phases are",
            *lines,
        ]
    )


def _of_lost(
    lost: Sequence[int], answers: Mapping[int, Answer], ended: Mapping[int, str], hosts: Mapping[int, str], size: int
) -> str:
    waiting = next((answer for answer in answers.values() if answer.doing != BUSY), next(iter(answers.values()), None))
    where = "" if waiting is None else f", {waiting.place()}"
    lines = []
    for rank in sorted(lost, key=lambda rank: rank not in ended)[:_MAX_RANKS]:
        who = f"rank {rank} of {size} on {hosts.get(rank, 'an unknown machine')}"
        if rank in ended:
            lines.append(f"{who} has ended: {ended[rank]}")
        else:
            gone = "does not answer: its process was killed or stopped, or its machine is out of reach"
            lines.append(f"{who} {gone}; the others wait for it{where}")
    return "\n".join(lines + [f"and {len(lost) - _MAX_RANKS} more"] * (len(lost) > _MAX_RANKS))


def _of_stuck(culprits: Sequence[int], answers: Mapping[int, Answer], size: int) -> str:
    lines = [
        f"rank {rank} of {size} on {answers[rank].host} has been {answers[rank].place()}, the others wait for it"
        for rank in culprits[:_MAX_RANKS]
    ]
    lines += [f"and {len(culprits) - _MAX_RANKS} more"] * (len(culprits) > _MAX_RANKS)
    first = answers[culprits[0]]
    return "\n".join(
        [*lines, f"the stack of rank {culprits[0]}, innermost call last:", *(f"    {line}" for line in first.stack)]
    )
