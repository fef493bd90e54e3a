"""Counts the waits of the host for the device, by kind and causing lines."""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

# Their callers are named too: the innermost lines of a site up to the first line of nemo_kto that is not one of these.
HELPERS = ("nemo_kto/device/device.py", "nemo_kto/distributed/collectives.py", "nemo_kto/distributed/state.py")
MAX_LINES = 3
_NOT_SHOWN = ("/torch/", "<frozen", "/threading.py", "/contextlib.py", "/functools.py")
_MODULES = "waits", "copies", "memory", "kernels", "attention", "host_work"
_OWN = tuple(str(Path(__file__).with_name(f"{name}.py")) for name in _MODULES)
_PYTHON = (sysconfig.get_paths()["stdlib"], "<frozen")


class Wait(NamedTuple):
    """A wait of the host.

    Attributes:
        kind: the operation that waits.
        site: the innermost lines outside of torch, separated by " < ".
        in_micro_batch: it happens in the forward or backward pass of a micro-batch.
    """

    kind: str
    site: str
    in_micro_batch: bool


counted: Counter[Wait] = Counter()
_debug_mode = 0  # of torch.cuda.set_sync_debug_mode
_quiet = threading.local()


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Within it the emulation itself uses torch."""
    before = getattr(_quiet, "on", False)
    _quiet.on = True
    try:
        yield
    finally:
        _quiet.on = before


def note(kind: str, *, explicit: bool = False) -> None:
    """Count a wait.

    Args:
        kind: the operation that waits.
        explicit: it is a call of ``synchronize``, which torch.cuda.set_sync_debug_mode does not report.

    Raises:
        RuntimeError: torch.cuda.set_sync_debug_mode("error") is set.
    """
    if not is_counting():
        return
    wait = here(kind)
    counted[wait] += 1
    message = f"called a synchronizing CUDA operation: {kind} at {wait.site}"
    if _debug_mode == 2 and not explicit:
        raise RuntimeError(message)
    if _debug_mode == 1 and not explicit:
        warnings.warn(message, stacklevel=3)


def is_counting() -> bool:
    """Whether the current operation is the product's, not one of the emulation."""
    return not getattr(_quiet, "on", False)


def here(kind: str) -> Wait:
    """An operation at the current line."""
    frames = _frames()
    return Wait(kind, _site(frames), _in_micro_batch(frames))


def in_micro_batch() -> bool:
    """Whether the current line is in the forward or backward pass of a micro-batch."""
    return _in_micro_batch(_frames())


def calls_from_package() -> bool:
    """Whether the innermost line outside of Python's own modules is one of nemo_kto."""
    files = (frame.f_code.co_filename for frame in _frames())
    outside = next((file for file in files if "/site-packages/" in file or not file.startswith(_PYTHON)), "")
    return "/nemo_kto/" in outside


def site() -> str:
    """The lines outside of torch that lead to here."""
    return _site(_frames())


def is_gloo() -> bool:
    """Whether gloo makes the current copy: in its own thread, or in a call of torch.distributed."""
    frames = _frames()
    if not frames:
        return torch._C._current_graph_task_id() == -1  # or else in a backward pass
    return frames[0].f_code.co_filename.endswith("/distributed_c10d.py")


def _frames() -> list[FrameType]:
    """From the innermost, without the emulation's own."""
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename not in _OWN:
            frames.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return frames


def _site(frames: list[FrameType]) -> str:
    lines: list[str] = []
    for frame in frames:
        file = frame.f_code.co_filename
        if any(part in file for part in _NOT_SHOWN):
            continue
        file = file.rpartition("/site-packages/")[2]
        file = file[max(file.rfind("/nemo_kto/"), 0) :].lstrip("/")
        lines.append(f"{file}:{frame.f_lineno}({frame.f_code.co_name})")
        if len(lines) == MAX_LINES or (file.startswith("nemo_kto/") and not file.startswith(HELPERS)):
            break
    return " < ".join(lines) or "backward pass"  # its thread runs no Python


def _in_micro_batch(frames: list[FrameType]) -> bool:
    """Within megatron-core's schedule, except where it finishes the gradients of the step, or in autograd's thread."""
    if not frames or frames[-1].f_code.co_filename.endswith("/torch/autograd/function.py"):
        return True
    scheduled = any(frame.f_code.co_filename.endswith("/pipeline_parallel/schedules.py") for frame in frames)
    return scheduled and not any("finalize" in frame.f_code.co_name for frame in frames)


def set_debug_mode(mode: int | str) -> None:
    """torch.cuda.set_sync_debug_mode, stored in this module, because gloo, used for NCCL, waits in its own threads."""
    global _debug_mode
    _debug_mode = {"default": 0, "warn": 1, "error": 2}[mode] if isinstance(mode, str) else mode
