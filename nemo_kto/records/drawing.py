"""Drawings of plots: SVG whose colours are those of the page, and PNG.

matplotlib draws with colours that stand for the page's CSS variables; :func:`_for_page` puts the variables in their place.
One drawing therefore serves light and dark pages.
"""

from __future__ import annotations

import io
import logging
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_kto.records.plots import Histogram, Plot, Series, plots_of, quality_plot, step_range
from nemo_kto.records.run_record import RunRecord
from nemo_kto.tools.report.facts import number_text
from nemo_kto.utils.text import html_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#2f6fde", "#d9730d", "#2a9d6f", "#8b5cd6", "#c2375b", "#0f8b9c", "#8a6d1f", "#5b6475")  # on a white page
INK, MUTED, GRID = "#1d2127", "#6a7280", "#e3e6eb"
# Stand-ins for CSS variables in an SVG.
_INK, _MUTED, _GRID = "#010101", "#020202", "#030303"
_SERIES = tuple(f"#0400{number:02x}" for number in range(len(COLOURS)))
_WIDTH, _HEIGHT = 400, 200  # of a plot, in units of the SVG
_LINES = ("-", "--", ":")  # of the first series of a colour, the second, and any further one
_BINS = 250  # horizontal resolution of a curve
_MAX_DOTS = 60  # points of a curve that has a dot at each
_FONT = 9.5
_ID = re.compile(r' id="(?![pm][0-9a-f]{8,})[^"]*"')
_NUMBER = re.compile(r"-?\d+\.\d{2,}")
_FONT_FAMILY = re.compile(r"font-family: [^;\"]*;? ?")
_PATH = re.compile(r' d="[^"]*"')


def look(series: Series) -> tuple[int, int]:
    """Return the indices of colour and line style of a series, so that more series than colours can be told apart."""
    return series.colour % len(COLOURS), min(series.colour // len(COLOURS), len(_LINES) - 1)


def draw(plot: Plot, steps: tuple[int, int]) -> str:
    """Return a plot as an SVG element; its horizontal axis covers ``steps``, the first and the last."""
    figure, axes = _figure(_WIDTH, _HEIGHT, bottom=24)
    _style(axes, grid=_GRID, ink=_MUTED, integers="xy" if plot.has_integers else "x")
    _draw_plot(axes, plot, steps, colours=_SERIES, grid=_MUTED)
    return _svg(figure, plot.title)


def draw_histogram(histogram: Histogram) -> str:
    """Return a histogram as an SVG element."""
    figure, axes = _figure(_WIDTH, 174, bottom=38, left=56)
    _style(axes, grid=_GRID, ink=_MUTED, integers="y" if histogram.edges[-1] % 1 or histogram.edges[0] % 1 else "xy")
    for counts, colour in zip(histogram.counts.values(), _SERIES, strict=False):
        axes.stairs(counts, histogram.edges, fill=True, facecolor=colour, edgecolor="none", alpha=0.28)
        axes.stairs(counts, histogram.edges, color=colour, linewidth=1.3)
    axes.set_xlim(histogram.edges[0], histogram.edges[-1])
    axes.set_ylim(0, 1.08 * max(1, histogram.top, *(counts.max(initial=0) for counts in histogram.counts.values())))
    axes.set_xlabel(histogram.unit, fontsize=_FONT, color=_MUTED, labelpad=2)
    axes.set_ylabel(histogram.counted, fontsize=_FONT, color=_MUTED, labelpad=8)
    return _svg(figure, histogram.title)


def summary_picture(run: RunRecord, path: Path) -> None:
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
        _style(axes, grid=GRID, ink=MUTED, integers="x")
        _draw_plot(axes, plot, step_range(shown), colours=COLOURS, grid=MUTED)
        axes.set_title(plot.title, fontsize=11, color=INK, loc="left")
        axes.set_xlabel("step", fontsize=_FONT, color=MUTED)
        if len(plot.series) > 1:
            for series in plot.series:
                colour, line = look(series)
                axes.plot([], [], color=COLOURS[colour], linestyle=_LINES[line], label=series.label)
            axes.legend(fontsize=_FONT, frameon=False, labelcolor=MUTED)
    figure.savefig(path, format="png")


def _figure(width: float, height: float, *, bottom: float, left: float = 42) -> tuple[Any, Axes]:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    figure = Figure(figsize=(width / 72, height / 72), facecolor="none")
    FigureCanvasSVG(figure)
    right, top = 10, 8
    box = (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
    return figure, figure.add_axes(box)


def _style(axes: Axes, *, grid: str, ink: str, integers: str) -> None:
    """Set up axes; those named in ``integers`` ("x", "y", "xy") get ticks at integers only."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_facecolor("none")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.grid(axis="y", color=grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=_FONT, labelcolor=ink, pad=5)
    axes.tick_params(axis="x", pad=8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, place: number_text(value)))
    for axis, nbins, min_n_ticks in ((axes.xaxis, 6, 2), (axes.yaxis, 5, 3)):
        integer = axis.axis_name in integers
        steps = [1, 2, 5, 10] if integer else [1, 2, 2.5, 5, 10]
        least = 1 if integer else min_n_ticks
        axis.set_major_locator(MaxNLocator(nbins=nbins, integer=integer, min_n_ticks=least, steps=steps))


def _draw_plot(axes: Axes, plot: Plot, steps: tuple[int, int], *, colours: tuple[str, ...], grid: str) -> None:
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


def _svg(figure: Any, title: str) -> str:
    import matplotlib

    text = io.StringIO()
    salt = f"{title}{id(figure)}"  # two drawings of a page must not share the names of their clipping paths
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _for_page(text.getvalue(), title)


def _for_page(svg: str, title: str) -> str:
    """Return the element of a drawing for a page: its colours are the page's, and it contains nothing that is not drawn."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", svg, flags=re.DOTALL)
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0]
    svg = re.sub(r"<svg[^>]*>", f'<svg class="plot" viewBox="0 0 {width} {height}" role="img">', svg, count=1)
    svg = svg.replace("<svg ", f'<svg aria-label="{html_text(title)}" ', 1)
    svg = _ID.sub("", svg).replace("xlink:href", "href")
    svg = _FONT_FAMILY.sub("", svg)  # the text has the font of the page
    svg = _PATH.sub(lambda path: _NUMBER.sub(lambda number: f"{float(number[0]):.1f}", path[0]), svg)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    for stand_in, variable in ((_INK, "ink"), (_MUTED, "muted"), (_GRID, "grid")):
        svg = svg.replace(stand_in, f"var(--{variable})")
    for number, stand_in in enumerate(_SERIES):
        svg = svg.replace(stand_in, f"var(--series-{number})")
    return svg
