"""Folders that rank 0 writes and all ranks fill: complete under their name or not there at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state


def partial_folder(target: Path) -> Path:
    """Where a folder is written before it gets its name."""
    return target.with_name(f"{target.name}.partial")


def write_together(
    what: str,
    *,
    prepare: Callable[[], str | None],
    stream: Callable[[], Iterator[Any]],
    write: Callable[[Iterator[Any]], None],
    publish: Callable[[], None],
) -> None:
    """Let the ranks of the first copy of the model stream to rank 0, which writes; the others wait. Collective.

    Args:
        what: is being done, for the error.
        prepare: on rank 0, before anything; gives what is in the way, or None.
        stream: on every rank of the first copy: sends this rank's part as it is used up; gives on rank 0 what to write.
        write: on rank 0, what the stream gives.
        publish: on rank 0, when all is written.

    Raises:
        RuntimeError: rank 0 failed; says why, on every rank alike.
    """
    first_rank = dist.get_rank() == 0
    _raise_together(what, prepare() if first_rank else None)
    problem = None
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
        parts = stream()
        if first_rank:
            problem = attempt(lambda: write(parts))
        for _ in parts:  # the other ranks' part; and rank 0's too if it failed, or the others would wait for it
            pass
    if first_rank and problem is None:
        problem = attempt(publish)
    _raise_together(what, problem)


def start_partial(target: Path, *, is_ours: Callable[[Path], bool]) -> str | None:
    """Make the empty folder that becomes ``target``; what is in the way, or None.

    Args:
        is_ours: an existing folder may be replaced.
    """
    if target.exists() and not (is_empty(target) or is_ours(target)):
        return f"{target} exists and is no earlier export; remove it or export to another folder"

    def make() -> None:
        shutil.rmtree(partial_folder(target), ignore_errors=True)  # left by an export that was interrupted
        partial_folder(target).mkdir(parents=True)

    return attempt(make)


def put_in_place(target: Path) -> None:
    """Give the folder its name, in the place of an earlier one."""
    if not target.exists():
        partial_folder(target).rename(target)
        return
    replaced = target.with_name(target.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    target.rename(replaced)
    partial_folder(target).rename(target)
    shutil.rmtree(replaced)


def is_empty(folder: Path) -> bool:
    """True for a folder without anything in it."""
    return folder.is_dir() and not any(folder.iterdir())


def attempt(action: Callable[[], None]) -> str | None:
    """Do it; what went wrong as text, because the other ranks must hear of it before anybody leaves."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _raise_together(what: str, problem: str | None) -> None:
    """Raise rank 0's problem on every rank; also waits until rank 0 is here."""
    box = [problem]
    dist.broadcast_object_list(box, src=0)
    if box[0] is not None:
        raise RuntimeError(f"{what} failed: {box[0]}")
