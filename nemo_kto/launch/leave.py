"""The end of a run that was asked to stop: what is said, and its SLURM job put back into the queue."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from nemo_kto.algorithms.dpo import DPOTrainer
from nemo_kto.checkpoint.checkpoint_files import CHECKPOINTS
from nemo_kto.checkpoint.distributed import find_checkpoints
from nemo_kto.launch.schema import RunConfig
from nemo_kto.parallel import state
from nemo_kto.parallel.signals import Stopped

logger = logging.getLogger(__name__)

_SCONTROL_SECONDS = 60


def leave_early(cfg: RunConfig, trainer: DPOTrainer) -> NoReturn:
    """Leave a run whose last checkpoint is complete; collective.

    Raises:
        Stopped: always.
    """
    reason = "" if trainer.stop is None else trainer.stop.text
    where = f"at step {trainer.step} of {trainer.max_steps}, checkpoint {newest_checkpoint(cfg)}"
    leave(f"stopped by {reason} {where if trainer.step else 'before the first step, with nothing to save'}", cfg)


def leave(text: str, cfg: RunConfig) -> NoReturn:
    """Say why the run ends here and how it is resumed, requeue its job where it is asked for, and leave; collective.

    Raises:
        Stopped: always.
    """
    if state.is_rank_zero():
        job = requeue(os.environ) if cfg.trainer.requeue else None
        how = "start the same command again to resume" if job is None else f"SLURM job {job} was requeued to resume"
        print(f"nemo-kto: {text}; {how}", file=sys.stderr, flush=True)
    state.largest(0)  # a rank that ends may take the others with it, and rank 0 was busy until here
    raise Stopped


def newest_checkpoint(cfg: RunConfig) -> str:
    """The folder of the newest complete checkpoint of the run; "none" where there is none."""
    checkpoints = find_checkpoints(Path(cfg.exp_manager.explicit_log_dir) / CHECKPOINTS)
    return str(checkpoints[-1].folder) if checkpoints else "none"


def requeue(environ: dict[str, str] | os._Environ[str]) -> str | None:
    """Put the SLURM job of this process back into the queue.

    Returns:
        The number of the job, of an array job with its task; None where that failed, which is said.
    """
    job = environ.get("SLURM_JOB_ID")
    if array := environ.get("SLURM_ARRAY_JOB_ID"):
        job = f"{array}_{environ.get('SLURM_ARRAY_TASK_ID')}"
    if job is None:
        logger.warning("trainer.requeue needs a SLURM job, got none (SLURM_JOB_ID is not set); nothing was requeued")
        return None
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_SECONDS, check=False)
        problem = (done.stderr.strip() or f"status {done.returncode}") if done.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem is not None:
        logger.warning(f"`{' '.join(command)}` failed, nothing was requeued: {problem}")
        return None
    return job
