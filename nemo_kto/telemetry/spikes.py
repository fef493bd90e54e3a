"""Warnings about loss spikes."""

from __future__ import annotations

import logging
import math
from collections import deque
from statistics import median

logger = logging.getLogger(__name__)

_HISTORY, _MIN_HISTORY = 50, 20  # number of previous steps for the comparison, and its minimum
_DEVIATIONS = 10  # median absolute deviations above the median: 6.7 standard deviations of a normal distribution
_MIN_DEVIATION = 1e-2  # minimum deviation as a fraction of the median, because the loss of a converged run hardly varies
_PAUSE = 50  # steps without a further warning after a warning


class LossSpikes:
    """Detector of spikes in the training loss.

    A spike is a loss above the median of the last 50 losses plus ten times their median absolute deviation; single spikes
    hardly affect this bound. A non-finite loss does not count as a spike: such a step is skipped and reported separately.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_HISTORY)
        self._quiet_until = 0

    def spike(self, step: int, loss: float) -> str | None:
        """Add the loss of a step; return a warning if it is a spike, unless there was a warning in the last 50 steps."""
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
        """Add the loss of a step, and log a warning if it is a spike."""
        if (text := self.spike(step, loss)) is not None:
            logger.warning(text)
