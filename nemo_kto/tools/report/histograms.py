"""Histograms of a report: rewards before and after training, and lengths of prompts and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_kto.records.run_record import RunRecord
from nemo_kto.telemetry.evaluations import RewardHistogram

_MAX_BINS = 40  # of a histogram that is drawn


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
