"""`nemo-kto checkpoint`: its output, exit statuses, and light imports."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.helpers.commands import run_here
from tests.helpers.messages import Message
from tests.helpers.outputs import assert_output
from tests.unit.model_files.test_checkpoint_files import flip, make_checkpoint


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder of two checkpoints."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    folder = tmp_path / "run" / "checkpoints"
    metrics = {"val_loss": 0.46284, "val_acc": 0.75, "val_rewards_margin": 0.29, "train_loss": 0.4}
    for step, of_step in ((2, {"train_loss": 0.5}), (4, metrics)):
        file = make_checkpoint(folder, step, metrics=of_step) / "trainer.json"
        os.utime(file, (1_700_000_000 + step * 60,) * 2)
    return tmp_path / "run"


def test_ls(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints/.writing-step_000006").mkdir()
    (make_checkpoint(run / "checkpoints", 5) / "rng/00000.pt").unlink()
    assert run_here("checkpoint", "ls", run) == 0
    assert_output("checkpoint_ls", capsys.readouterr().out)


def test_verify(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("checkpoint", "verify", run) == 0
    assert_output("checkpoint_verify", capsys.readouterr().out, RUN=run)
    last = run / "checkpoints/step_000004"
    for name in ("rng/00000.pt", "hf/tokenizer.json"):
        flip(last / name)
    assert run_here("checkpoint", "verify", run) == 1
    assert_output("checkpoint_verify_damaged", capsys.readouterr().out, RUN=run)
    assert run_here("checkpoint", "verify", last) == 1
    assert capsys.readouterr().out == Message(f"{last}", "damaged", "rng/00000.pt", "hf/tokenizer.json")


def test_invalid_command_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("checkpoint", "ls", tmp_path) == 2
    assert capsys.readouterr().err == Message("nemo-kto checkpoint ls", "RUN", f"{tmp_path}/checkpoints")
    assert run_here("checkpoint", "verify", tmp_path / "gone") == 2
    assert capsys.readouterr().err == Message("nemo-kto checkpoint verify", "RUN", f"{tmp_path}/gone", "path")
    assert run_here("checkpoint") == 2
    assert capsys.readouterr().err == Message("nemo-kto", "command", "nemo-kto checkpoint --help")
