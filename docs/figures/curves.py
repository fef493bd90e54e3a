"""Curves of the runs in docs/figures/data (docs/figures/runs.py made them)."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from docs.figures.runs import DATA, RUNS
from docs.figures.style import BAD, FAINT, GOOD, INK, NARROW, THIRD, legend, panels, save

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes


def read(name: str) -> dict[str, Any]:
    """The stored metrics of a run."""
    return json.loads((DATA / f"{name}.json").read_text())


def curve(axes: Axes, run: dict[str, Any], metric: str, *, colour: str, label: str) -> None:
    """Draw a metric: training as a thin line, validation as a thick one with points."""
    train, validation = run["train"], run["val"]
    if metric in train:
        axes.plot(train["step"], train[metric], color=colour, linewidth=0.9, alpha=0.55)
    if metric in validation:
        axes.plot(validation["step"], validation[metric], "o-", color=colour, markersize=3.5, label=label)


def gallery(name: str) -> Path:
    """Loss and rewards of a run of the gallery."""
    run = read(name)
    figure, axes = panels(2, height=1.9, width=NARROW)
    curve(axes[0], run, "loss", colour=INK, label="loss")
    curve(axes[1], run, "rewards_chosen_mean", colour=GOOD, label=of_class(name, good=True))
    curve(axes[1], run, "rewards_rejected_mean", colour=BAD, label=of_class(name, good=False))
    curve(axes[1], run, "rewards_margin", colour=THIRD, label="margin")
    for panel, (title, unit) in zip(axes, (("loss", "per example"), ("rewards", "nats")), strict=True):
        panel.set(title=title, xlabel="optimizer step", ylabel=unit)
    legend(figure, axes[1])
    return save(figure, f"run-{name}")


def of_class(name: str, *, good: bool) -> str:
    """What the log calls chosen or rejected."""
    names = ("desirable", "undesirable") if RUNS[name].algorithm == "kto" else ("chosen", "rejected")
    return names[0] if good else names[1]


def lesson(name: str) -> Path:
    """Loss, rewards, KL and gradient norm of a run, for reading its curves."""
    run = read(name)
    figure, axes = panels(2, 2, height=3.6, width=NARROW)
    curve(axes[0], run, "loss", colour=INK, label="loss")
    curve(axes[1], run, "rewards_chosen_mean", colour=GOOD, label="desirable")
    curve(axes[1], run, "rewards_rejected_mean", colour=BAD, label="undesirable")
    curve(axes[2], run, "rewards_margin", colour=THIRD, label="margin")
    curve(axes[3], run, "kl_unclamped", colour=INK, label="kl_unclamped")
    for panel in axes[1:]:
        panel.axhline(0, color=FAINT, linewidth=1, zorder=0)
    units = {"loss": "per example", "rewards": "nats", "reward margin": "nats", "kl_unclamped": "nats"}
    for panel, (title, unit) in zip(axes, units.items(), strict=True):
        panel.set(title=title, xlabel="optimizer step", ylabel=unit)
    legend(figure, axes[1])
    return save(figure, f"run-{name}")


FIGURES: dict[str, Callable[[], Path]] = {
    f"run-{name}": partial(lesson if name in ("kto",) or not run.in_gallery else gallery, name) for name, run in RUNS.items()
}
