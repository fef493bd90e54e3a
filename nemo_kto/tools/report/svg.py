"""Drawings of a report: SVG whose colours are those of the page.

matplotlib draws with colours that stand for the page's CSS variables; :func:`_for_page` puts the variables in their place.
One drawing therefore serves light and dark pages.
"""

from __future__ import annotations

import io
import logging
import re
from typing import TYPE_CHECKING, Any

from nemo_kto.records.plots import COLOURS, FONT, Plot, draw_curves, style_axes
from nemo_kto.tools.report.histograms import Histogram
from nemo_kto.utils.text import html_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Stand-ins for CSS variables in an SVG.
_INK, _MUTED, _GRID = "#010101", "#020202", "#030303"
_SERIES = tuple(f"#0400{number:02x}" for number in range(len(COLOURS)))
_WIDTH, _HEIGHT = 400, 200  # of a plot, in units of the SVG
_ID = re.compile(r' id="(?![pm][0-9a-f]{8,})[^"]*"')
_NUMBER = re.compile(r"-?\d+\.\d{2,}")
_FONT_FAMILY = re.compile(r"font-family: [^;\"]*;? ?")
_PATH = re.compile(r' d="[^"]*"')


def draw(plot: Plot, steps: tuple[int, int]) -> str:
    """Return a plot as an SVG element; its horizontal axis covers ``steps``, the first and the last."""
    figure, axes = _figure(_WIDTH, _HEIGHT, bottom=24)
    style_axes(axes, grid=_GRID, ink=_MUTED, integers="xy" if plot.has_integers else "x")
    draw_curves(axes, plot, steps, colours=_SERIES, grid=_MUTED)
    return _svg(figure, plot.title)


def draw_histogram(histogram: Histogram) -> str:
    """Return a histogram as an SVG element."""
    figure, axes = _figure(_WIDTH, 174, bottom=38, left=56)
    style_axes(axes, grid=_GRID, ink=_MUTED, integers="y" if histogram.edges[-1] % 1 or histogram.edges[0] % 1 else "xy")
    for counts, colour in zip(histogram.counts.values(), _SERIES, strict=False):
        axes.stairs(counts, histogram.edges, fill=True, facecolor=colour, edgecolor="none", alpha=0.28)
        axes.stairs(counts, histogram.edges, color=colour, linewidth=1.3)
    axes.set_xlim(histogram.edges[0], histogram.edges[-1])
    axes.set_ylim(0, 1.08 * max(1, histogram.top, *(counts.max(initial=0) for counts in histogram.counts.values())))
    axes.set_xlabel(histogram.unit, fontsize=FONT, color=_MUTED, labelpad=2)
    axes.set_ylabel(histogram.counted, fontsize=FONT, color=_MUTED, labelpad=8)
    return _svg(figure, histogram.title)


def _figure(width: float, height: float, *, bottom: float, left: float = 42) -> tuple[Any, Axes]:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    figure = Figure(figsize=(width / 72, height / 72), facecolor="none")
    FigureCanvasSVG(figure)
    right, top = 10, 8
    box = (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
    return figure, figure.add_axes(box)


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
