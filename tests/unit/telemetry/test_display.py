"""Texts on the terminal: progress lines and bar, with a simulated clock, and tables at the start and the end of a run."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_kto.telemetry import display as progress_module
from nemo_kto.telemetry import display as summary
from nemo_kto.telemetry.display import Progress, epochs, figures_of, layout_text, progress_bar, short, table
from nemo_kto.telemetry.watch import duration_text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


TRAIN = {"train/loss": 0.48731, "train/kl": 0.01234, "train/rewards_margin": -0.5, "perf/tokens_per_sec": 1234.4}


def test_plain_lines_without_a_terminal() -> None:
    out, clock = io.StringIO(), Clock()
    progress = Progress(total_steps=10, start_step=4, stream=out, clock=clock)
    clock.now = 2.0
    progress.log_metrics(TRAIN, 5)
    progress.log_metrics({"timing/reference": 1.0}, 5)  # nothing to show
    clock.now = 8.0
    progress.log_metrics({"train/loss": 0.25}, 7)
    progress.log_metrics({"val/loss": 0.5, "val/kl": 0.0, "val/kl_unclamped": -0.0312}, 7)
    progress.finalize("failed")
    assert out.getvalue().splitlines() == [
        "step 5/10  loss 0.4873  kl 0.0123  margin -0.5000  2.00 s/step  1234 tokens/s  eta 0:00:10",
        "step 7/10  loss 0.2500  3.00 s/step  eta 0:00:08",
        "step 7/10  validation: loss 0.5000  kl 0.0000 (unclamped -0.031)",
        "step 7/10  failed",
    ]


@pytest.mark.parametrize("columns", [60, 100])
def test_a_bar_shows_the_remaining_time_at_every_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values that do not fit are left out, and no line is longer than the terminal is wide."""
    monkeypatch.setattr(progress_module, "terminal_width", lambda stream: columns)
    out, clock = Terminal(), Clock()
    progress = Progress(total_steps=20_000, start_step=11_997, stream=out, clock=clock)
    for step in range(11_998, 12_001):
        clock.now += 4.5
        values = {"train/loss": 0.48731, "train/kl": 0.0, "train/kl_unclamped": -0.0312, "train/acc": 0.75}
        progress.log_metrics({**values, "train/rewards_margin": -0.5, "perf/tokens_per_sec": 123_456.4}, step)
    progress.finalize("success")
    bars = [line for line in re.split(r"[\r\n]", out.getvalue()) if "%|" in line and "eta" in line]
    assert [len(bar) for bar in bars if len(bar) > columns - 1] == []
    assert re.search(r"\| step 12000/20000  eta 10:00:\d\d($|  loss 0.4873($|  kl 0.0000))", bars[-1])
    assert ("kl 0.0000 (unclamped -0.031)" in bars[-1]) == (columns >= 100)


def test_the_time_of_the_run_is_estimated_once_after_three_steps() -> None:
    out, clock = io.StringIO(), Clock()
    progress = Progress(total_steps=304, start_step=4, stream=out, clock=clock)
    for step, seconds in ((5, 30.0), (6, 2.0), (7, 3.0), (8, 2.5)):
        clock.now += seconds
        progress.log_metrics({"train/loss": 0.5, "timing/step_time": seconds}, step)
    lines = out.getvalue().splitlines()
    assert lines[3] == "estimated time: 13 min (2.5 s a step)", "35 s so far and 297 steps of 2.5 s"
    assert sum("estimated" in line for line in lines) == 1
    out.truncate(0)
    short = Progress(total_steps=3, stream=out, clock=clock)
    for step in (1, 2, 3):
        short.log_metrics({"train/loss": 0.5}, step)
    assert "estimated" not in out.getvalue(), "already finished"


def test_a_progress_bar_in_a_file_is_a_line_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()

    def slow(count: int) -> Iterator[int]:
        for item in range(count):
            clock.now += 2.0
            yield item

    assert list(progress_bar(slow(7), total=7, title="reference", shown=True, clock=clock)) == list(range(7))
    assert capsys.readouterr().err.splitlines() == ["reference 3/7", "reference 6/7"]
    assert list(progress_bar(slow(7), total=7, title="reference", shown=False, clock=clock)) == list(range(7))
    assert capsys.readouterr().err == ""


def test_words_of_the_tables() -> None:
    assert [short(number) for number in (999_999, 13_450_000, 7_615_616_512)] == ["999,999", "13.4 M", "7.62 B"]
    assert [duration_text(seconds) for seconds in (0.01, 89.0, 725.0, 5400.0)] == ["1 s", "89 s", "12 min", "1.5 h"]
    assert [epochs(375, each) for each in (187, 375)] == ["2.01 epochs of 187 steps", "1 epoch of 375 steps"]
    layout = layout_text(data=2, context=2, tensor=4, pipeline=2, stages="2 chunks", sequence_parallel=True, experts="2")
    parts = "2 data x 2 context x 4 tensor x 2 pipeline parallel (2 chunks)"
    assert layout == f"32 ranks = {parts}, sequence parallel, experts over 2"


def test_a_table_is_indented_to_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path is not broken, so that it can be copied; a file has no width."""
    lines = {"model": "models/small (llama), 135 M parameters, all trained", "run folder": "/a/folder/" + "x" * 60}
    monkeypatch.setattr(summary, "terminal_width", lambda stream: None)
    assert table("title", lines).splitlines()[1:] == [f"  {label:12}{text}" for label, text in lines.items()]
    monkeypatch.setattr(summary, "terminal_width", lambda stream: 50)
    assert table("title", lines).splitlines()[1:] == [
        "  model       models/small (llama), 135 M",
        "              parameters, all trained",
        f"  run folder  {lines['run folder']}",
    ]


def test_first_and_last_values(tmp_path: Path) -> None:
    logged = [
        {"step": 0, "val/loss": 0.5},
        {"step": 1, "train/loss": 0.5, "train/kl": 0.0},
        {"step": 2, "train/loss": 0.45},
        {"step": 2, "val/loss": 0.25, "val/rewards_margin": 1.5, "val/kl": None},
        {"step": 2, "timing/checkpoint": 1.0},
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in logged))
    expected = {
        "train loss": "0.5000 -> 0.4500 (steps 1 and 2)",
        "validation loss": "0.5000 -> 0.2500 (steps 0 and 2)",
        "validation margin": "1.5000 (step 2)",
    }
    assert figures_of(file) == expected
    file.write_bytes(file.read_bytes() + b'[]\n\xff\0\n{"step": 3, "train/lo')  # of a disk that is full
    assert figures_of(file) == expected
    file.unlink()
    assert figures_of(file) == {}
