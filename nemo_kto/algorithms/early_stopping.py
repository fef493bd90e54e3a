"""Ends a run whose validation metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_kto.errors import UserError


@dataclass(kw_only=True, eq=False)
class EarlyStopping:
    """Counts the validations without an improvement, as pytorch-lightning's EarlyStopping does.

    A value that is not finite ends the run at once.

    Attributes:
        monitor: metric of the validations that is looked at, as val_NAME.
        mode: min or max: whether small or large values are the good ones.
        min_delta: an improvement is larger than this.
        patience: so many validations in a row without an improvement end the run.
        agree: the largest of what the ranks answer, so that all decide the same; None where there is one rank.
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
        """Note the metrics of a validation after a step; with ``agree`` collective.

        Raises:
            UserError: the metric is not among them.
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
        """Why the run ends, in words; None if it need not."""
        if not self.is_finite:
            return f"{self.monitor} is not finite"
        if self.best is None or self.waited < self.patience:
            return None
        more = f" by more than {self.min_delta:g}" if self.min_delta else ""
        last = "validation" if self.waited == 1 else f"{self.waited} validations"
        best = f"it was {self.best:.4f} at step {self.best_step}"
        return f"{self.monitor} has not improved{more} in the last {last}; {best}"

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run continues with."""
        return {name: getattr(self, name) for name in ("monitor", "mode", "best", "best_step", "waited", "is_finite")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from :meth:`state_dict`; where another metric is monitored now, begin again."""
        if (state.get("monitor"), state.get("mode")) == (self.monitor, self.mode):
            self.best, self.best_step = state["best"], state["best_step"]
            self.waited, self.is_finite = state["waited"], state["is_finite"]
