"""Exports: folders that all ranks fill and rank 0 writes, which appear complete under their name or not at all.

PARENT/.OUT.export-<32 digits>     while it is written; the next export to OUT removes leftovers of killed exports
PARENT/.OUT.earlier-<32 digits>    the export that is replaced, while the new one is being renamed
PARENT/.OUT.lock                   the lock of the process that writes
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
from nemo_kto.huggingface.rank_weights import sends_weights
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
    """Export a model from all ranks: ranks with the first copy of a weight stream it to rank 0, which writes. Collective.

    ``stream`` is called on every rank with a first copy; its iterator sends this rank's weights as it is consumed and, on
    rank 0, yields the weights to write. Other ranks wait. Rank 0 first calls ``prepare``, and then ``write`` with a folder
    for the streamed weights and all other files of the export. ``is_ours`` tells whether a folder is an earlier export of
    the same kind, which is replaced. ``what`` names the operation in errors.

    Raises, on every rank:
        UserError: raised by ``prepare``, or something else is in the way at ``target``, or a weight is not finite.
        RuntimeError: rank 0 failed; gives the reason.
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
            for _ in parts:  # the other ranks must send their weights; rank 0 drains the stream even if its write failed
                pass
        if first_rank and problem is None:
            problem = state.attempt(folder.publish)
        state.raise_together(problem, f"{failure}; nothing was written to {target}")
    finally:
        folder.discard()


def _checked(weight: tuple[str, Tensor]) -> tuple[str, Tensor]:
    """Return the weight unchanged after checking that all its values are finite."""
    name, tensor = weight
    if not math.isfinite(float(tensor.sum())) and not (finite := torch.isfinite(tensor)).all():
        wrong = f"{int((~finite).sum())} of {tensor.numel()} values that are not"
        remedy = "export an earlier checkpoint of the run, and train with a lower learning rate"
        raise UserError(f"{name} must be finite, got {wrong}; {remedy}")
    return weight


def check_target(target: Path, *, is_ours: Callable[[Path], bool], need: int = 0) -> None:
    """Check that a folder can be exported to, without leaving anything in it.

    ``is_ours`` is as for :func:`write_together`; ``need`` is the number of bytes to be written. Raises UserError if the
    folder has other content, it cannot be created, or there is not enough free space.
    """
    target = Path(os.path.realpath(target))
    try:
        is_empty = target.is_dir() and not any(target.iterdir())
        if target.exists() and not (is_empty or is_ours(target)):
            raise UserError(f"{target} exists and is not an earlier export; remove it or {_ELSEWHERE}")
        nearest = next(place for place in target.parents if place.exists())
        os.rmdir(tempfile.mkdtemp(dir=nearest))
        room = shutil.disk_usage(nearest).free
    except OSError as error:
        raise UserError(f"{target} cannot be created: {error.strerror}; {_ELSEWHERE}") from error
    if room < need:
        message = f"{nearest} must have {need / 1e9:.1f} GB of free space for the export, got {room / 1e9:.1f} GB"
        raise UserError(f"{message}; free some space or {_ELSEWHERE}")


class NewFolder:
    """A folder that replaces an earlier one as a whole or not at all; a target that is a link is resolved first."""

    def __init__(self, *, target: Path) -> None:
        self._target = Path(os.path.realpath(target))
        self._lock = contextlib.ExitStack()
        self.path = self._beside(f"export-{uuid.uuid4().hex}")

    def _beside(self, name: str) -> Path:
        return self._target.with_name(f".{self._target.name}.{name}")

    def _left(self, kind: str) -> list[Path]:
        """Return the paths of a kind that killed processes have left."""
        name = re.compile(re.escape(self._beside(kind).name) + "-[0-9a-f]{32}")
        return [path for path in self._target.parent.iterdir() if name.fullmatch(path.name)]

    def start(self) -> None:
        """Wait until no other process writes the same folder, then create :attr:`path`, empty; OSError if that fails.

        Leftovers of killed processes are removed; an earlier folder that was being replaced gets its name back.
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
        """Flush the content to disk and rename the folder to its target; on an OSError an earlier folder is kept."""
        plain = self.path.stat().st_mode & 0o666  # as the umask allows; safetensors creates files for their owner only
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
        """Remove the folder if it was not published, and release the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
