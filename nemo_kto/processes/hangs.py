"""Diagnosis of a hang: the state of each rank, and the rank that the others wait for. No communication."""

from __future__ import annotations

import ctypes
import linecache
import os
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

import torch.distributed

MAX_FRAMES = 10  # frames of a printed stack, so that the cause is within the last 20 lines of an error
_MAX_RANKS = 6  # ranks that are described individually
_TORCH_DISTRIBUTED = os.path.dirname(torch.distributed.__file__) + os.sep
_WAIT = re.compile(r"\.wait\(")  # wait for a collective that runs in the background; megatron-core calls it directly

BUSY, WAITING, PATIENT = "busy", "waiting", "patient"
"""States of a rank: own work; in a collective; waiting through the store while another rank works long."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """State of a rank, as reported by the rank."""

    host: str
    phase: str  # current phases, outermost first, such as "validation/reference"; "" between phases
    last_phase: str  # the phase that ended last; "" if none has
    seconds: float  # since a phase last began or ended
    changes: int  # phases begun and ended so far; all ranks go through the same phases in the same order
    steps: int | None  # optimizer steps done; None before the training
    doing: str  # BUSY, WAITING or PATIENT
    stack: Sequence[str]  # a line for each of the innermost frames of the main thread, innermost last

    def place(self) -> str:
        """Return text such as "in phase 'data' for 95 s (11 steps done)"."""
        if self.phase:
            phase = f"in phase '{self.phase}'"
        else:
            phase = f"between phases, after '{self.last_phase}'," if self.last_phase else "before the first phase"
        done = "" if self.steps is None else f" ({self.steps} step{'s' * (self.steps != 1)} done)"
        return f"{phase} for {self.seconds:.0f} s{done}"


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
    """Return the state of a main thread from its innermost frame: BUSY or WAITING.

    ``device_busy``: the device has unfinished work; a collective on the device waits for the other ranks.
    """
    if frame is not None:
        file = frame.f_code.co_filename  # f_lineno may be None, between two lines
        if file.startswith(_TORCH_DISTRIBUTED) or _WAIT.search(linecache.getline(file, frame.f_lineno or 0)):
            return WAITING
    return WAITING if device_busy else BUSY


def stack_lines(frame: FrameType | None) -> list[str]:
    """Return a line for each of the innermost frames, innermost last; paths start at a package."""
    lines = []
    for one in traceback.extract_stack(frame, limit=MAX_FRAMES) if frame is not None else ():
        file = one.filename
        for folder, start in (("site-packages/", len("site-packages/")), ("nemo_kto/", 0)):
            if folder in file:
                file = file[file.rindex(folder) + start :]
                break
        lines.append(f"{file}:{one.lineno} in {one.name}: {one.line}"[:160])
    return lines


def judge(answers: Mapping[int, Answer], *, ended: Mapping[int, str], hosts: Mapping[int, str], size: int) -> str:
    """Return a message that names the rank or ranks that the others wait for.

    Ranks that do not answer are blamed first; then, among the ranks with the least progress, those that do their own work;
    then those that wait in an earlier phase. ``ended`` has the reason of each rank that announced its exit.
    """
    if lost := [rank for rank in range(size) if rank not in answers]:
        waiting = next((answer for answer in answers.values() if answer.doing != BUSY), next(iter(answers.values()), None))
        where = "" if waiting is None else f", {waiting.place()}"
        gone = "does not answer: its process was killed or stopped, or its machine cannot be reached; the others wait for it"
        lines = [
            f"rank {rank} of {size} on {hosts.get(rank, 'an unknown machine')} "
            + (f"has ended: {ended[rank]}" if rank in ended else f"{gone}{where}")
            for rank in sorted(lost, key=lambda rank: rank not in ended)
        ]
        return "\n".join(_shortened(lines))
    least = min(answer.changes for answer in answers.values())
    behind = [rank for rank in sorted(answers) if answers[rank].changes == least]
    if culprits := [rank for rank in behind if answers[rank].doing == BUSY] or (behind if len(behind) < size else []):
        found = (f"rank {rank} of {size} on {answers[rank].host} has been {answers[rank].place()}" for rank in culprits)
        lines = _shortened([f"{line}, the others wait for it" for line in found])
        lines.append(f"the stack of rank {culprits[0]}, innermost call last:")
        return "\n".join([*lines, *(f"    {line}" for line in answers[culprits[0]].stack)])
    places = [f"rank {rank} on {answers[rank].host}: {answers[rank].place()}" for rank in range(size)]
    lines = [
        f"all {size} ranks wait for each other: they disagree on the next collective or the network fails; rank 0 is at",
        *(f"    {line}" for line in answers[0].stack[-6:]),
        "and the phases are",
        *(f"  {line}" for line in _shortened(places)),
    ]
    return "\n".join(lines)


def _shortened(lines: list[str]) -> list[str]:
    return lines[:_MAX_RANKS] + [f"and {len(lines) - _MAX_RANKS} more"] * (len(lines) > _MAX_RANKS)
