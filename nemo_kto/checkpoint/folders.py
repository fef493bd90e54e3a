"""Folders that rank 0 writes and all ranks fill: complete under their name or not there at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from megatron.core import parallel_state
from torch import Tensor

from nemo_kto.errors import UserError
from nemo_kto.files import start_folder
from nemo_kto.parallel import state


def write_together(
    what: str,
    *,
    prepare: Callable[[], None],
    stream: Callable[[], Iterator[tuple[str, Tensor]]],
    write: Callable[[Iterator[tuple[str, Tensor]]], None],
    publish: Callable[[], None],
) -> None:
    """Let the ranks of the first copy of the model stream to rank 0, which writes; the others wait. Collective.

    Args:
        what: is being done, for the error.
        prepare: on rank 0, before anything.
        stream: on every rank of the first copy: sends this rank's part as it is used up; gives on rank 0 what to write.
        write: on rank 0, what the stream gives.
        publish: on rank 0, when all is written.

    Raises:
        UserError: ``prepare`` raised it; on every rank alike.
        RuntimeError: rank 0 failed; says why, on every rank alike.
    """
    first_rank, failure = state.is_rank_zero(), f"{what} failed: {{}}"
    state.on_rank_zero(prepare, failure)
    problem = None
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
        parts = stream()
        if first_rank:
            problem = state.attempt(lambda: write(parts))
        for _ in parts:  # the other ranks' part; and rank 0's too if it failed, or the others would wait for it
            pass
    if first_rank and problem is None:
        problem = state.attempt(publish)
    state.raise_together(problem, failure)


def start_partial(target: Path, *, is_ours: Callable[[Path], bool]) -> None:
    """Make the empty folder that becomes ``target``, which is replaced if ``is_ours``.

    Raises:
        UserError: something else is in the way, or the folder cannot be made.
    """
    is_empty = target.is_dir() and not any(target.iterdir())
    if target.exists() and not (is_empty or is_ours(target)):
        raise UserError(f"{target} exists and is no earlier export; remove it or export to another folder")
    try:
        start_folder(target)
    except OSError as error:
        raise UserError(f"{target} cannot be made: {error.strerror}; export to another folder") from error
