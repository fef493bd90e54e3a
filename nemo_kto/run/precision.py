"""trainer.precision: what its spellings mean, and what auto becomes on the machine at hand."""

from __future__ import annotations

import logging
from pathlib import Path

from nemo_kto.artifacts.checkpoint_files import CHECKPOINTS, find_checkpoints
from nemo_kto.checkpoint.distributed import checkpoint_dtype
from nemo_kto.config.schema import RunConfig
from nemo_kto.device.dtypes import DTYPES
from nemo_kto.device.precision import PRECISIONS, bf16_support
from nemo_kto.distributed import state

logger = logging.getLogger(__name__)


def resolve_precision(cfg: RunConfig) -> tuple[RunConfig, str]:
    """The same configuration with trainer.precision bf16 or 32, and why it is that one; collective.

    Rank 0 decides for all ranks what auto becomes: a resumed run keeps the precision of its newest checkpoint, any other
    run takes bf16 where the machine computes faster with it.
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
    """The precision of the checkpoint that the run resumes from; None if it does not resume."""
    run_folder = Path(cfg.exp_manager.explicit_log_dir)
    checkpoints = find_checkpoints(run_folder / CHECKPOINTS) if cfg.exp_manager.resume_if_exists else []
    dtype = checkpoint_dtype(checkpoints[-1].folder) if checkpoints else None
    return next((name for name, of_name in DTYPES.items() if of_name == dtype), None)
