"""Early stopping: end a run when its validation metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_kto.errors import UserError


@dataclass(kw_only=True, eq=False)
class EarlyStopping:
    """Counter of validations without improvement, as in EarlyStopping of PyTorch Lightning.

    A non-finite value ends the run at once.

    Attributes:
        monitor: validation metric to monitor, as val_NAME.
        mode: "min" or "max": whether smaller or larger values are better.
        min_delta: a change counts as an improvement only if it is larger than this.
        patience: number of consecutive validations without improvement that ends the run.
        agree: return the maximum of an integer over all ranks, so that all ranks decide the same; None if there is only
            one rank.
    """

    monitor: str
    mode: str
    min_delta: float
    patience: int
    agree: Callable[[int], int] | None = None

    def __post_init__(self) -> None:
        self.best: float | None = None
        self.best_step = 0
        self.waited = 0  # validations since the best one
        self.is_finite = True

    def update(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Evaluate the metrics of a validation after ``step``; collective if ``agree`` is set.

        Raises:
            UserError: the monitored metric is not among ``metrics``.
        """
        name = self.monitor.removeprefix("val_")
        if name not in metrics:
            raise UserError(
                f"exp_manager.early_stopping_callback_params.monitor must be a metric that the validations give, got "
                f"{self.monitor}; they give {', '.join(f'val_{name}' for name in metrics)}"
            )
        value = metrics[name]
        answer = 2 if not math.isfinite(value) else int(not self._improves(value))
        if self.agree is not None:
            answer = self.agree(answer)
        self.is_finite = answer < 2
        if answer == 0:
            self.best, self.best_step, self.waited = value, step, 0
        else:
            self.waited += 1

    def _improves(self, value: float) -> bool:
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta

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

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run."""
        return {name: getattr(self, name) for name in ("monitor", "mode", "best", "best_step", "waited", "is_finite")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`; a state of another metric or mode is ignored."""
        if (state.get("monitor"), state.get("mode")) == (self.monitor, self.mode):
            self.best, self.best_step = state["best"], state["best_step"]
            self.waited, self.is_finite = state["waited"], state["is_finite"]
