"""Exports: folders that rank 0 writes and all ranks fill, complete under their name or not there at all.

PARENT/.OUT.export-<32 digits>     while it is written; what a killed export has left is removed by the next one to OUT
PARENT/.OUT.earlier-<32 digits>    the export that is replaced, for the moment in which the new one gets its name
PARENT/.OUT.lock                   who is writing
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from nemo_kto.distributed import state
from nemo_kto.errors import UserError
from nemo_kto.huggingface.stream import sends_weights
from nemo_kto.utils.files import flush
from nemo_kto.utils.locks import one_writer

_ELSEWHERE = "export to another folder"


def write_together(
    what: str,
    *,
    target: Path,
    is_ours: Callable[[Path], bool],
    prepare: Callable[[], object],
    stream: Callable[[], Iterator[tuple[str, Tensor]]],
    write: Callable[[Path, Iterator[tuple[str, Tensor]]], None],
) -> None:
    """Let the ranks that hold the first copy of a weight stream to rank 0, which writes; the others wait. Collective.

    Args:
        what: is being done, for the error.
        target: folder to write; an earlier one is replaced if ``is_ours``.
        prepare: on rank 0, before anything.
        stream: on every rank with a first copy: sends this rank's part as it is used up; gives on rank 0 what to write.
        write: on rank 0, what the stream gives, into a folder, with all else that belongs there.

    Raises:
        UserError: ``prepare`` raised it, something is in the way, or a weight is no finite number; on every rank alike.
        RuntimeError: rank 0 failed; says why, on every rank alike.
    """
    first_rank, failure, folder = state.is_rank_zero(), f"{what} failed: {{}}", NewFolder(target=target)

    def start() -> None:
        prepare()
        check_target(target, is_ours=is_ours)
        folder.start()

    try:
        state.on_rank_zero(start, failure)
        problem = None
        if sends_weights():
            parts = stream()
            if first_rank:
                problem = state.attempt(lambda: write(folder.path, map(_checked, parts)))
            for _ in parts:  # the other ranks' part; and rank 0's too if it failed, or the others would wait for it
                pass
        if first_rank and problem is None:
            problem = state.attempt(folder.publish)
        state.raise_together(problem, f"{failure}; nothing was written to {target}")
    finally:
        folder.discard()


def _checked(weight: tuple[str, Tensor]) -> tuple[str, Tensor]:
    """The same, if all its values are finite."""
    name, tensor = weight
    if not math.isfinite(float(tensor.sum())) and not (finite := torch.isfinite(tensor)).all():
        wrong = f"{int((~finite).sum())} of {tensor.numel()} that are not"
        remedy = "export an earlier checkpoint of the run, and train with a lower learning rate"
        raise UserError(f"{name} must be finite numbers, got {wrong}; {remedy}")
    return weight


def check_target(target: Path, *, is_ours: Callable[[Path], bool], need: int = 0) -> None:
    """Look whether a folder can be exported to. Nothing is left there.

    Args:
        is_ours: whether a folder is an earlier export, which may be replaced.
        need: bytes that will be written.

    Raises:
        UserError: something else is in the way, the folder cannot be made, or there is not enough room.
    """
    target = Path(os.path.realpath(target))
    try:
        is_empty = target.is_dir() and not any(target.iterdir())
        if target.exists() and not (is_empty or is_ours(target)):
            raise UserError(f"{target} exists and is no earlier export; remove it or {_ELSEWHERE}")
        nearest = next(place for place in target.parents if place.exists())
        os.rmdir(tempfile.mkdtemp(dir=nearest))
        room = shutil.disk_usage(nearest).free
    except OSError as error:
        raise UserError(f"{target} cannot be made: {error.strerror}; {_ELSEWHERE}") from error
    if room < need:
        told = f"{nearest} must have room for the {need / 1e9:.1f} GB of the export, got {room / 1e9:.1f} GB"
        raise UserError(f"{told}; free some or {_ELSEWHERE}")


class NewFolder:
    """A folder that appears complete, in the place of an earlier one, or not at all. A link stands for where it leads."""

    def __init__(self, *, target: Path) -> None:
        self._target = Path(os.path.realpath(target))
        self._lock = contextlib.ExitStack()
        self.path = self._beside(f"export-{uuid.uuid4().hex}")

    def _beside(self, name: str) -> Path:
        return self._target.with_name(f".{self._target.name}.{name}")

    def _left(self, kind: str) -> list[Path]:
        """What killed processes have left."""
        name = re.compile(re.escape(self._beside(kind).name) + "-[0-9a-f]{32}")
        return [path for path in self._target.parent.iterdir() if name.fullmatch(path.name)]

    def start(self) -> None:
        """Make :attr:`path`, empty, and wait before while another process writes the same folder.

        What killed processes have left is removed, or gets its name back if it was being replaced.

        Raises:
            OSError: it cannot be made.
        """
        self._target.parent.mkdir(parents=True, exist_ok=True)
        self._lock.enter_context(one_writer(self._target, private=False))
        for earlier in self._left("earlier"):
            if not self._target.exists():
                earlier.rename(self._target)
        for left in (*self._left("earlier"), *self._left("export")):
            shutil.rmtree(left, ignore_errors=True)
        self.path.mkdir()

    def publish(self) -> None:
        """Give the folder its name, when its content is on disk.

        Raises:
            OSError: it is not; an earlier folder is still there.
        """
        plain = self.path.stat().st_mode & 0o666  # as the umask says; safetensors makes files for their owner only
        for path in [*self.path.rglob("*"), self.path]:
            if path.is_file():
                path.chmod(plain)
            flush(path)
        earlier = self._beside(f"earlier-{uuid.uuid4().hex}")
        with contextlib.suppress(FileNotFoundError):
            self._target.rename(earlier)
        try:
            self.path.rename(self._target)
        except OSError:
            with contextlib.suppress(OSError):
                earlier.rename(self._target)
            raise
        flush(self._target.parent)
        shutil.rmtree(earlier, ignore_errors=True)

    def discard(self) -> None:
        """Remove what was not published."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
