"""A finished run in Python: its metrics by step, and its picture in a notebook."""

from __future__ import annotations

import re
import sys
from base64 import b64decode
from pathlib import Path

import pytest

from nemo_kto import Run, UserError
from tests.helpers.run_folders import RECORDED, write_run

LINES = [
    {"step": 1, "train/loss": 0.5, "time": 1.0},
    {"step": 2, "train/loss": 0.25, "time": 2.0},
    {"step": 2, "val/loss": 0.375, "time": 3.0},
    {"step": 1, "timing/checkpoint": 4.0, "time": 4.0},
]


def finished(folder: Path, metrics: object) -> Run:
    folder = write_run(folder, metrics)  # type: ignore[arg-type]
    return Run(folder=folder, model_path=folder / "hf", validations={"validation": "val/"})


def test_one_row_for_each_step(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", LINES)
    assert run.metrics == [
        {"step": 1, "train/loss": 0.5, "timing/checkpoint": 4.0, "time": 4.0},
        {"step": 2, "train/loss": 0.25, "val/loss": 0.375, "time": 3.0},
    ]
    frame = run.metrics_frame()
    assert frame.index.tolist() == [1, 2]
    assert frame.loc[2, "val/loss"] == 0.375


def test_a_frame_needs_pandas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"metrics_frame needs the package pandas.*pip install pandas"):
        finished(tmp_path / "run", LINES).metrics_frame()


def test_the_picture_in_a_notebook(tmp_path: Path) -> None:
    run = finished(tmp_path / "<run>", RECORDED / "good.jsonl")
    text, image = run._repr_html_().split("</pre>")
    assert "&lt;run&gt;" in text
    assert "loss" in text
    (picture,) = re.findall(r'src="data:image/png;base64,([^"]+)"', image)
    assert b64decode(picture).startswith(b"\x89PNG")
