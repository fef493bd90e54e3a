"""Damaged files of a run: the report is written without what is broken, and its page names that."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from nemo_kto.records.run_record import end_run, read_run, record_failure
from nemo_kto.telemetry.display import figures_of
from nemo_kto.tools.report import report_command as report
from nemo_kto.tools.report.report_page import content_of, html
from tests.helpers.run_folders import data_of, healthy, write_extras, write_run

# Values of wrong types or sizes, as JSON.
BROKEN = {"huge": "1e308", "digits": "9" * 23, "text": '"x"', "list": "[1, 2]", "deep": "[" * 999 + "]" * 999}
# File, and one of its values: the keys that lead to it.
PLACES = [
    ("metrics.jsonl", "step"), ("metrics.jsonl", "train/loss"), ("metrics.jsonl", "val/rows"),
    ("samples.jsonl", "step"), ("samples.jsonl", "index"), ("samples.jsonl", "prompt"), ("samples.jsonl", "answer"),
    ("samples.jsonl", "messages"), ("samples.jsonl", "tokens"), ("samples.jsonl", "model"),
    ("rewards.jsonl", "step"), ("rewards.jsonl", "set"), ("rewards.jsonl", "width"), ("rewards.jsonl", "first"),
    ("rewards.jsonl", "desirable"),
    ("extremes.jsonl", "step"), ("extremes.jsonl", "row"), ("extremes.jsonl", "reward"), ("extremes.jsonl", "answers"),
    ("warnings.jsonl", "step"), ("warnings.jsonl", "text"),
    ("comparisons.jsonl", "base"), ("comparisons.jsonl", "wins"), ("comparisons.jsonl", "rate"),
    ("comparisons.jsonl", "interval"), ("comparisons.jsonl", "mean_lengths"),
    ("run.json", "state"), ("run.json", "text"), ("run.json", "started"), ("run.json", "total_steps"),
    ("run.json", "settings"), ("run.json", "summary"), ("run.json", "versions"), ("run.json", "facts"),
    ("data.json", "unit"), ("data.json", "seq_length"), ("data.json", "balance"), ("data.json", "balance", "weights"),
    ("data.json", "sets"), ("data.json", "sets", "train"), ("data.json", "sets", "train", "rows"),
    ("data.json", "sets", "train", "desirable"), ("data.json", "sets", "train", "lengths"),
    ("data.json", "sets", "train", "lengths", "prompt"), ("data.json", "sets", "train", "lengths", "prompt", "counts"),
    ("data.json", "sets", "train", "lengths", "prompt", "width"),
]  # fmt: skip
# Combinations of a place and a value that a run may write.
VALID = {
    ("metrics.jsonl", "train/loss"): {"negative", "null", "digits"},
    ("metrics.jsonl", "val/rows"): {"negative", "null", "digits"},
    ("samples.jsonl", "prompt"): {"text"}, ("samples.jsonl", "answer"): {"text"}, ("samples.jsonl", "messages"): {"null"},
    ("extremes.jsonl", "row"): {"text"}, ("extremes.jsonl", "reward"): {"digits"},
    ("rewards.jsonl", "set"): {"text"}, ("rewards.jsonl", "first"): {"negative"},
    ("warnings.jsonl", "text"): {"text"}, ("comparisons.jsonl", "base"): {"text"},
    ("comparisons.jsonl", "mean_lengths"): {"list"}, ("rewards.jsonl", "desirable"): {"list"},
    ("data.json", "sets", "train", "lengths", "prompt", "counts"): {"list"},
    ("run.json", "state"): {"text"}, ("run.json", "text"): {"text"}, ("run.json", "total_steps"): {"null"},
    ("run.json", "started"): {"negative", "digits"},
    ("run.json", "settings"): {"mapping"}, ("run.json", "facts"): {"mapping"},
    ("data.json", "unit"): {"text"}, ("data.json", "seq_length"): {"null"}, ("data.json", "balance"): {"mapping"},
    ("data.json", "balance", "weights"): {"list"}, ("data.json", "sets", "train", "desirable"): {"null"},
}  # fmt: skip


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    started = {"started": 1e9, "summary": {"loss": "kto"}, "versions": {"torch": "2"}, "facts": {}}
    metrics = [line for line in healthy(40) if line["step"] % 5 == 0]
    folder = write_extras(write_run(tmp_path_factory.mktemp("run") / "run", metrics, data=data_of(), run=started))
    (folder / "config.yaml").rename(folder.parent / "config.yaml")  # it takes a while to read
    return folder


def with_value(text: str, *, keys: Sequence[str], value: str) -> str:
    content = json.loads(text)
    inner = content
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = "@"
    return json.dumps(content).replace('"@"', value)


def copy_with(complete: Path, folder: Path, name: str, change: Callable[[str], str]) -> Path:
    """A copy of a run folder in which a file, or its last line, is changed."""
    folder.mkdir()
    for file in complete.iterdir() if name else [*complete.iterdir(), complete.parent / "config.yaml"]:
        text = file.read_text()
        if file.name == name and name.endswith(".jsonl"):
            *rest, last = text.splitlines()
            text = "\n".join([*rest, change(last), ""])
        elif file.name == name:
            text = change(text)
        (folder / file.name).write_text(text)
    return folder


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_a_broken_value_is_left_out_and_named(place: tuple[str, ...], complete: Path, tmp_path: Path) -> None:
    name, *keys = place
    wrong = []
    for kind, value in BROKEN.items():
        change = partial(with_value, keys=keys, value=value)
        folder = copy_with(complete, tmp_path / kind, name, change)
        content = content_of([read_run(folder)])
        is_named = any(text.endswith(name) or f"{name}, " in text for text in content["damaged"])
        if kind == "text":  # the only kind that is valid in some places
            assert ("Left out" in html(content | {"refresh": None})) == is_named
        if is_named != (kind not in VALID.get(place, set())):
            wrong.append(kind)
    assert wrong == []


@pytest.mark.parametrize("content", ["[" * 99_999, '{"state": [], "started": []}'])
@pytest.mark.parametrize("name", ["run.json", "data.json", "config.yaml", "metrics.jsonl", "samples.jsonl"])
def test_a_broken_file_is_named(name: str, content: str, complete: Path, tmp_path: Path) -> None:
    folder = copy_with(complete, tmp_path / "run", "", str)
    (folder / name).write_bytes(content.encode("utf-8", "surrogatepass") + b"\n")
    is_valid = name == "data.json" and content.startswith("{")
    assert any(name in text for text in read_run(folder).damaged) != is_valid
    record_failure(folder, "error", since=0)
    assert figures_of(folder / "metrics.jsonl") or name == "metrics.jsonl"


def test_the_end_of_a_run_is_readable_also_with_an_error_that_is_not_text(complete: Path, tmp_path: Path) -> None:
    folder = copy_with(complete, tmp_path / "run", "", str)
    end_run(folder, "failed", "\udcff error")
    (folder / "metrics.jsonl").write_text(
        '{"step": 9007199254740991, "train/loss": -9e99}\n{"step": 1, "train/loss": 9e99}\n'
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # such as an overflow
        report.main([str(folder)])
    assert r"\udcff error" in (folder / "report.html").read_text()
