"""Comparison of several runs: their final values, the settings and rows that differ, and plots with a curve for each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from os.path import commonprefix

from nemo_kto.records.plots import METRICS, Kind, Plot, series_of
from nemo_kto.records.run_record import ComparisonResult, RunRecord
from nemo_kto.telemetry.watch import duration_text
from nemo_kto.tools.report.facts import DATA, QUALITY, ROWS, hashed_fact, metric_text, model_name, short_name
from nemo_kto.utils.text import interval_text, percent_text, value_text

# Differ between any two runs, or follow from other keys.
_NOT_COMPARED = (
    "exp_manager.explicit_log_dir", "exp_manager.name", "exp_manager.wandb_logger_kwargs.name",
    "exp_manager.trackio_logger_kwargs.name", "exp_manager.mlflow_logger_kwargs.run_name",
    "export.path", "export.adapter_path",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Best:
    """Cell of a table with the best value of its column."""

    text: str


def final_figures(runs: Mapping[str, RunRecord]) -> list[list[str | Best]]:
    """Return a table of several runs, which are given by name: a header, and a line for each run.

    The best held-out value is marked if the runs have the same validation rows and, except for AUC and accuracy, the same
    loss and beta.
    """
    columns: dict[str, str] = {}
    for run in runs.values():
        for title, prefix in run.validations.items():
            for name, label in QUALITY.items():
                if f"{prefix}{name}" in run.curves:
                    columns[f"{prefix}{name}"] = f"{title} {label if label == 'AUC' else label.lower()}"
    columns |= {"train/loss": "train loss"}
    compared = dict.fromkeys((each.base, each.by) for run in runs.values() for each in run.comparisons)
    several = len({by for _, by in compared}) > 1
    win_rates = [f"win rate against {model_name(base)}" + (f" by {by}" if several else "") for base, by in compared]
    lengths = [f"characters (of {model_name(base)})" for base, _ in compared]
    comparisons = chain(*zip(win_rates, lengths, strict=True))
    rows: list[list[str | Best]] = [["run", *comparisons, *columns.values(), "steps", "time", "state"]]
    last = {
        column: {name: run.curves[column].last for name, run in runs.items() if column in run.curves} for column in columns
    }
    same_rows = "validation" not in differing_rows(runs)
    same_loss = len({(run.algorithm, run.loss, run.beta) for run in runs.values()}) == 1
    best: dict[str, float] = {}
    for column, values in last.items():
        is_comparable = column.startswith("val/") and same_rows and (same_loss or column.endswith(("auc", "acc")))
        if is_comparable and len({*values.values()}) > 1:
            best[column] = (min if column.endswith("loss") else max)(values.values())
    for name, run in runs.items():
        found = {(each.base, each.by): each for each in run.comparisons}
        cells: list[str | Best] = [text for each in compared for text in _comparison_cells(found.get(each))]
        for column, values in last.items():
            text = metric_text(column, values[name]) if name in values else ""
            cells.append(Best(text=text) if column in best and values.get(name) == best[column] else text)
        time = duration_text(run.seconds) if run.seconds else ""
        rows.append([name, *cells, f"{run.step:,}", time, run.state.word])
    return rows


def _comparison_cells(found: ComparisonResult | None) -> tuple[str, str]:
    """Return win rate and mean lengths of a comparison; empty if there is none."""
    if found is None:
        return "", ""
    own, other = found.mean_lengths
    return f"{percent_text(found.rate)} {interval_text(found.interval)}", f"{own:,.0f} ({other:,.0f})"


def differing_settings(runs: Mapping[str, RunRecord]) -> list[list[str]]:
    """Return the keys whose values differ between runs, in a table with a header.

    NAME stands for the algorithm in the keys of runs with different ones.
    """
    configs: list[Mapping[str, object]] = [run.config for run in runs.values()]
    if len({run.algorithm for run in runs.values()}) > 1:
        configs = [
            {key.replace(f".{run.algorithm}.", ".NAME.", 1): value for key, value in run.config.items()}
            for run in runs.values()
        ]
    keys = dict.fromkeys(key for config in configs for key in config if key not in _NOT_COMPARED)
    rows = [["key", *runs]]
    for key in keys:
        values = [value_text(config[key]) if key in config else "" for config in configs]
        if len(set(values)) > 1:
            if key == DATA and len(set(names := [short_name(config.get(key)) for config in configs])) > 1:
                values = names
            elif all("/" in value and value[0] not in "{[" for value in values):
                values = without_common_start(values, "/")
            rows.append([key, *values])
    return rows


def without_common_start(texts: Sequence[str], ends: str) -> list[str]:
    """Return texts without what they all start with, up to one of the characters ``ends``.

    Examples:
        >>> without_common_start(["data/may/a.jsonl", "data/june/a.jsonl"], "/")
        ['may/a.jsonl', 'june/a.jsonl']
    """
    common = commonprefix(list(texts))  # noqa: RUF071  # of characters, not of folders
    start = 1 + max(common.rfind(end) for end in ends)
    return [text[start:] for text in texts]


def differing_rows(runs: Mapping[str, RunRecord]) -> list[str]:
    """Return which rows differ between runs, by their hashes or else their files: "training", "validation"."""
    found = []
    for title, key in ROWS.items():
        hashes = [str(hashed_fact(run, key).get("sha256", "")) for run in runs.values()]
        if not all(hashes):
            hashes = [value_text(run.config.get(DATA)) for run in runs.values()]
        if len({*hashes}) > 1:
            found.append(title)
    return found


def unique_names(runs: Sequence[RunRecord]) -> dict[str, RunRecord]:
    """Return the runs by name: the name of the folder, or as many last parts of its path as tell the runs apart.

    What all names start with is left out, up to a separator, if words are left of each.
    """
    for parts in range(1, max(len(run.folder.parts) for run in runs) + 1):
        names = ["/".join(run.folder.parts[-parts:]) for run in runs]
        if len({*names}) == len(runs):
            break
    shorter = without_common_start(names, "/_-") if len(runs) > 1 else names
    are_words = all(re.search(r"[^\W\d_]", name) for name in shorter)
    return dict(zip(shorter if are_words else names, runs, strict=True))


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
            for each in series_of(run, name, label, colour=colour, kind=kind)
        ]
        plots.append(Plot(title=title, series=series, level=level, page=METRICS, technical=name in _TECHNICAL))
    return [plot for plot in plots if plot.series]
