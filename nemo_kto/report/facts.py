"""The figures and tables of a report, as text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from nemo_kto.artifacts.checkpoint_files import size_text
from nemo_kto.errors import plural
from nemo_kto.report.record import RUNNING, RunRecord
from nemo_kto.telemetry.evaluations import Sample
from nemo_kto.telemetry.timers import duration_text

_MODEL, _DATA = "pretrained_checkpoint.restore_from_path", "model.data.data_prefix"
MINUS = "\N{MINUS SIGN}"
_UNITS = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))  # from this size on, the number divided by this, with this unit
_TRAILING_ZEROS = re.compile(r"\.?0*e-0*")
_QUALITY = {"auc": "AUC", "acc": "Accuracy", "rewards_margin": "Margin", "loss": "Loss"}  # metric -> its name
# Differ between any two runs, or follow from other keys.
_NOT_COMPARED = (
    "exp_manager.explicit_log_dir", "exp_manager.name", "exp_manager.wandb_logger_kwargs.name",
    "exp_manager.mlflow_logger_kwargs.run_name", "export.path", "export.adapter_path",
)  # fmt: skip
# Role and text of a message in the chat templates of ChatML, Llama 3 and Gemma; the token before the first message.
_TURN = re.compile(
    r"<(?:\|im_start\||\|start_header_id\||start_of_turn)>(\w+)(?:<\|end_header_id\|>)?\n+"
    r"(.*?)(?:<(?:\|im_end\||\|eot_id\||end_of_turn)>\s*|\Z)",
    re.DOTALL,
)
_BOS = re.compile(r"(<[^<>\s]+>)?\s*")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of the headline: what it is, its value, and where that comes from."""

    label: str
    value: str
    detail: str = ""


def subtitle(run: RunRecord) -> str:
    """Describe a run: its algorithm, loss, model and data."""
    loss = "" if run.loss == run.algorithm else f", loss {run.loss}"
    model, data = (_short_name(run.config.get(key)) for key in (_MODEL, _DATA))
    return f"{run.algorithm.upper()}{loss}" + (f" of {model}" if model else "") + (f" on {data}" if data else "")


def _short_name(value: object) -> str:
    """Shorten the path of a model or of data to its last part; of several files, join those of all."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list):
        names = [name for name in map(_short_name, value) if name and not name.replace(".", "").isdigit()]
        return ", ".join(dict.fromkeys(names))
    return "" if value is None else PurePath(str(value)).name or str(value)


def headline(run: RunRecord) -> list[Figure]:
    """Return the figures that tell how the run ended: quality, margin, loss, KL, steps and time."""
    sets = {title.replace("validation", "held-out"): prefix for title, prefix in run.validations.items()}
    figures = [
        figure
        for of_set, prefix in (sets or {"training batches": "train/"}).items()
        for metric, label in _QUALITY.items()
        if (figure := _change(run, f"{prefix}{metric}", label, of_set)) is not None
    ]
    total = run.total_steps
    figures.append(Figure(label="Steps", value=f"{run.step:,}", detail="" if total is None else f"of {total:,}"))
    if run.seconds:
        detail = "" if run.tokens_per_second is None else f"{number_text(run.tokens_per_second, 3)} tokens/s"
        figures.append(Figure(label="Time", value=duration_text(run.seconds), detail=detail))
    return figures


def _change(run: RunRecord, metric: str, label: str, where: str) -> Figure | None:
    curve = run.curves.get(metric)
    if curve is None:
        return None
    detail = where
    if len(curve) > 1:
        detail = f"{where}, from {number_text(curve.first, 3)} at step {int(curve.steps[0]):,}"
    return Figure(label=label, value=number_text(curve.last, 3), detail=detail)


def state_text(run: RunRecord) -> str:
    """Describe the state of a run in one sentence; empty for one that finished, or of which nothing is known."""
    word, text = run.state
    progress = f"after step {run.step:,}" + ("" if run.total_steps is None else f" of {run.total_steps:,}")
    if word == RUNNING:
        return f"The run is still in progress: this page shows it {progress}."
    if not text:
        return ""
    verb = {"stopped": "was stopped"}.get(word, word)
    return f"The run {verb} {progress}: {text}"


def final_figures(runs: Mapping[str, RunRecord]) -> list[list[str]]:
    """Return a table of several runs, which are given by name: a header, and a line for each run."""
    columns: dict[str, str] = {}
    for run in runs.values():
        for title, prefix in run.validations.items():
            for name, label in _QUALITY.items():
                if f"{prefix}{name}" in run.curves:
                    columns[f"{prefix}{name}"] = f"{title} {label if label == 'AUC' else label.lower()}"
    columns |= {"train/loss": "train loss"}
    rows = [["run", *columns.values(), "steps", "time", "state"]]
    for name, run in runs.items():
        curves = [run.curves.get(column) for column in columns]
        values = ["" if curve is None else number_text(curve.last) for curve in curves]
        time = duration_text(run.seconds) if run.seconds else ""
        rows.append([name, *values, f"{run.step:,}", time, run.state.word])
    return rows


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
            rows.append([key, *values])
    return rows


def value_text(value: object) -> str:
    """Write the value of a key as on a command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {value_text(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    return str(value)


def data_table(run: RunRecord) -> list[list[str]]:
    """Return the counts of each split, in a table with a header; empty if the data are not recorded."""
    rows = []
    sets: Mapping[str, Mapping[str, Any]] = run.data.get("sets", {})
    has_labels = any(counts.get("desirable") is not None for counts in sets.values())
    for name, counts in sets.items():
        labels = [""] * 2 * has_labels
        if (desirable := counts.get("desirable")) is not None:
            labels = [f"{desirable:,}", f"{counts['rows'] - desirable:,}"]
        cut = f"{counts['cut_prompts']:,} / {counts['cut_responses']:,}"
        rows.append([name, f"{counts['rows']:,}", *labels, f"{counts['tokens']:,}", f"{counts['longest']:,}", cut])
    if not rows:
        return []
    labels = ["desirable", "undesirable"] if has_labels else []
    unit = str(run.data.get("unit", "rows"))
    return [["set", unit, *labels, "tokens", "longest", "prompts / answers truncated"], *rows]


def checkpoint_table(run: RunRecord) -> list[list[str]]:
    """Return the checkpoints, in a table with a header; empty if there are none."""
    names = [prefix.replace("/", "_") + metric for prefix in run.validations.values() for metric in ("loss", "auc", "acc")]
    names = [name for name in names if any(name in checkpoint.info["metrics"] for checkpoint in run.checkpoints)]
    rows = []
    for checkpoint in run.checkpoints:
        values = [checkpoint.info["metrics"].get(name) for name in names]
        size = size_text(sum(record.size for record in checkpoint.files.values()))
        texts = ["" if value is None else number_text(value) for value in values]
        rows.append([checkpoint.folder.name, f"{checkpoint.step:,}", size, *texts])
    return [["checkpoint", "step", "size", *names], *rows] if rows else []


def provenance(run: RunRecord) -> dict[str, str]:
    """Return versions of the packages, and content hashes of the model, the tokenizer and the rows, by name."""
    info = run.checkpoints[-1].info if run.checkpoints else {}
    versions: Mapping[str, str] = run.run.get("versions") or info.get("versions") or {}
    facts: Mapping[str, Any] = run.run.get("facts") or info.get("run") or {}
    lines = dict(versions)
    for name, content in facts.items():
        if isinstance(content, Mapping) and "sha256" in content:
            lines[name] = f"sha256 {content['sha256']} ({content.get('from', '')})"
    return lines


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers to one prompt.

    Attributes:
        prompt: (role, text) of each message; the role of a prompt without messages is empty.
        answers: title (model or step, and whether the answer was cut) -> answer.
    """

    prompt: Sequence[tuple[str, str]]
    answers: Mapping[str, str]


def answers(run: RunRecord) -> Iterator[Answers]:
    """Yield, for each prompt, the answers of the reference, of the policy at its first validation, and at its last."""
    by_prompt: dict[int, list[Sample]] = {}
    for sample in run.samples:
        by_prompt.setdefault(sample.index, []).append(sample)
    for _, samples in sorted(by_prompt.items()):
        policy = sorted((each for each in samples if each.model == "policy"), key=lambda sample: sample.step)
        reference = next((each for each in samples if each.model == "reference"), None)
        if reference is None and policy and policy[0].step == 0:
            reference = policy.pop(0)  # nothing was trained yet
        titled = [] if reference is None else [("reference", reference)]
        titled += [(f"step {each.step:,}", each) for each in policy[:1] + policy[-1:]]
        shown = {
            title + sample.cut_note: sample.answer.strip() + ("" if sample.ended else " \N{HORIZONTAL ELLIPSIS}")
            for title, sample in titled
        }
        yield Answers(prompt=_prompt(samples[0]), answers=shown)


def _prompt(sample: Sample) -> list[tuple[str, str]]:
    """Return (role, text) of each message of a prompt; a rendered prompt is split if it has a common chat template."""
    if sample.messages is not None:
        return [(str(message.get("role", "")), str(message.get("content", ""))) for message in sample.messages]
    turns = _TURN.findall(sample.prompt)
    if not turns or not _BOS.fullmatch(_TURN.sub("", sample.prompt)):
        return [("", sample.prompt)]
    return [(role, text) for role, text in turns if text]  # the last one is the beginning of the answer


def warning_lines(run: RunRecord) -> list[tuple[str, str]]:
    """Return the step and the text of each warning; equal ones are shown once, with their number."""
    found: dict[str, list[int]] = {}
    for warning in run.warnings:
        text = warning.text.removeprefix(f"step {warning.step}: ")  # it is shown beside the text
        found.setdefault(text, []).append(warning.step)
    return [
        (
            f"step {steps[0]:,}" if steps[0] else "start",
            text + (f" ({plural(len(steps), 'time')})" if len(steps) > 1 else ""),
        )
        for text, steps in found.items()
    ]


def unique_names(runs: Sequence[RunRecord]) -> dict[str, RunRecord]:
    """Return the runs by name: the name of the folder, or as many last parts of its path as tell the runs apart."""
    for parts in range(1, max(len(run.folder.parts) for run in runs) + 1):
        named = {"/".join(run.folder.parts[-parts:]): run for run in runs}
        if len(named) == len(runs):
            return named
    return {str(run.folder): run for run in runs}


def number_text(value: float, digits: int = 4) -> str:
    """Format a number for an axis or a table, as short as its digits allow.

    Numbers from 1,000 to 10,000 have all their digits before the point; those below 0.001 have an exponent.

    Examples:
        >>> [number_text(value) for value in (12_000, 0.25, 2_500_000, 0.00025, 0)]
        ['12k', '0.25', '2.5M', '2.5e-4', '0']
        >>> number_text(1899.3, digits=3)
        '1899'
    """
    size = abs(value)
    divisor, unit = next(((divisor, unit) for limit, divisor, unit in _UNITS if size >= limit), (1.0, ""))
    text = f"{size / divisor:.{digits}g}"
    if 0 < size < 1e-3:
        text = _TRAILING_ZEROS.sub("e-", f"{size:.{digits - 1}e}")
    elif "e" in text:
        text = f"{size / divisor:.0f}"
    return f"{MINUS if value < 0 else ''}{text}{unit}"
