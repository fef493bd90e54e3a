"""Curves of metrics: reading metrics.jsonl into arrays, smoothing, and downsampling for drawings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

_MIN_TO_SMOOTH = 12  # points; shorter curves are drawn as they are
_WINDOW = 20  # a smoothing window is this fraction of a curve
_MIN_WINDOW = 5


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """Values of one metric over optimizer steps, in increasing order of the steps.

    Attributes:
        steps: [N] int64.
        values: [N] float64, finite.
    """

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)

    def at(self, kept: np.ndarray | slice | list[int]) -> Curve:
        """Return the points with these indices, or of this mask [N]."""
        return Curve(steps=self.steps[kept], values=self.values[kept])

    @property
    def first(self) -> float:
        return float(self.values[0])

    @property
    def last(self) -> float:
        return float(self.values[-1])

    @property
    def extremes(self) -> tuple[float, float]:
        return float(self.values.min()), float(self.values.max())

    @property
    def last_step(self) -> int:
        return int(self.steps[-1])

    @property
    def window(self) -> int:
        """Number of points over which :attr:`smoothed` averages; odd, and 1 for a short curve."""
        return 1 if len(self) < _MIN_TO_SMOOTH else max(_MIN_WINDOW, len(self) // _WINDOW) // 2 * 2 + 1

    @cached_property
    def smoothed(self) -> Curve:
        """Mean over a centred window of :attr:`window` points, which is cut off at both ends of the curve."""
        return Curve(steps=self.steps, values=_window_means(self.values, self.window))

    @cached_property
    def spread(self) -> np.ndarray:
        """Standard deviation [N] of the points in the window around each point."""
        shifted = self.values - self.values.mean()  # the difference of two large squares would lose all digits
        means, squares = _window_means(shifted, self.window), _window_means(shifted**2, self.window)
        return np.sqrt(np.maximum(squares - means**2, 0))

    @property
    def steps_of_lines(self) -> np.ndarray:
        """Number of steps [N] that each line of the log covers."""
        return np.diff(self.steps, prepend=0)

    def up_to(self, step: int) -> Curve:
        """Return the points up to and including ``step``."""
        return self.at(self.steps <= step)

    def tail(self, fraction: float) -> Curve:
        """Return the last ``fraction`` of the points, at least one."""
        return self.at(slice(-max(1, round(fraction * len(self))), None))

    def peaks(self, bins: int) -> Curve:
        """Return the extremes of each of ``bins`` equal parts, which draw like the whole curve."""
        if len(self) <= 2 * bins:
            return self
        edges = np.linspace(0, len(self), bins + 1).astype(np.int64)
        kept = [
            begin + offset
            for begin, end in pairwise(edges.tolist())
            for offset in sorted({int(self.values[begin:end].argmin()), int(self.values[begin:end].argmax())})
        ]
        return self.at(kept)

    def thinned(self, points: int) -> np.ndarray:
        """Return the indices of at most ``points`` evenly spaced points, among them the first and the last."""
        return np.unique(np.linspace(0, len(self) - 1, min(points, len(self))).round().astype(np.int64))


def read_curves(lines: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    """Build the curve of each metric from the lines of a log; null and non-finite values are left out.

    Of two values for one step, as after a resume, the later one counts.
    """
    steps: dict[str, list[int]] = {}
    values: dict[str, list[float]] = {}
    for line in lines:
        step = line["step"]
        for name, value in line.items():
            if value is None or name == "step":
                continue
            if name not in steps:
                steps[name], values[name] = [], []
            steps[name].append(step)
            values[name].append(value)
    curves = {}
    for name in steps:
        of_metric = np.asarray(values[name], dtype=np.float64)
        # the last of equal steps is the first one of the reversed array
        unique, last = np.unique(np.asarray(steps[name], dtype=np.int64)[::-1], return_index=True)
        of_metric = of_metric[::-1][last]
        finite = np.isfinite(of_metric)
        if finite.any():
            curves[name] = Curve(steps=unique[finite], values=of_metric[finite])
    return curves


def _window_means(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean over a centred window of each value [N] -> [N]."""
    if window == 1:
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    begin, end = np.maximum(places - window // 2, 0), np.minimum(places + window // 2 + 1, len(values))
    return (sums[end] - sums[begin]) / (end - begin)
