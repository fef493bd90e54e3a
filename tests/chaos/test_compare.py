"""The comparison of runs detects each kind of difference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.job import ROWS, STEPS_OF_EPOCH, Comparison, compare


def write_run(folder: Path) -> Path:
    """Invented files of a run of two epochs."""
    for path in ("rows", "run/hf", "run/checkpoints/step_000006"):
        (folder / path).mkdir(parents=True)
    with (folder / "run/metrics.jsonl").open("w") as metrics, (folder / "rows/0.jsonl").open("w") as notes:
        for step in range(1, 2 * STEPS_OF_EPOCH + 1):
            print(json.dumps({"step": step, "time": step, "timing/data": 0.5, "train/loss": 1 / step}), file=metrics)
            rows = [f"row{number}" for number in range((step - 1) % STEPS_OF_EPOCH, ROWS, STEPS_OF_EPOCH)]
            print(json.dumps({"step": step, "share": 0, "shares": 1, "rows": rows}), file=notes)
    (folder / "run/hf/model.safetensors").write_bytes(bytes(100))
    return folder


def edit(name: str, old: str, new: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        before = (folder / name).read_text()
        assert before.count(old) >= 1
        (folder / name).write_text(before.replace(old, new, 1))

    return change


def drop_last_line(folder: Path) -> None:
    file = folder / "run/metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))


CASES: dict[str, tuple[Callable[[Path], object], Comparison]] = {
    "nothing": (lambda folder: None, Comparison()),
    "a_time": (edit("run/metrics.jsonl", '"timing/data": 0.5', '"timing/data": 0.7'), Comparison()),
    "the_last_bit_of_a_loss": (
        edit("run/metrics.jsonl", "0.3333333333333333", "0.33333333333333337"),
        Comparison(other_losses=True, differences=["metrics.jsonl has 6 lines for 6, another one from line 3"]),
    ),
    "a_line_missing": (
        drop_last_line,
        Comparison(other_losses=True, differences=["metrics.jsonl has 5 lines for 6, another one from line 6"]),
    ),
    "a_row_in_the_place_of_another": (
        edit("rows/0.jsonl", '"row3"', '"row4"'),
        Comparison(rows_lost=1, rows_doubled=1, differences=["rows of a step"]),
    ),
    "the_order_of_rows": (
        edit("rows/0.jsonl", '"row0", "row3"', '"row3", "row0"'),
        Comparison(differences=["rows of a step"]),
    ),
    "an_exported_byte": (
        lambda folder: (folder / "run/hf/model.safetensors").write_bytes(bytes(99) + b"1"),
        Comparison(differences=["exported files"]),
    ),
    "no_export": (
        lambda folder: shutil.rmtree(folder / "run/hf"),
        Comparison(differences=["no exported model", "in the run folder: run/hf"]),
    ),
    "a_checkpoint_too_many": (lambda folder: (folder / "run/checkpoints/step_000004").mkdir(), Comparison()),
    "the_lock_of_an_export": (lambda folder: (folder / "run/.hf.lock").touch(), Comparison()),
    "a_checkpoint_missing": (
        lambda folder: (folder / "run/checkpoints/step_000006").rmdir(),
        Comparison(differences=["in the run folder: run/checkpoints/step_000006"]),
    ),
    "a_leftover": (
        lambda folder: (folder / "run/checkpoints/.writing-step_000004").mkdir(),
        Comparison(differences=["in the run folder: run/checkpoints/.writing-step_000004"]),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_comparison_findings(case: str, tmp_path: Path) -> None:
    change, expected = CASES[case]
    whole, folder = write_run(tmp_path / "whole"), write_run(tmp_path / "run")
    change(folder)
    assert compare(folder, whole) == expected
    assert expected.clean == (expected == Comparison())


def test_a_repeated_step_with_other_rows(tmp_path: Path) -> None:
    whole, folder = write_run(tmp_path / "whole"), write_run(tmp_path / "run")
    with (folder / "rows/0.jsonl").open("a") as notes:
        print(json.dumps({"step": 2, "share": 0, "shares": 1, "rows": ["row0"]}), file=notes)
    assert compare(folder, whole).differences[0] == "step 2 had other rows when it was taken again"
