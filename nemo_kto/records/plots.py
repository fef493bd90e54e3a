"""The plots of a report: which curves and histograms of a run are drawn together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nemo_kto.records.curves import Curve
from nemo_kto.records.run_record import RunRecord
from nemo_kto.telemetry.evaluations import RewardHistogram

BLUE, ORANGE = 0, 1  # indices in ``drawing.COLOURS``; those of further curves follow
Kind = Literal["smoothed", "band", "mean", "exact", "dots"]
_MAX_BINS = 40  # of a histogram that is drawn
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Histogram:
    """Counts in bins of equal width, of one or two groups.

    Attributes:
        edges: [N + 1] edges of the bins.
        counts: group -> [N] counts.
    """

    title: str
    edges: np.ndarray
    counts: Mapping[str, np.ndarray]
    unit: str  # of the horizontal axis
    counted: str = "answers"  # label of the vertical axis
    top: float = 0.0  # the vertical axis extends at least to this count
    last_is_open: bool = False  # the last bin also counts everything above it


def quality_plot(run: RunRecord) -> Plot | None:
    """Return the plot of AUC or accuracy, over all validation sets and, for pairs, the training batches."""
    series = []
    for colour, (title, prefix) in enumerate(run.validations.items(), start=ORANGE):
        name = next((name for name in (f"{prefix}auc", f"{prefix}acc") if name in run.curves), "")
        series += _series(run, name, title, colour=colour, kind="dots")
    if run.has_pairs:
        series = [*_series(run, "train/acc", "train"), *series]
        note = "Fraction of pairs whose chosen answer has the higher reward; a tie, as before training, does not count."
        return Plot(title="Accuracy", series=series, level=0.5, note=note, page=METRICS) if series else None
    note = "Probability that a desirable held-out answer has a higher reward than an undesirable one."
    return Plot(title="AUC", series=series, level=0.5, note=note, page=METRICS) if series else None


def plots_of(run: RunRecord) -> list[Plot]:
    """Return the plots of a run, the essential ones first; those without a curve are left out."""
    better, worse = run.classes
    of_batch, margin = "Mean over the batch.", f"Mean reward of the {better} minus that of the {worse} answers."
    kl = "Mean log-ratio of the KL examples; the reference point z0 is 0 where it is negative."
    in_training, balance = "Rewards in training", _series(run, "train/moe_aux_loss", "load-balancing loss")
    logps = _of_classes(run, "train/logps", "smoothed")
    speed = _series(run, "perf/tokens_per_sec", "all ranks")
    memory = _series(run, "perf/peak_memory_gb", "rank 0", kind="exact")
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
        Plot(title="Delta", series=_series(run, "train/delta", "train"), note="Mean of all rewards so far.", page=METRICS),
        Plot(title="Log-probs of answers", series=logps, note=of_batch, page=_CURVES, technical=True),
        Plot(title="Gradient norm", series=_series(run, "train/grad_norm", "before clipping"), page=_CURVES, technical=True),
        Plot(title="Learning rate", series=_series(run, "train/lr", "", kind="exact"), page=METRICS, technical=True),
        Plot(title="Tokens per second", series=speed, page=METRICS, technical=True),
        Plot(title="Peak memory, GB", series=memory, page=METRICS, technical=True),
        Plot(title="Expert load balance", series=balance, level=1.0, page="scale/experts.md", technical=True),
    ]
    return [plot for plot in plots if plot is not None and plot.series]


def _series(run: RunRecord, name: str, label: str, *, colour: int = BLUE, kind: Kind = "smoothed") -> list[Series]:
    """Return the curve of a metric as a list of one; empty if it was not logged."""
    curve = run.curves.get(name)
    return [] if curve is None else [Series(label=label, curve=curve, colour=colour, kind=kind)]


def _of_classes(run: RunRecord, metric: str, kind: Kind) -> list[Series]:
    better, worse = run.classes
    better_series = _series(run, f"{metric}_chosen_mean", better, kind=kind)
    return [*better_series, *_series(run, f"{metric}_rejected_mean", worse, colour=ORANGE, kind=kind)]


def _both(run: RunRecord, metric: str) -> list[Series]:
    """Return the curves of a metric in training and in each validation set."""
    series = _series(run, f"train/{metric}", "train")
    for colour, (title, prefix) in enumerate(run.validations.items(), start=ORANGE):
        series += _series(run, f"{prefix}{metric}", title, colour=colour, kind="dots")
    return series


# Metric without its prefix -> title of its plot and value of a horizontal line in it, in comparisons of runs.
_COMPARED: Mapping[str, tuple[str, float | None]] = {
    "loss": ("loss", None),
    "rewards_margin": ("margin", 0.0),
    "auc": ("AUC", 0.5),
    "acc": ("accuracy", 0.5),
    "rewards_chosen_mean": ("reward of better answers", 0.0),
    "rewards_rejected_mean": ("reward of worse answers", 0.0),
    "kl_unclamped": ("KL estimate, unclamped", 0.0),
    "grad_norm": ("gradient norm", None),
    "lr": ("learning rate", None),
}
_TECHNICAL = ("train/grad_norm", "train/lr", "perf/tokens_per_sec")


def compared_plots(runs: Mapping[str, RunRecord]) -> list[Plot]:
    """Return plots with one curve for each of the runs, which are given by name."""
    prefixes = {"validation": "val/"}
    for run in runs.values():
        prefixes |= run.validations
    prefixes["training"] = "train/"
    names: list[tuple[str, str, float | None]] = [
        (f"{title[0].upper()}{title[1:]} {label}", f"{prefix}{metric}", level)
        for metric, (label, level) in _COMPARED.items()
        for title, prefix in prefixes.items()
    ]
    names.append(("Tokens per second", "perf/tokens_per_sec", None))
    plots = []
    for title, name, level in names:
        kind: Kind = "dots" if name.startswith("val/") else "exact" if name == "train/lr" else "mean"
        series = [
            each
            for colour, (label, run) in enumerate(runs.items())
            for each in _series(run, name, label, colour=colour, kind=kind)
        ]
        plots.append(Plot(title=title, series=series, level=level, page=METRICS, technical=name in _TECHNICAL))
    return [plot for plot in plots if plot.series]


def reward_histograms(run: RunRecord) -> dict[str, list[Histogram]]:
    """Return, for each validation set, the rewards at its first and its last validation, in the same bins."""
    found = {}
    for name, histograms in run.rewards.items():
        steps = sorted({min(histograms), max(histograms)})
        edges, counts = common_bins([histograms[step] for step in steps])
        top = max(values.max(initial=0) for of_classes in counts for values in of_classes.values())
        found[name] = [
            Histogram(title=f"Step {step:,}", edges=edges, counts=of_classes, unit="reward", top=top)
            for step, of_classes in zip(steps, counts, strict=True)
        ]
    return found


def common_bins(histograms: Sequence[RewardHistogram]) -> tuple[np.ndarray, list[dict[str, np.ndarray]]]:
    """Bring histograms whose widths are powers of two to the same bins; return their edges, and the counts of each.

    Bins are joined until they cover all histograms with at most 40 of them, which is exact.
    """
    width = max(histogram.width for histogram in histograms)
    while True:
        spans = [(max(1, round(width / one.width)), one) for one in histograms]
        low = min(one.first // factor for factor, one in spans)
        high = max((one.first + one.bins - 1) // factor for factor, one in spans)
        if high - low < _MAX_BINS:
            break
        width *= 2
    counts = []
    for factor, one in spans:
        of_classes = {}
        for name, values in one.counts.items():
            places = [(one.first + bin_index) // factor - low for bin_index in range(len(values))]
            of_classes[name] = np.bincount(places, weights=np.asarray(values, dtype=np.float64), minlength=high - low + 1)
        counts.append(of_classes)
    return (float(low) + np.arange(high - low + 2)) * width, counts


def length_histograms(run: RunRecord, split: str) -> list[Histogram]:
    """Return the lengths of the prompts of a split, and those of its answers by class, in tokens."""
    parts = run.data.get("sets", {}).get(split, {}).get("lengths", {})
    parts = {part: lengths for part, lengths in parts.items() if lengths["counts"]}
    prompts = {"": parts.pop("prompt")} if "prompt" in parts else {}
    if list(parts) == ["response"]:  # of an earlier version
        parts = {"": parts["response"]}
    found = []
    for counted, groups in {"prompts": prompts, "answers": parts}.items():
        width = max((lengths["width"] for lengths in groups.values()), default=1)  # powers of two
        places = {name: np.arange(len(each["counts"])) * each["width"] // width for name, each in groups.items()}
        bins = 1 + max((int(of_group[-1]) for of_group in places.values()), default=-1)
        histogram = Histogram(
            title=f"Lengths of {counted}",
            edges=np.arange(bins + 1) * width,
            counts={
                name: np.bincount(places[name], weights=each["counts"], minlength=bins) for name, each in groups.items()
            },
            unit="tokens",
            counted=counted,
            last_is_open=any(each.get("last_is_open") for each in groups.values()),
        )
        found += [histogram] if groups else []
    return found
