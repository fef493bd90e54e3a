"""Choice of the checkpoint that `nemo-kto export` writes."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from nemo_kto.cli import export_command
from nemo_kto.errors import UserError
from tests.helpers.messages import raises
from tests.unit.model_files.test_checkpoint_files import make_checkpoint

PARAMS = "exp_manager: {checkpoint_callback_params: {monitor: val_auc, mode: max}}"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step, auc in ((2, 0.6), (4, 0.7), (6, 0.65)):
        make_checkpoint(tmp_path / "checkpoints", step, metrics={"val_auc": auc})
    (tmp_path / "config.yaml").write_text(f"algorithm: kto\n{PARAMS}\n")
    return tmp_path


@pytest.mark.parametrize(("options", "step"), [(["--best"], 4), (["--step", "2"], 2), (["--best", "--adapter"], 4)])
def test_a_checkpoint_of_a_run_is_chosen(options: list[str], step: int, run: Path) -> None:
    with mock.patch("nemo_kto.run.policy.export_checkpoint") as export:
        export_command.main.main([str(run), str(run / "out"), *options], standalone_mode=False)
    folder = run / f"checkpoints/step_{step:06d}"
    export.assert_called_once_with(folder, run / "out", adapter="--adapter" in options)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--step", "5"], ["--step 5", "2, 4, 6"]),
        (["--best", "--step", "4"], ["--best", "--step 4"]),
    ],
)
def test_a_checkpoint_that_is_not_kept(options: list[str], parts: list[str], run: Path) -> None:
    with raises(UserError, *parts):
        export_command.main.main([str(run), str(run / "out"), *options], standalone_mode=False)


def test_no_checkpoint_was_validated(run: Path) -> None:
    (run / "config.yaml").write_text("algorithm: kto\n" + PARAMS.replace("val_auc", "val_loss"))
    with raises(UserError, "--best", "val_loss", "2, 4, 6", "--step N"):
        export_command.main.main([str(run), str(run / "out"), "--best"], standalone_mode=False)
