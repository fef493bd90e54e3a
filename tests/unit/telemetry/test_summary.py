"""Texts of the tables at the start and the end of a run."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.telemetry.summary import epochs, figures_of, layout_text, short, table
from nemo_kto.telemetry.timers import duration_text


@pytest.mark.parametrize(
    ("degrees", "text"),
    [
        ({}, "1 rank"),
        ({"data": 8, "pipeline": 2, "experts": "4"}, "16 ranks = 8 data x 1 tensor x 2 pipeline parallel, experts over 4"),
        (
            {"data": 2, "tensor": 4, "sequence_parallel": True},
            "8 ranks = 2 data x 4 tensor x 1 pipeline parallel, sequence parallel",
        ),
        (
            {"data": 2, "context": 2, "tensor": 4, "sequence_parallel": True, "experts": "2"},
            "16 ranks = 2 data x 2 context x 4 tensor x 1 pipeline parallel, sequence parallel, experts over 2",
        ),
        (
            {"data": 2, "pipeline": 2, "stages": "2 chunks"},
            "4 ranks = 2 data x 1 tensor x 2 pipeline parallel (2 chunks)",
        ),
    ],
)
def test_the_layout(degrees: dict[str, Any], text: str) -> None:
    one: dict[str, Any] = {"data": 1, "context": 1, "tensor": 1, "pipeline": 1, "stages": "", "sequence_parallel": False}
    assert layout_text(**one | degrees) == text


@pytest.mark.parametrize(
    ("steps", "per_epoch", "text"),
    [
        (375, 187, "2.01 epochs of 187 steps"),
        (375, 375, "1 epoch of 375 steps"),
        (75, 375, "0.2 epochs of 375 steps"),
        (3, 1, "3 epochs of 1 step"),
        (1, 2000, "0.0005 epochs of 2,000 steps"),
    ],
)
def test_steps_in_epochs(steps: int, per_epoch: int, text: str) -> None:
    assert epochs(steps, per_epoch) == text


LINES = {"model": "models/small (llama), 135 M parameters, all trained", "run folder": "/a/folder/" + "x" * 60}


def test_a_table_in_a_file_is_not_wrapped() -> None:
    assert table("title", LINES).splitlines() == [
        "title",
        f"  model       {LINES['model']}",
        f"  run folder  {LINES['run folder']}",
    ]


def test_a_table_is_indented_to_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a real terminal; a path is not broken, so that it can be copied."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 50, 0, 0))
    with os.fdopen(writer, "w") as stream, os.fdopen(reader, "rb"):
        monkeypatch.setattr(sys, "stdout", stream)
        lines = table("nemo-kto kto finished after step 14 of 14 (1 epoch of 14 steps)", LINES).splitlines()
    assert lines == [
        "nemo-kto kto finished after step 14 of 14 (1 epoch",
        "of 14 steps)",
        "  model       models/small (llama), 135 M",
        "              parameters, all trained",
        f"  run folder  {LINES['run folder']}",
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


def test_first_and_last_values_of_each_validation_set(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    logged = [{"step": step, "val/a_loss": 1 / step, "val/a_sft_loss": 9.0, "val/b_kl": 0.5} for step in (1, 4)]
    file.write_text("".join(json.dumps(line) + "\n" for line in logged))
    assert figures_of(file, validations={"validation a": "val/a_", "validation b": "val/b_"}) == {
        "validation a loss": "1.0000 -> 0.2500 (steps 1 and 4)",
        "validation b kl": "0.5000 -> 0.5000 (steps 1 and 4)",
    }


@pytest.mark.parametrize(
    ("number", "text"),
    [(999_999, "999,999"), (1_000_000, "1.00 M"), (13_450_000, "13.4 M"), (134_515_008, "135 M"), (7_615_616_512, "7.62 B")],
)
def test_large_numbers(number: int, text: str) -> None:
    assert short(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.01, "1 s"), (89.0, "89 s"), (90.0, "2 min"), (725.0, "12 min"), (5400.0, "1.5 h"), (1e6, "277.8 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
