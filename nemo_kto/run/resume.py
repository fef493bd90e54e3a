"""Resume checks, and setup of early stopping, whose state a resumed run continues."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from nemo_kto.algorithms.stopping import EarlyStopping
from nemo_kto.artifacts.checkpoint_files import INFO, Checkpoint, named_checkpoints
from nemo_kto.checkpoint.discovery import newest_checkpoint
from nemo_kto.checkpoint.safe_loading import read_errors
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.config.schema import RunConfig
from nemo_kto.distributed import state
from nemo_kto.errors import UserError, plural
from nemo_kto.run.data import RunData
from nemo_kto.run.facts import Facts, differences, facts_of_earlier, facts_of_run

logger = logging.getLogger(__name__)

_ANOTHER = "start a new run in another folder with exp_manager.name or exp_manager.explicit_log_dir"
_EARLY_STOPPING = "exp_manager.create_early_stopping_callback"


def build_early_stopping(cfg: RunConfig, *, agree: Callable[[int], int] | None = None) -> EarlyStopping | None:
    """Build early stopping from the configuration; None if it is disabled.

    ``agree`` returns the maximum of an integer over all ranks; None for one rank.
    """
    if not cfg.exp_manager.create_early_stopping_callback:
        return None
    return EarlyStopping(**cfg.exp_manager.early_stopping_callback_params.model_dump(), reduce_max=agree)


def check_validation_rows(cfg: RunConfig, data: RunData) -> None:
    """Raise UserError if early stopping or the choice of the best model needs validation rows and there are none."""
    needs = {
        "export.which": (cfg.export.enabled and cfg.export.which == "best", "best", "last"),
        _EARLY_STOPPING: (cfg.exp_manager.create_early_stopping_callback, "true", "false"),
    }
    for key, (is_needed, value, without) in needs.items():
        if is_needed and not data.validation:
            text = f"must leave rows for validation with {key}={value}, got none from {cfg.model.data.splits_string}"
            raise UserError(f'model.data.splits_string {text}; e.g. "90,10", or set {key}={without}')


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """Result of the resume checks on the run folder."""

    facts: Facts  # saved in the checkpoints; they must not change when the run is resumed
    checkpoint: Checkpoint | None = None  # to resume from, the same on all ranks; None for a new run
    finished: str | None = None  # message that nothing is left to do; None if the run is not finished

    @property
    def resumed_step(self) -> int | None:
        """Number of steps already done; None for a new run."""
        return None if self.checkpoint is None else self.checkpoint.step


def look_for_run(run: ResolvedRun, data: RunData) -> Resumption:
    """Check the run folder and choose the checkpoint to resume from; collective, with the same result on all ranks.

    Nothing is written. Raises UserError if the folder contains another run, facts have changed (the message lists all of
    them), or all checkpoints are damaged.
    """
    doing = "comparing the run with its folder"

    def refuse_checkpoints() -> None:
        if steps := list(named_checkpoints(run.checkpoints).values()):
            raise UserError(
                f"a new run must have a folder without checkpoints, but {run.checkpoints} has {len(steps)}, "
                f"the last of step {steps[-1]}; resume it with exp_manager.resume_if_exists=true, or {_ANOTHER}"
            )

    if not run.cfg.exp_manager.resume_if_exists:
        state.from_rank_zero(refuse_checkpoints, doing=doing)
    newest = newest_checkpoint(run.checkpoints)
    return state.from_rank_zero(lambda: _compare(run, data, newest), doing=doing)


def _compare(run: ResolvedRun, data: RunData, newest: Checkpoint | None) -> Resumption:
    facts = facts_of_run(run, data)
    if newest is None:
        return Resumption(facts=facts)
    with read_errors(newest.folder / INFO):
        saved = newest.info.get("run")
        if saved is None:
            text = "%s was written by an earlier version without the facts of its run: whether weights, data, seed and loss "
            logger.warning(text + "are the same cannot be checked", newest.folder)
            saved = facts_of_earlier(newest.info, facts)
        changed = differences(saved, facts)
    if changed:
        count = plural(len(changed), "change")
        lines = [f"the run in {run.folder} cannot be resumed with {count}, nothing was written", *changed]
        raise UserError("\n  ".join([*lines, f"change {'it' if len(changed) == 1 else 'them'} back, or {_ANOTHER}"]))
    finished = _finished(run, newest, len(data.train.batch_sampler))
    return Resumption(facts=facts, checkpoint=newest, finished=finished)


def _finished(run: ResolvedRun, newest: Checkpoint, batches: int) -> str | None:
    """Return the message that nothing is left to do; None if the run is not finished."""
    trainer, total = newest.info["trainer"], run.length.total_steps(batches)
    step, stopping = trainer["step"], build_early_stopping(run.cfg)
    stopped = None
    if step < total and stopping is not None:
        stopping.load_state_dict(trainer.get("early_stopping", {}))
        stopped = stopping.reason
    if (step < total and stopped is None) or trainer.get("validation_due") or _lacks_export(run, newest):
        return None
    reason, settings = run.length.what_ends(batches)
    remedy = f"raise {' and '.join(f'trainer.{run.cfg.recipe.name}.{setting}' for setting in settings)}"
    if stopped is not None:
        reason, remedy = f"early stopping: {stopped}", f"set {_EARLY_STOPPING}=false"
    text = f"already finished at step {step} of {total} ({reason}), nothing was done in {run.folder}"
    return f"{text}; {remedy} to train longer, or {_ANOTHER}"


def _lacks_export(run: ResolvedRun, newest: Checkpoint) -> bool:
    """Return whether a run that reached its last step still lacks an export.

    Exports are written atomically, so an existing one is complete. An export older than the newest checkpoint belongs to an
    earlier step.
    """
    export = run.cfg.export
    paths = [export.path, *([export.adapter_path] if run.has_adapters else [])] if export.enabled else []
    written = (newest.folder / INFO).stat().st_mtime_ns
    return not all(os.path.isdir(path) and os.listdir(path) and os.stat(path).st_mtime_ns >= written for path in paths)
