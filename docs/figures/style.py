"""The look of all figures: SVG with a transparent background and colours that are legible on white and on black."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
# Each has a contrast of at least 3.4 to white and to a background of #131416.
INK, GOOD, BAD, THIRD, FAINT = "#7a7d82", "#1a86d9", "#e0662b", "#8a70d6", "#7a7d8266"
WIDTH, NARROW = 7.2, 5.0  # inches; the text of a narrow one can be read on a phone

mpl.rcParams.update(
    {
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "svg.fonttype": "none",  # text remains text: small files, and the viewer's font
        "svg.hashsalt": "nemo_kto",  # the same file each time
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 9,
        "axes.titlesize": 9,
        "axes.titleweight": "normal",
        "axes.labelsize": 9,
        "legend.fontsize": 8.5,
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "lines.linewidth": 1.8,
        "path.simplify_threshold": 0.5,
        **dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
        ),
    }
)


def panels(columns: int, rows: int = 1, *, height: float = 2.5, width: float = WIDTH) -> tuple[Figure, list[Axes]]:
    """A figure with a grid of axes, listed row by row."""
    figure, grid = plt.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained")
    return figure, [axes for line in grid for axes in line]


def canvas(*, height: float) -> tuple[Figure, Axes]:
    """A figure of the common width for a drawing: no axes, and units of a hundredth of the width."""
    figure = plt.figure(figsize=(WIDTH, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 100), ylim=(0, 100 * height / WIDTH))
    axes.axis("off")
    return figure, axes


def box(
    axes: Axes, at: tuple[float, float], size: tuple[float, float], text: str, *, colour: str = INK, filled: bool = False
) -> None:
    """A rounded box with centred text; ``at`` is its centre."""
    from matplotlib.patches import FancyBboxPatch

    corner = (at[0] - size[0] / 2, at[1] - size[1] / 2)
    face = f"{colour}2e" if filled else "none"
    style = "round,pad=0,rounding_size=1"
    axes.add_patch(FancyBboxPatch(corner, *size, boxstyle=style, edgecolor=colour, facecolor=face, linewidth=1.2))
    lines = text.split("\n")  # each by itself: a centred line stays centred in every font
    for number, line in enumerate(lines):
        height = at[1] + 2.3 * ((len(lines) - 1) / 2 - number)
        axes.text(at[0], height, line, ha="center", va="center", color=colour, fontsize=8.5)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], *, colour: str = INK, dashed: bool = False
) -> None:
    """A straight arrow."""
    line = (0, (3, 2)) if dashed else "solid"
    axes.annotate(
        "",
        end,
        start,
        arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.1, "linestyle": line, "shrinkA": 0, "shrinkB": 0},
    )


def mark(axes: Axes, *, x: float, text: str) -> None:
    """A thin vertical line with a label at the top."""
    axes.axvline(x, color=FAINT, linewidth=1, zorder=0)
    axes.annotate(
        text, (x, 1), xycoords=("data", "axes fraction"), xytext=(3, -2), textcoords="offset points", va="top", fontsize=8.5
    )


def legend(figure: Figure, axes: Axes, *, columns: int = 4) -> None:
    """The labels of ``axes`` in one line above the figure."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=columns, labelcolor=INK)


def save(figure: Figure, name: str) -> Path:
    """Write ``docs/figures/NAME.svg``, the same bytes for the same figure."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    shorter = lambda attribute: re.sub(r"(\d\.\d)\d+", r"\1", attribute[0])  # noqa: E731
    text = re.sub(r' (?:d|x|y|transform)="[^"]*"', shorter, buffer.getvalue())  # a tenth of a point is enough
    text = text.replace("font-family: DejaVu Sans", "font-family: sans-serif").replace("'DejaVu Sans', ", "")
    target = HERE / f"{name}.svg"
    target.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")
    return target
