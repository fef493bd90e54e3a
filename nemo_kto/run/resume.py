"""Resume checks, and setup of early stopping, whose state a resumed run continues."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nemo_kto.algorithms.duration import TrainerConfig
from nemo_kto.algorithms.stopping import EarlyStopping
from nemo_kto.artifacts.checkpoint_files import CHECKPOINTS, INFO, Checkpoint, named_checkpoints
from nemo_kto.checkpoint.choose import newest_checkpoint
from nemo_kto.checkpoint.restricted import reading
from nemo_kto.config.schema import RunConfig
from nemo_kto.distributed import state
from nemo_kto.errors import UserError
from nemo_kto.run.data import RunData
from nemo_kto.run.facts import Facts, differences, facts_of_earlier, facts_of_run


def build_early_stopping(cfg: RunConfig, *, agree: Callable[[int], int] | None = None) -> EarlyStopping | None:
    """Build early stopping from the configuration; None if it is disabled.

    Args:
        cfg: configuration of the run.
        agree: return the maximum of an integer over all ranks; None for one rank.
    """
    if not cfg.exp_manager.create_early_stopping_callback:
        return None
    settings = cfg.exp_manager.early_stopping_callback_params
    return EarlyStopping(
        monitor=settings.monitor,
        mode=settings.mode,
        min_delta=settings.min_delta,
        patience=settings.patience,
        reduce_max=agree,
    )


def stopped_early(cfg: RunConfig, checkpoint: Checkpoint) -> str | None:
    """Return why early stopping ended the run of a checkpoint, under the current settings; None if it did not."""
    stopping = build_early_stopping(cfg)
    if stopping is None:
        return None
    stopping.load_state_dict(checkpoint.info["trainer"].get("early_stopping", {}))
    return stopping.reason


def check_early_stopping(cfg: RunConfig, data: RunData) -> None:
    """Check before training that early stopping has validation rows.

    Raises:
        UserError: there are no validation rows.
    """
    if cfg.exp_manager.create_early_stopping_callback and not data.validation:
        key = "exp_manager.create_early_stopping_callback"
        text = f"must leave rows for validation with {key}=true, got none from {cfg.model.data.splits_string}"
        raise UserError(f'model.data.splits_string {text}; e.g. "90,10", or set {key}=false')


logger = logging.getLogger(__name__)

_ANOTHER = "start a new run in another folder with exp_manager.name or exp_manager.explicit_log_dir"


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """Result of the resume checks on the run folder.

    Attributes:
        facts: facts that must not change when the run is resumed; they are saved in its checkpoints.
        checkpoint: checkpoint from which the run is resumed, the same on all ranks; None for a new run.
        finished: message that nothing is left to do; None if the run is not finished.
    """

    facts: Facts
    checkpoint: Checkpoint | None = None
    finished: str | None = None

    @property
    def resumed_step(self) -> int | None:
        """Number of steps already done; None for a new run."""
        return None if self.checkpoint is None else self.checkpoint.step


def look_for_run(cfg: RunConfig, data: RunData, trainer_cfg: TrainerConfig) -> Resumption:
    """Check the run folder and choose the checkpoint to resume from; collective, with the same result on all ranks.

    Nothing is written.

    Raises:
        UserError: the folder contains another run, facts have changed (the message lists all of them), or all checkpoints
            are damaged.
    """
    doing = "comparing the run with its folder"
    if not cfg.exp_manager.resume_if_exists:
        state.from_rank_zero(lambda: _refuse_checkpoints(cfg), doing=doing)
    newest = newest_checkpoint(_checkpoints(cfg))
    return state.from_rank_zero(lambda: _look(cfg, data, trainer_cfg, newest), doing=doing)


def _checkpoints(cfg: RunConfig) -> Path:
    return Path(cfg.exp_manager.explicit_log_dir) / CHECKPOINTS


def _refuse_checkpoints(cfg: RunConfig) -> None:
    if steps := list(named_checkpoints(_checkpoints(cfg)).values()):
        raise UserError(
            f"a new run must have a folder without checkpoints, but {_checkpoints(cfg)} has {len(steps)}, "
            f"the last of step {steps[-1]}; resume it with exp_manager.resume_if_exists=true, or {_ANOTHER}"
        )


def _look(cfg: RunConfig, data: RunData, trainer_cfg: TrainerConfig, newest: Checkpoint | None) -> Resumption:
    folder = Path(cfg.exp_manager.explicit_log_dir)
    facts = facts_of_run(cfg, data, trainer_cfg)
    if newest is None:
        return Resumption(facts=facts)
    with reading(newest.folder / INFO):
        changed = differences(_facts_of(newest, facts), facts)
    if changed:
        count = "1 change" if len(changed) == 1 else f"{len(changed)} changes"
        lines = [f"the run in {folder} cannot be resumed with {count}, nothing was written", *changed]
        raise UserError("\n  ".join([*lines, f"change {'it' if len(changed) == 1 else 'them'} back, or {_ANOTHER}"]))
    finished = _finished(cfg, newest, trainer_cfg, len(data.train.batch_sampler))
    return Resumption(facts=facts, checkpoint=newest, finished=finished)


def _facts_of(checkpoint: Checkpoint, now: Facts) -> Facts:
    kept = checkpoint.info.get("run")
    if kept is None:
        logger.warning(
            "%s is of an earlier version, which did not note what its run is of: that weights, data, seed and loss are the "
            "same cannot be checked",
            checkpoint.folder,
        )
    return facts_of_earlier(checkpoint.info, now) if kept is None else kept


def _finished(cfg: RunConfig, newest: Checkpoint, trainer_cfg: TrainerConfig, batches: int) -> str | None:
    """Return the message that nothing is left to do; None if the run is not finished."""
    step, total = newest.info["trainer"]["step"], trainer_cfg.total_steps(batches)
    stopped = stopped_early(cfg, newest) if step < total else None
    to_do = (step < total and stopped is None) or newest.info["trainer"].get("validation_due") or _lacks_export(cfg, newest)
    if to_do:
        return None
    why, settings = trainer_cfg.what_ends(batches)
    folder = cfg.exp_manager.explicit_log_dir
    longer = " and ".join(f"trainer.{cfg.recipe.name}.{setting}" for setting in settings)
    remedy = f"raise {longer}"
    if stopped is not None:
        why, remedy = f"early stopping: {stopped}", "set exp_manager.create_early_stopping_callback=false"
    text = f"already finished at step {step} of {total} ({why}), nothing was done in {folder}; {remedy} to train longer"
    return f"{text}, or {_ANOTHER}"


def _lacks_export(cfg: RunConfig, newest: Checkpoint) -> bool:
    """Return whether a run that reached its last step still lacks an export.

    Exports are written atomically, so an existing one is complete. An export older than the newest checkpoint belongs to an
    earlier step.
    """
    if not cfg.export.enabled:
        return False
    adapters = [cfg.export.adapter_path] if cfg.model.peft.peft_scheme != "none" else []
    written = (newest.folder / INFO).stat().st_mtime_ns
    return not all(
        Path(path).is_dir() and os.listdir(path) and os.stat(path).st_mtime_ns >= written
        for path in (*adapters, cfg.export.path)
    )
