"""The best validation so far, and when a run ends before its last step: early stopping, and too many skipped steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_kto.errors import UserError

logger = logging.getLogger(__name__)

_MAX_NAMED = 8  # maximum number of rows, and of ranks, in a message


@dataclass(kw_only=True, eq=False)
class BestValidation:
    """The best value of a validation metric so far, on which all ranks agree."""

    monitor: str  # validation metric, as val_NAME
    mode: str  # "min" or "max": whether smaller or larger values are better
    min_delta: float = 0.0  # a change counts as an improvement only if it is larger than this
    reduce_max: Callable[[int], int] | None = None  # maximum over all ranks, so that they agree; None for a single rank

    def __post_init__(self) -> None:
        self.best: float | None = None
        self.best_step = 0
        self.waited = 0  # validations since the best one
        self.is_finite = True

    def update(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Evaluate a validation after ``step``, unless it lacks the metric. Collective if ``reduce_max`` is set."""
        value = metrics.get(self.monitor.removeprefix("val_"))
        if value is None:  # such as the AUC of a single class
            return
        improved = True
        if self.best is not None:
            gain = self.best - value if self.mode == "min" else value - self.best
            improved = gain > self.min_delta
        status = 2 if not math.isfinite(value) else int(not improved)
        if self.reduce_max is not None:
            status = self.reduce_max(status)
        self.is_finite = status < 2
        if status == 0:
            self.best, self.best_step, self.waited = value, step, 0
        else:
            self.waited += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run."""
        return {name: getattr(self, name) for name in ("monitor", "mode", "best", "best_step", "waited", "is_finite")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`; a state of another metric or mode is ignored."""
        if (state.get("monitor"), state.get("mode")) == (self.monitor, self.mode):
            self.best, self.best_step = state["best"], state["best_step"]
            self.waited, self.is_finite = state["waited"], state["is_finite"]


@dataclass(kw_only=True, eq=False)
class EarlyStopping(BestValidation):
    """Counter of validations without improvement, as in Lightning's EarlyStopping; a non-finite value also ends the run."""

    patience: int  # number of consecutive validations without improvement that ends the run

    def update(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Evaluate a validation after ``step``; UserError if it lacks the metric. Collective if ``reduce_max`` is set."""
        if self.monitor.removeprefix("val_") not in metrics:
            raise UserError(
                "exp_manager.checkpoint_callback_params.monitor must be a validation metric for early stopping, got "
                f"{self.monitor}; choose one of {', '.join(f'val_{name}' for name in metrics)}"
            )
        super().update(metrics, step=step)

    @property
    def reason(self) -> str | None:
        """Reason for ending the run, as text; None if it continues."""
        if not self.is_finite:
            return f"{self.monitor} is not finite"
        if self.best is None or self.waited < self.patience:
            return None
        more = f" by more than {self.min_delta:g}" if self.min_delta else ""
        last = "validation" if self.waited == 1 else f"{self.waited} validations"
        best = f"it was {self.best:.4f} at step {self.best_step}"
        return f"{self.monitor} has not improved{more} in the last {last}; {best}"


@dataclass(kw_only=True, eq=False)
class SkippedSteps:
    """Counter of skipped steps, which reports each of them and ends the run after too many consecutive ones."""

    max_in_a_row: int = 1  # number of consecutive skipped steps that ends the run
    name_rows: Callable[[Sequence[int]], Sequence[str]] | None = None  # sources of examples by index: "rows.jsonl:3"
    last_checkpoint: Callable[[], str] | None = None  # describes the newest complete checkpoint; all ranks call it
    logs: bool = True  # whether this rank logs skipped steps

    def __post_init__(self) -> None:
        self.total = 0
        self.in_a_row = 0

    def applied(self) -> None:
        self.in_a_row = 0

    def skip(self, reason: str, *, step: int, ranks: Sequence[int], examples: Sequence[int]) -> None:
        """Record a skipped step, counted from 1, with a reason such as "the loss is nan".

        ``ranks`` are those whose own values were not finite, empty if only the values reduced over all ranks are not;
        ``examples`` are the indices of the examples of the global batch.

        Raises:
            UserError: too many consecutive steps were skipped; the message names the last of them.
        """
        self.total += 1
        self.in_a_row += 1
        text = f"step {step}: {reason}"
        if ranks:
            text += f" on {_some(ranks, 'rank')}"
        if self.name_rows is not None:
            text += f"; rows of this global batch: {_some(self.name_rows(examples))}"
        if self.in_a_row < self.max_in_a_row:
            if self.logs:
                logger.warning(f"{text}; step skipped, {self.in_a_row} in a row")
            return
        skipped = "1 step" if self.in_a_row == 1 else f"{self.in_a_row} steps in a row"
        raise UserError(f"{text}; {skipped} skipped (trainer.max_skipped_steps={self.max_in_a_row}){self.advice}")

    @property
    def advice(self) -> str:
        """End of a message about non-finite values: the last good checkpoint and what to do."""
        known = "" if self.last_checkpoint is None else f"; last good checkpoint: {self.last_checkpoint()}"
        return f"{known}; lower model.optim.lr, or check these rows"


def _some(items: Sequence[object], noun: str = "") -> str:
    """Join the first items as text, followed by the number of omitted ones."""
    named = ", ".join(str(item) for item in items[:_MAX_NAMED])
    more = f" and {len(items) - _MAX_NAMED} more" if len(items) > _MAX_NAMED else ""
    return f"{noun}{'s' * (len(items) != 1)} {named}{more}" if noun else f"{named}{more}"
