"""Texts of the tables at the start and the end of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_kto.telemetry import display as summary
from nemo_kto.telemetry.display import epochs, figures_of, layout_text, short, table
from nemo_kto.telemetry.watch import duration_text


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
