"""Early stopping, from the configuration and from what a checkpoint says of it."""

from __future__ import annotations

from collections.abc import Callable

from nemo_kto.algorithms.early_stopping import EarlyStopping
from nemo_kto.artifacts.checkpoint_files import Checkpoint
from nemo_kto.config.schema import RunConfig
from nemo_kto.errors import UserError
from nemo_kto.run.build_data import RunData


def build_early_stopping(cfg: RunConfig, *, agree: Callable[[int], int] | None = None) -> EarlyStopping | None:
    """What ends the run when its validations no longer improve; None if nothing does.

    Args:
        agree: the largest of what the ranks answer.
    """
    if not cfg.exp_manager.create_early_stopping_callback:
        return None
    settings = cfg.exp_manager.early_stopping_callback_params
    return EarlyStopping(
        monitor=settings.monitor,
        mode=settings.mode,
        min_delta=settings.min_delta,
        patience=settings.patience,
        agree=agree,
    )


def stopped_early(cfg: RunConfig, checkpoint: Checkpoint) -> str | None:
    """Why early stopping ended the run that the checkpoint is of, by the settings of now; None if it did not."""
    stopping = build_early_stopping(cfg)
    if stopping is None:
        return None
    stopping.load_state_dict(checkpoint.info["trainer"].get("early_stopping", {}))
    return stopping.reason


def check_early_stopping(cfg: RunConfig, data: RunData) -> None:
    """Make sure, before the training, that there are rows for its validations.

    Raises:
        UserError: no row was left for them.
    """
    if cfg.exp_manager.create_early_stopping_callback and not data.validation:
        key = "exp_manager.create_early_stopping_callback"
        text = f"must leave rows for validation with {key}=true, got none from {cfg.model.data.splits_string}"
        raise UserError(f'model.data.splits_string {text}; e.g. "90,10", or set {key}=false')
