"""Aggregation of several steps into one log line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nemo_kto.algorithms.callbacks import Event

_MEANS = ("timing/", "train/grad_norm")  # prefixes of the values that are averaged over the steps


class StepLog:
    """Accumulator of the steps since the last log line.

    A log line contains

    - the metrics over all examples of these steps, with equal weight for each example; counts are summed. Steps with
      non-finite metrics are left out, unless there are no others;
    - the mean over the steps of seconds (``timing/...``) and of ``train/grad_norm``;
    - for everything else (learning rate, counters, values added by callbacks) the newest value.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._last: Event | None = None
        self._steps, self._seconds = 0, 0.0
        self._sums: dict[str, float] = {}  # sums from which the metrics are computed
        self._totals: dict[str, tuple[float, int]] = {}  # sum of each averaged value, and the number of steps with it
        self._newest: dict[str, float] = {}

    def add(self, event: Event) -> None:
        """Add a step."""
        self._last = event
        self._steps += 1
        self._seconds += event.seconds
        if all(map(math.isfinite, event.metrics.sums.values())):
            for name, value in event.metrics.sums.items():
                self._sums[name] = self._sums.get(name, 0) + value
        for name, value in event.report.items():
            if name.startswith(_MEANS):
                total, steps = self._totals.get(name, (0.0, 0))
                self._totals[name] = total + value, steps + 1
            elif name.removeprefix("train/") not in event.metrics:
                self._newest[name] = value

    def take(self) -> Event | None:
        """Return the steps since the last log line as one event with their total seconds, and reset; None if no steps."""
        if (last := self._last) is None:
            return None
        metrics = last.metrics.of(self._sums) if self._sums else last.metrics
        report = {f"train/{name}": value for name, value in metrics.items()} | self._newest
        report |= {name: total / steps for name, (total, steps) in self._totals.items()}
        line = Event(step=last.step, metrics=metrics, seconds=self._seconds, report=report)
        self._clear()
        return line

    def state_dict(self) -> dict[str, Any]:
        """Return the accumulated steps for a checkpoint; empty if there are none."""
        names = ("steps", "seconds", "sums", "totals", "newest")
        return {name: getattr(self, f"_{name}") for name in names} if self._steps else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self._clear()
        if state:
            self._steps, self._seconds = int(state["steps"]), float(state["seconds"])
            self._sums, self._newest = dict(state["sums"]), dict(state["newest"])
            self._totals = {name: (total, steps) for name, (total, steps) in state["totals"].items()}
