"""`nemo-kto checkpoint`: its output, exit statuses, and light imports."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from nemo_kto.cli.entry import look_at_checkpoints
from tests.helpers.messages import Message
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


def command(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        look_at_checkpoints([str(word) for word in words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_ls(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints/.writing-step_000006").mkdir()
    (make_checkpoint(run / "checkpoints", 5) / "rng/00000.pt").unlink()
    assert command("ls", run) == 0
    lines = capsys.readouterr().out.splitlines()
    validated = "val_loss 0.4628, val_acc 0.7500, val_rewards_margin 0.2900"
    assert [re.split("  +", line) for line in lines[:3]] == [
        ["step", "written", "size", Message("data", "tensor", "pipeline"), "metrics", "state"],
        ["2", "2023-11-14 22:15", "0.01 MB", "1 x 1 x 1", "train_loss 0.5000", "complete"],
        ["4", "2023-11-14 22:17", "0.01 MB", "1 x 1 x 1", validated, "complete"],
    ]
    assert re.split("  +", lines[3]) == ["5", Message("damaged", "rng/00000.pt")]
    assert lines[4:] == [Message(".writing-step_000006", "written")]
    assert (
        len({line.index(word) for line, word in zip(lines, ("state", "complete", "complete", "damaged"), strict=False)}) == 1
    )


def test_verify(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, last = (run / "checkpoints" / f"step_{step:06d}" for step in (2, 4))
    assert command("verify", run) == 0
    assert capsys.readouterr().out.splitlines() == [Message(f"{step}", "5", "0.01 MB") for step in (first, last)]
    for name in ("rng/00000.pt", "hf/tokenizer.json"):
        flip(last / name)
    damaged = Message(f"{last}", "damaged", "rng/00000.pt", "hf/tokenizer.json")
    assert command("verify", run) == 1
    assert capsys.readouterr().out.partition("\n")[2] == damaged
    assert command("verify", last) == 1
    assert capsys.readouterr().out == damaged


def test_invalid_command_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("ls", tmp_path) == 2
    assert capsys.readouterr().err == Message("nemo-kto checkpoint", "RUN", f"{tmp_path}/checkpoints")
    assert command("verify", tmp_path / "gone") == 2
    assert capsys.readouterr().err == Message("nemo-kto checkpoint", "RUN", f"{tmp_path}/gone", "path")
    assert command() == 2
    assert "the following arguments are required: ls|verify" in capsys.readouterr().err
