"""Hostile files in the folder of a resumed run: each is refused or replaced, without a hang."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_kto.config import compose
from nemo_kto.config.saved_config import save_config
from nemo_kto.config.schema import RunConfig
from nemo_kto.errors import UserError
from nemo_kto.telemetry.loggers import JsonLines, read_metrics, saved_run_id
from nemo_kto.utils.files import MAX_LINE_BYTES
from nemo_kto.utils.locks import last_holder, locked
from tests.helpers.messages import Message, assert_names
from tests.unit.conftest import composed

IRREGULAR: dict[str, Callable[[Path], object]] = {
    "a named pipe (FIFO)": os.mkfifo,
    "a character device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    given = ["pretrained_checkpoint.restore_from_path=m", "model.data.data_prefix=d", "exp_manager.resume_if_exists=true"]
    found, mistakes = compose.to_config(composed([*given, f"exp_manager.explicit_log_dir='{tmp_path}'"]))
    assert found is not None, mistakes
    return found


@pytest.mark.parametrize("kind", IRREGULAR)
def test_a_metrics_path_that_is_not_a_file_is_refused(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    IRREGULAR[kind](file)
    with pytest.raises(UserError) as raised:
        JsonLines(file=file, resumed_step=1)
    assert_names(raised.value, str(file), kind, "regular file", "move it away")


@pytest.mark.parametrize("kind", IRREGULAR)
def test_an_identity_path_that_is_not_a_file_is_ignored(kind: str, tmp_path: Path) -> None:
    IRREGULAR[kind](tmp_path / "wandb_run_id")
    assert saved_run_id(tmp_path / "wandb_run_id", 1) is None


@pytest.mark.parametrize("kind", IRREGULAR)
def test_a_configuration_path_that_is_not_a_file_is_replaced(
    kind: str, tmp_path: Path, config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    IRREGULAR[kind](file)
    save_config(config)
    assert_names(capsys.readouterr().err, str(file), "cannot be read")
    assert file.is_file()
    assert not file.is_symlink()


@pytest.mark.parametrize("kind", IRREGULAR)
def test_an_owner_of_a_lock_that_is_not_a_file_is_unknown(kind: str, tmp_path: Path) -> None:
    IRREGULAR[kind](tmp_path / ".lock.owner")
    assert last_holder(tmp_path / ".lock") is None
    with locked(tmp_path / ".lock", when_held=lambda who: None):
        assert (tmp_path / ".lock.owner").is_file()


def test_a_line_above_the_limit_is_damage(tmp_path: Path) -> None:
    """The lines after it are not read, which must be said."""
    file = tmp_path / "metrics.jsonl"
    with file.open("wb") as handle:
        handle.write(b'{"step": 1, "train/loss": 0.5}\n')
        handle.truncate(2 * MAX_LINE_BYTES)
        handle.seek(0, os.SEEK_END)
        handle.write(b'\n{"step": 2, "train/loss": 0.5}\n')
    damaged = list[str]()
    assert [line["step"] for line in read_metrics(file, damaged)] == [1]
    assert damaged == [Message("1 line", "metrics.jsonl", "line 2")]


def test_metrics_without_lines_are_set_aside(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    with file.open("wb") as handle:
        handle.write(b'{"step": 1, "train/loss": 0.5}\n')
        handle.truncate(3 * MAX_LINE_BYTES)
    JsonLines(file=file, resumed_step=1).finalize("")
    assert file.read_bytes() == b'{"step": 1, "train/loss": 0.5}\n'
    assert (tmp_path / "metrics.jsonl.damaged").stat().st_size == 3 * MAX_LINE_BYTES
