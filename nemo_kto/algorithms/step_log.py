"""What the log says of several steps in one line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nemo_kto.algorithms.callbacks import Event

_MEANS = ("timing/", "train/grad_norm")  # beginnings of the names of what is a mean over the steps


class StepLog:
    """Adds up steps until a line of the log is due.

    Of the steps since the last line it gives

    - the metrics over all their examples, each weighing the same; counts are sums. A step whose metrics are not finite is
      left out, unless there is no other;
    - the mean over the steps of seconds (``timing/...``) and of ``train/grad_norm``;
    - everything else as of the newest step that has it: learning rate, counters, what callbacks added.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._last: Event | None = None
        self._steps, self._seconds = 0, 0.0
        self._sums: dict[str, float] = {}  # that the metrics are made of
        self._totals: dict[str, tuple[float, int]] = {}  # of what becomes a mean, and the number of steps that have it
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
        """The steps since the last line as one event, whose seconds are those of all; None if there was none."""
        if (last := self._last) is None:
            return None
        metrics = last.metrics.of(self._sums) if self._sums else last.metrics
        report = {f"train/{name}": value for name, value in metrics.items()} | self._newest
        report |= {name: total / steps for name, (total, steps) in self._totals.items()}
        line = Event(step=last.step, metrics=metrics, seconds=self._seconds, report=report)
        self._clear()
        return line

    def state_dict(self) -> dict[str, Any]:
        """The steps since the last line, for a checkpoint; empty if there are none."""
        names = ("steps", "seconds", "sums", "totals", "newest")
        return {name: getattr(self, f"_{name}") for name in names} if self._steps else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from :meth:`state_dict`."""
        self._clear()
        if state:
            self._steps, self._seconds = int(state["steps"]), float(state["seconds"])
            self._sums, self._newest = dict(state["sums"]), dict(state["newest"])
            self._totals = {name: (total, steps) for name, (total, steps) in state["totals"].items()}
