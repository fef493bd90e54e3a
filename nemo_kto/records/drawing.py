"""Drawings of the curves of a run; the model card shows the essential ones as a picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from nemo_kto.records.plots import Plot, Series, plots_of, quality_plot, step_range
from nemo_kto.records.run_record import RunRecord
from nemo_kto.utils.text import number_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#2f6fde", "#d9730d", "#2a9d6f", "#8b5cd6", "#c2375b", "#0f8b9c", "#8a6d1f", "#5b6475")  # on a white page
INK, MUTED, GRID = "#1d2127", "#6a7280", "#e3e6eb"
_LINES = ("-", "--", ":")  # of the first series of a colour, the second, and any further one
_BINS = 250  # horizontal resolution of a curve
_MAX_DOTS = 60  # points of a curve that has a dot at each
FONT = 9.5


def look(series: Series) -> tuple[int, int]:
    """Return the indices of colour and line style of a series, so that more series than colours can be told apart."""
    return series.colour % len(COLOURS), min(series.colour // len(COLOURS), len(_LINES) - 1)


def summary_picture(run: RunRecord, path: Path | BinaryIO) -> None:
    """Write a PNG with the four essential curves of a run: loss, rewards, margin, and AUC or accuracy (else KL or the
    gradient norm), for a white page.
    """
    plots = {plot.title: plot for plot in plots_of(run)}
    quality = quality_plot(run)
    rewards = next((plot for title, plot in plots.items() if title.startswith("Rewards in validation")), None)
    wanted = [
        plots.get("Loss"),
        rewards or plots.get("Rewards in training"),
        plots.get("Margin"),
        quality or plots.get("KL estimate, unclamped") or plots.get("Gradient norm"),
    ]
    shown = [plot for plot in wanted if plot is not None]
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = max(1, math.ceil(len(shown) / 2))
    figure = Figure(figsize=(10, 3.3 * rows), dpi=144, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    for number, plot in enumerate(shown, start=1):
        axes = figure.add_subplot(rows, 2, number)
        style_axes(axes, grid=GRID, ink=MUTED, integers="x")
        draw_curves(axes, plot, step_range(shown), colours=COLOURS, grid=MUTED)
        axes.set_title(plot.title, fontsize=11, color=INK, loc="left")
        axes.set_xlabel("step", fontsize=FONT, color=MUTED)
        if len(plot.series) > 1:
            for series in plot.series:
                colour, line = look(series)
                axes.plot([], [], color=COLOURS[colour], linestyle=_LINES[line], label=series.label)
            axes.legend(fontsize=FONT, frameon=False, labelcolor=MUTED)
    figure.savefig(path, format="png")


def style_axes(axes: Axes, *, grid: str, ink: str, integers: str) -> None:
    """Set up axes; those named in ``integers`` ("x", "y", "xy") get ticks at integers only."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_facecolor("none")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.grid(axis="y", color=grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=FONT, labelcolor=ink, pad=5)
    axes.tick_params(axis="x", pad=8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, place: number_text(value)))
    for axis, nbins, min_n_ticks in ((axes.xaxis, 6, 2), (axes.yaxis, 5, 3)):
        integer = axis.axis_name in integers
        steps = [1, 2, 5, 10] if integer else [1, 2, 2.5, 5, 10]
        least = 1 if integer else min_n_ticks
        axis.set_major_locator(MaxNLocator(nbins=nbins, integer=integer, min_n_ticks=least, steps=steps))


def draw_curves(axes: Axes, plot: Plot, steps: tuple[int, int], *, colours: tuple[str, ...], grid: str) -> None:
    if plot.level is not None:
        axes.axhline(plot.level, color=grid, linewidth=0.8, dashes=(3, 3))
    for series in plot.series:
        colour, line = look(series)
        _draw_series(axes, series, colours[colour], _LINES[line])
    first, last = steps
    if first < last:
        axes.set_xlim(first - 0.01 * (last - first), last + 0.01 * (last - first))
    low, high = axes.get_ylim()
    middle = (low + high) / 2
    if high - low < 1e-3 * abs(middle):  # a constant, whose axis would show only rounding
        axes.set_ylim(*sorted((0.9 * middle, 1.1 * middle)))


def _draw_series(axes: Axes, series: Series, colour: str, line: str) -> None:
    curve = series.curve
    if series.window == 1:
        shown = curve.peaks(_BINS)
        marker = "o" if series.kind == "dots" and len(curve) <= _MAX_DOTS else ""
        axes.plot(shown.steps, shown.values, color=colour, linestyle=line, linewidth=1.6, marker=marker, markersize=3.2)
        return
    places = curve.smoothed.thinned(_BINS)
    steps, smoothed = curve.steps[places], curve.smoothed.values[places]
    if series.kind == "band":
        spread = curve.spread[places]
        axes.fill_between(steps, smoothed - spread, smoothed + spread, color=colour, alpha=0.13, linewidth=0)
    elif series.kind == "smoothed":
        raw = curve.peaks(_BINS)
        axes.plot(raw.steps, raw.values, color=colour, linewidth=0.8, alpha=0.35)
    axes.plot(steps, smoothed, color=colour, linestyle=line, linewidth=1.7)
