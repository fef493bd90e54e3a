"""The figures and tables of a report, as text."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from nemo_kto.data.rows.forms import data_name
from nemo_kto.errors import plural
from nemo_kto.model_files.checkpoint_files import size_text
from nemo_kto.model_files.companion_files import auto_class
from nemo_kto.records.run_record import RUNNING, RunRecord
from nemo_kto.telemetry.evaluations import Sample
from nemo_kto.telemetry.watch import duration_text
from nemo_kto.utils.text import interval_text, number_text, percent_text

MODEL, DATA = "pretrained_checkpoint.restore_from_path", "model.data.data_prefix"
ROWS = {"training": DATA, "validation": "validation rows"}  # key of their content hash in run.json
QUALITY = {"auc": "AUC", "acc": "Accuracy", "rewards_margin": "Margin", "loss": "Loss"}  # metric -> its name
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
    model, data = (short_name(run.config.get(key)) for key in (MODEL, DATA))
    return f"{run.algorithm.upper()}{loss}" + (f" of {model}" if model else "") + (f" on {data}" if data else "")


def short_name(value: object) -> str:
    """Shorten the path of a model or of data to its last part; of several files, join those of all."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list):
        names = [name for name in map(short_name, value) if name and not name.replace(".", "").isdigit()]
        return ", ".join(dict.fromkeys(names))
    return "" if value is None else PurePath(data_name(str(value))).name or str(value)


def model_name(path: str) -> str:
    """Shorten the path of a model to its last two parts, because the last one may be that of any run, such as hf."""
    return "/".join(PurePath(path).parts[-2:])


def headline(run: RunRecord) -> list[Figure]:
    """Return the figures that tell how the run ended: win rates, quality, margin, loss, KL, steps and time."""
    figures = [
        Figure(
            label="Win rate",
            value=percent_text(each.rate),
            detail=f"{interval_text(each.interval)} against {model_name(each.base)} by {each.by}",
        )
        for each in run.comparisons
    ]
    sets = {
        title.replace("validation", "held-out"): prefix
        for title, prefix in run.validations.items()
        if not run.is_small(prefix)
    }
    figures += [
        figure
        for of_set, prefix in (sets or {"training batches": "train/"}).items()
        for metric, label in QUALITY.items()
        if (figure := _change(run, f"{prefix}{metric}", label, of_set)) is not None
    ]
    total = run.total_steps
    figures.append(Figure(label="Steps", value=f"{run.step:,}", detail="" if total is None else f"of {total:,}"))
    if run.seconds:
        detail = "" if run.tokens_per_second is None else f"{number_text(run.tokens_per_second, 3)} tokens/s"
        figures.append(Figure(label="Time", value=duration_text(run.seconds), detail=detail))
    return figures


def _change(run: RunRecord, metric: str, label: str, where: str) -> Figure | None:
    curve, rows = run.curves.get(metric), run.curves.get(metric.removesuffix("auc") + "rows")
    if curve is None:
        return None
    detail = where
    if metric.endswith("auc") and rows is not None:
        detail += f", {plural(int(rows.last), 'row')}"
        if (interval := run.auc_interval(metric.removesuffix("auc"))) is not None:
            detail += f", 95 % in {interval[0]:.2f} to {interval[1]:.2f}"
    if len(curve) > 1:
        detail += f", from {metric_text(metric, curve.first, 3)} at step {int(curve.steps[0]):,}"
    return Figure(label=label, value=metric_text(metric, curve.last, 3), detail=detail)


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


def data_text(run: RunRecord) -> str:
    """Return the names of the files of a run's rows, and the number of training and validation rows."""
    rows = [f"{hashed_fact(run, key)['from']} for {title}" for title, key in ROWS.items() if "from" in hashed_fact(run, key)]
    return (short_name(run.config.get(DATA)) or "unknown files") + (f" ({', '.join(rows)})" if rows else "")


def hashed_fact(run: RunRecord, key: str) -> Mapping[str, Any]:
    """Return the content hash of files and their origin, as the run recorded them under ``key``; empty if it did not."""
    fact = run.run.get("facts", {}).get(key)
    return fact if isinstance(fact, Mapping) else {}


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


def comparison_table(run: RunRecord) -> list[list[str]]:
    """Return the results of `nemo-kto compare`, in a table with a header; empty if there are none."""
    rows = [
        [
            each.base,
            each.by,
            f"{percent_text(each.rate)} {interval_text(each.interval)}",
            percent_text(each.length_controlled),
            f"{each.wins:,} / {each.ties:,} / {each.losses:,}",
            " / ".join(f"{length:,.0f}" for length in each.mean_lengths),
        ]
        for each in run.comparisons
    ]
    header = ["against", "by", "win rate", "at equal lengths", "wins / ties / losses", "characters, model / base"]
    return [header, *rows] if rows else []


def checkpoint_table(run: RunRecord) -> list[list[str]]:
    """Return the checkpoints, in a table with a header; empty if there are none."""
    names = [prefix.replace("/", "_") + metric for prefix in run.validations.values() for metric in ("loss", "auc", "acc")]
    names = [name for name in names if any(name in checkpoint.info["metrics"] for checkpoint in run.checkpoints)]
    rows = []
    for checkpoint in run.checkpoints:
        values = [checkpoint.info["metrics"].get(name) for name in names]
        size = size_text(sum(record.size for record in checkpoint.files.values()))
        texts = ["" if value is None else metric_text(name, value) for name, value in zip(names, values, strict=True)]
        rows.append([checkpoint.folder.name, f"{checkpoint.step:,}", size, *texts])
    return [["checkpoint", "step", "size", *names], *rows] if rows else []


def next_steps(run: RunRecord) -> dict[str, str]:
    """Return commands to use the model of a run, by their purpose; empty for a run without checkpoints and export."""
    out = Path(str(run.config.get("export.path") or run.folder / "hf"))
    if not out.is_dir():
        out = run.folder / "hf"
    folder, model = shlex.quote(str(run.folder)), shlex.quote(str(out))
    if not out.is_dir():
        return {"export": f"nemo-kto export {folder} {model}"} if run.checkpoints else {}
    loader = f"from transformers import {auto_class(out)}; model = {auto_class(out)}.from_pretrained({json.dumps(str(out))})"
    return {
        "talk with it": f"nemo-kto chat {folder} --against",
        "transformers": loader,
        "vLLM": f"vllm serve {model}",
        "llama.cpp": f"llama.cpp/convert_hf_to_gguf.py {model} --outfile aligned.gguf && llama-cli -m aligned.gguf -cnv",
        "publish": f"nemo-kto export {folder} --push hf:USER/NAME",
    }


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
    title: str = ""


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
        messages = samples[0].messages
        prompt = _messages(samples[0].prompt)
        if messages is not None:
            prompt = [(str(message.get("role", "")), str(message.get("content", ""))) for message in messages]
        yield Answers(prompt=prompt, answers=shown)


def extreme_rows(run: RunRecord, *, best: bool) -> list[Answers]:
    """Return the held-out rows whose rewards agree most or least with their labels, at the last validation of each set."""
    last = {row.set: row.step for row in sorted(run.extremes, key=lambda row: row.step)}
    return [
        Answers(
            title=f"{PurePath(row.row).name}: {'margin' if len(row.answers) > 1 else 'reward'} {number_text(row.reward, 3)}",
            prompt=_messages(row.prompt),
            answers=row.answers,
        )
        for row in run.extremes
        if row.best == best and row.step == last[row.set]
    ]


def _messages(prompt: str) -> list[tuple[str, str]]:
    """Return (role, text) of each message of a prompt that was rendered by a common chat template; else one text."""
    turns = _TURN.findall(prompt)
    if not turns or not _BOS.fullmatch(_TURN.sub("", prompt)):
        return [("", prompt)]
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


def metric_text(name: str, value: float, digits: int = 4) -> str:
    """Format the value of a metric: an AUC with three digits after the point, others by :func:`number_text`."""
    return f"{value:.3f}" if name.endswith("auc") else number_text(value, digits)
