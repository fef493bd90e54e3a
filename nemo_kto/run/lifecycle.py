"""Start and early end of a job: lock of the run folder, choice of precision, and exit of a stopped run."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from nemo_kto.algorithms.dpo import DPOTrainer
from nemo_kto.artifacts.checkpoint_files import CHECKPOINTS, find_checkpoints
from nemo_kto.checkpoint.distributed import checkpoint_dtype
from nemo_kto.config.schema import RunConfig
from nemo_kto.device.dtypes import DTYPES
from nemo_kto.device.precision import PRECISIONS, bf16_support
from nemo_kto.distributed import state
from nemo_kto.errors import UserError
from nemo_kto.processes.ranks import requeue
from nemo_kto.processes.signals import Stopped
from nemo_kto.utils.files import make_folder, remove_unpublished
from nemo_kto.utils.locks import locked

RUN_LOCK = ".lock"  # in the run folder
_ANOTHER = "choose another folder with exp_manager.name or exp_manager.explicit_log_dir"


@contextlib.contextmanager
def hold_run_folder(folder: Path) -> Iterator[None]:
    """Lock a run folder during the block, so that no other job uses it; collective, rank 0 holds the lock.

    The folder is created if it does not exist, and removed at the end if nothing was written into it.

    Raises:
        UserError: another job is using the folder, or it cannot be written; raised on all ranks.
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
        message = f"{folder} must be used by one run at a time, but {who} uses it"
        raise UserError(f"{message}; wait until it has ended, or {_ANOTHER}")

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
            with contextlib.suppress(OSError):  # a folder is not empty, because something was written into it
                for each in absent:
                    each.rmdir()


logger = logging.getLogger(__name__)


def resolve_precision(cfg: RunConfig) -> tuple[RunConfig, str]:
    """Replace trainer.precision=auto by bf16 or 32; collective.

    Rank 0 decides for all ranks: a resumed run keeps the precision of its newest checkpoint; a new run uses bf16 if the
    machine computes faster with it.

    Returns:
        The configuration with the precision, and the reason for it as text.
    """
    chosen, why = state.from_rank_zero(lambda: _choose(cfg), doing="choosing the precision")
    return cfg.model_copy(update={"trainer": cfg.trainer.model_copy(update={"precision": chosen})}), why


def _choose(cfg: RunConfig) -> tuple[str, str]:
    precision, why = PRECISIONS[cfg.trainer.precision], "set by the user"
    resumed = _of_checkpoint(cfg) if precision == "auto" else None
    if resumed is not None:
        precision, why = resumed, "that of the checkpoint it resumes from"
    if precision == "32":
        return precision, why
    support = bf16_support()
    if precision == "auto":
        precision, why = "bf16" if support.native else "32", support.why
    elif not support.native:
        remedy = "start a new run with trainer.precision=32 in another folder" if resumed else "use auto or 32"
        logger.warning(f"trainer.precision is bf16, but {support.why}; {remedy}")
    return precision, why


def _of_checkpoint(cfg: RunConfig) -> str | None:
    """Return the precision of the newest checkpoint if the run is resumed from it, else None."""
    run_folder = Path(cfg.exp_manager.explicit_log_dir)
    checkpoints = find_checkpoints(run_folder / CHECKPOINTS) if cfg.exp_manager.resume_if_exists else []
    dtype = checkpoint_dtype(checkpoints[-1].folder) if checkpoints else None
    return next((name for name, of_name in DTYPES.items() if of_name == dtype), None)


def stop_early(cfg: RunConfig, trainer: DPOTrainer) -> NoReturn:
    """End a run early, after its last checkpoint is complete; collective.

    Raises:
        Stopped: always.
    """
    reason = "" if trainer.stop is None else trainer.stop.text
    where = f"at step {trainer.step} of {trainer.max_steps}, checkpoint {newest_checkpoint(cfg)}"
    stop_run(f"stopped by {reason} {where if trainer.step else 'before the first step, with nothing to save'}", cfg)


def stop_run(text: str, cfg: RunConfig) -> NoReturn:
    """End the run: requeue its SLURM job if trainer.requeue is set, and print how it is resumed; collective.

    Args:
        text: reason for the end of the run.
        cfg: configuration of the run.

    Raises:
        Stopped: always.
    """
    if state.is_rank_zero():
        job = requeue(os.environ) if cfg.trainer.requeue else None
        how = "start the same command again to resume" if job is None else f"SLURM job {job} was requeued to resume"
        print(f"nemo-kto: {text}; {how}", file=sys.stderr, flush=True)
    state.largest(0)  # wait for rank 0, which is still busy: the exit of one rank may terminate the others
    raise Stopped


def newest_checkpoint(cfg: RunConfig) -> str:
    """Return the folder of the newest complete checkpoint of the run, or "none"."""
    checkpoints = find_checkpoints(Path(cfg.exp_manager.explicit_log_dir) / CHECKPOINTS)
    return str(checkpoints[-1].folder) if checkpoints else "none"
