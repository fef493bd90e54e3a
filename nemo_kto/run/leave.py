"""The end of a run that was asked to stop, once there is something to save."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from nemo_kto.algorithms.dpo import DPOTrainer
from nemo_kto.artifacts.checkpoint_files import CHECKPOINTS
from nemo_kto.checkpoint.distributed import find_checkpoints
from nemo_kto.config.schema import RunConfig
from nemo_kto.distributed import state
from nemo_kto.processes.signals import Stopped
from nemo_kto.processes.slurm import requeue


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
