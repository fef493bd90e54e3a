"""The plots of a run: which of its curves are drawn together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nemo_kto.records.curves import Curve
from nemo_kto.records.run_record import RunRecord

BLUE, ORANGE = 0, 1  # indices in ``drawing.COLOURS``; those of further curves follow
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
