"""A warning where the loss jumps far beyond what it was in the steps before."""

from __future__ import annotations

import logging
import math
from collections import deque
from statistics import median

logger = logging.getLogger(__name__)

_HISTORY, _MIN_HISTORY = 50, 20  # steps before the present one that it is compared with, and how many there must be
_DEVIATIONS = 10  # median absolute deviations above the median: 6.7 standard deviations of a normal distribution
_MIN_DEVIATION = 1e-2  # of the median: the loss of a run that stands still hardly moves at all
_PAUSE = 50  # steps after a warning without another one


class LossSpikes:
    """Watches the training loss.

    The bound is the median of the last 50 losses and ten times their median absolute deviation, which single spikes do not
    move. A loss that is not finite is no spike: such a step is skipped, and that is said elsewhere.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_HISTORY)
        self._quiet_until = 0

    def spike(self, step: int, loss: float) -> str | None:
        """Note the loss of a step; what is to be said of it, None if it is no spike or one was said of lately."""
        if not math.isfinite(loss):
            return None
        losses = list(self._losses)
        self._losses.append(loss)
        if len(losses) < _MIN_HISTORY:
            return None
        middle = median(losses)
        deviation = max(median(abs(each - middle) for each in losses), _MIN_DEVIATION * abs(middle))
        bound = middle + _DEVIATIONS * deviation
        if loss <= bound or step < self._quiet_until:
            return None
        self._quiet_until = step + _PAUSE
        return f"step {step}: the loss jumped to {loss:.4g}; the median of the last {len(losses)} steps is {middle:.4g}"

    def watch(self, step: int, loss: float) -> None:
        """Note the loss of a step, and warn if it is a spike."""
        if (text := self.spike(step, loss)) is not None:
            logger.warning(text)
