"""The run folder, which one job at a time writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from nemo_kto.distributed import state
from nemo_kto.errors import UserError
from nemo_kto.utils.files import make_folder, remove_unpublished
from nemo_kto.utils.locks import locked

RUN_LOCK = ".lock"  # in the run folder
_ANOTHER = "choose another folder with exp_manager.name or exp_manager.explicit_log_dir"


@contextlib.contextmanager
def hold_run_folder(folder: Path) -> Iterator[None]:
    """Keep other jobs out of a run folder during the block, by a lock that rank 0 holds; collective.

    The folder is made where it is absent, and removed again if nothing was written into it.

    Raises:
        UserError: another job is using it, or it cannot be written; on every rank alike.
    """
    with contextlib.ExitStack() as held:

        def take() -> None:
            held.enter_context(_held_here(folder))

        state.from_rank_zero(take, doing="taking the lock of the run folder")
        yield


@contextlib.contextmanager
def _held_here(folder: Path) -> Iterator[None]:
    absent = [each for each in (folder, *folder.parents) if not each.exists()]

    def refuse(who: str) -> NoReturn:
        told = f"{folder} must be used by one run at a time, but {who} uses it"
        raise UserError(f"{told}; wait until it has ended, or {_ANOTHER}")

    with contextlib.ExitStack() as lock:
        try:
            make_folder(folder, private=False)
            lock.enter_context(locked(folder / RUN_LOCK, when_held=refuse))
            remove_unpublished(folder)
        except OSError as error:
            raise UserError(f"{folder} must be a folder that can be written: {error.strerror}; {_ANOTHER}") from error
        try:
            yield
        finally:
            lock.close()
            with contextlib.suppress(OSError):  # something was written
                for each in absent:
                    each.rmdir()
