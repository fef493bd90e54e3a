"""The plots of a run: which curves are drawn together, and how; the model card has a picture of the essential ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from nemo_kto.records.curves import Curve
from nemo_kto.records.run_record import RunRecord
from nemo_kto.utils.text import number_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE = 0, 1  # indices in ``COLOURS``; those of further curves follow
Kind = Literal["smoothed", "band", "mean", "exact", "dots"]
# Pages of the documentation, within docs/.
METRICS, _CURVES = "reference/metrics.md", "tutorials/curves.md"


@dataclass(frozen=True, kw_only=True, eq=False)
class Series:
    """A curve in a plot.

    Attributes:
        kind: "smoothed" draws the smoothed curve above the raw one, "band" above a band of one standard deviation within the
            smoothing window, "mean" without either; "exact" draws the curve itself, "dots" also its points.
    """

    label: str
    curve: Curve
    colour: int
    kind: Kind = "smoothed"

    @property
    def window(self) -> int:
        """Number of points over which the drawn curve averages."""
        return 1 if self.kind in ("exact", "dots") else self.curve.window


@dataclass(frozen=True, kw_only=True, eq=False)
class Plot:
    """Curves over the same axes."""

    title: str
    series: Sequence[Series]
    note: str = ""
    level: float | None = None  # value at which a horizontal line is drawn, such as that of no learning
    page: str = ""  # of the documentation, within docs/, that explains the plot
    technical: bool = False  # about the optimizer or the machine, not about what the model learns

    @property
    def has_bands(self) -> bool:
        return any(series.kind == "band" and series.window > 1 for series in self.series)

    @property
    def steps(self) -> tuple[int, int]:
        """First and last step of the curves."""
        return min(int(series.curve.steps[0]) for series in self.series), max(each.curve.last_step for each in self.series)

    @property
    def has_integers(self) -> bool:
        """Whether all values are integers."""
        return all((series.curve.values % 1 == 0).all() for series in self.series)


def step_range(plots: Sequence[Plot]) -> tuple[int, int]:
    """Return the first and the last step of plots that get the same horizontal axis; (0, 0) without any."""
    ranges = [plot.steps for plot in plots]
    return min((first for first, _ in ranges), default=0), max((last for _, last in ranges), default=0)


def quality_plot(run: RunRecord) -> Plot | None:
    """Return the plot of AUC or accuracy, over all validation sets and, for pairs, the training batches."""
    series = []
    for colour, (title, prefix) in enumerate(run.validations.items(), start=ORANGE):
        name = next((name for name in (f"{prefix}auc", f"{prefix}acc") if name in run.curves), "")
        series += series_of(run, name, title, colour=colour, kind="dots")
    if run.has_pairs:
        series = [*series_of(run, "train/acc", "train"), *series]
        note = "Fraction of pairs whose chosen answer has the higher reward; a tie, as before training, does not count."
        return Plot(title="Accuracy", series=series, level=0.5, note=note, page=METRICS) if series else None
    note = "Probability that a desirable held-out answer has a higher reward than an undesirable one."
    return Plot(title="AUC", series=series, level=0.5, note=note, page=METRICS) if series else None


def plots_of(run: RunRecord) -> list[Plot]:
    """Return the plots of a run, the essential ones first; those without a curve are left out."""
    better, worse = run.classes
    of_batch, margin = "Mean over the batch.", f"Mean reward of the {better} minus that of the {worse} answers."
    kl = "Mean log-ratio of the KL examples; the reference point z0 is 0 where it is negative."
    in_training, balance = "Rewards in training", series_of(run, "train/moe_aux_loss", "load-balancing loss")
    logps = _of_classes(run, "train/logps", "smoothed")
    norm = series_of(run, "train/grad_norm", "before clipping")
    speed = series_of(run, "perf/tokens_per_sec", "all ranks")
    memory = series_of(run, "perf/peak_memory_gb", "rank 0", kind="exact")
    plots = [
        Plot(title="Loss", series=_both(run, "loss"), page="algorithms/README.md"),
        Plot(title=in_training, series=_of_classes(run, "train/rewards", "band"), note=of_batch, level=0.0, page=METRICS),
        *(
            Plot(title=f"Rewards in {title}", series=series, note="Mean over the set.", level=0.0, page=METRICS)
            for title, prefix in run.validations.items()
            for series in [_of_classes(run, f"{prefix}rewards", "dots")]
        ),
        Plot(title="Margin", series=_both(run, "rewards_margin"), note=margin, level=0.0, page=_CURVES),
        quality_plot(run),
        Plot(title="KL estimate, unclamped", series=_both(run, "kl_unclamped"), note=kl, level=0.0, page=_CURVES),
        Plot(title="Delta", series=series_of(run, "train/delta", "train"), note="Mean of all rewards so far.", page=METRICS),
        Plot(title="Log-probs of answers", series=logps, note=of_batch, page=_CURVES, technical=True),
        Plot(title="Gradient norm", series=norm, page=_CURVES, technical=True),
        Plot(title="Learning rate", series=series_of(run, "train/lr", "", kind="exact"), page=METRICS, technical=True),
        Plot(title="Tokens per second", series=speed, page=METRICS, technical=True),
        Plot(title="Peak memory, GB", series=memory, page=METRICS, technical=True),
        Plot(title="Expert load balance", series=balance, level=1.0, page="scale/experts.md", technical=True),
    ]
    return [plot for plot in plots if plot is not None and plot.series]


def series_of(run: RunRecord, name: str, label: str, *, colour: int = BLUE, kind: Kind = "smoothed") -> list[Series]:
    """Return the curve of a metric as a list of one; empty if it was not logged."""
    curve = run.curves.get(name)
    return [] if curve is None else [Series(label=label, curve=curve, colour=colour, kind=kind)]


def _of_classes(run: RunRecord, metric: str, kind: Kind) -> list[Series]:
    better, worse = run.classes
    better_series = series_of(run, f"{metric}_chosen_mean", better, kind=kind)
    return [*better_series, *series_of(run, f"{metric}_rejected_mean", worse, colour=ORANGE, kind=kind)]


def _both(run: RunRecord, metric: str) -> list[Series]:
    """Return the curves of a metric in training and in each validation set."""
    series = series_of(run, f"train/{metric}", "train")
    for colour, (title, prefix) in enumerate(run.validations.items(), start=ORANGE):
        series += series_of(run, f"{prefix}{metric}", title, colour=colour, kind="dots")
    return series


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
