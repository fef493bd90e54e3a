"""Failing loggers give one warning, and the run continues."""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from nemo_kto.errors import UserError
from nemo_kto.telemetry import loggers
from nemo_kto.telemetry.loggers import RunLogger
from nemo_kto.telemetry.progress import Progress
from tests.helpers.full_disk import files_of_at_most
from tests.helpers.messages import Message


def steps(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def test_lines_are_kept_until_a_full_disk_has_space(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger, file = RunLogger(folder=tmp_path, enabled=True, tensorboard=False), tmp_path / "metrics.jsonl"
    logger.log_metrics({"train/loss": 0.5}, 1)
    with files_of_at_most(file.stat().st_size + 10):
        for step in (2, 3):
            logger.log_metrics({"train/loss": 0.5}, step)
        assert file.read_text().count("\n") == 1
    logger.log_metrics({"train/loss": 0.5}, 4)
    assert steps(file) == [1, 2, 3, 4]
    with files_of_at_most(file.stat().st_size + 10):
        logger.log_metrics({"train/loss": 0.5}, 5)
        assert file.read_text().count("\n") == 4
    logger.finalize("success")
    assert steps(file) == [1, 2, 3, 4, 5]
    assert caplog.messages == [Message(f"{file}", "File too large", "continues")]


DAMAGES = [b'{"step"\n', b"\0" * 9]


@pytest.mark.parametrize("damage", DAMAGES)
def test_readable_lines_are_kept(damage: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "metrics.jsonl"
    content = b'{"step": 1}\n' + damage + b'{"step": 2}\n{"step": 3}\n' * damage.endswith(b"\n")
    file.write_bytes(content)
    RunLogger(folder=tmp_path, enabled=True, tensorboard=False, resumed_step=2).finalize("success")
    assert steps(file) == ([1, 2] if damage.endswith(b"\n") else [1])
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == content
    expected = Message(f"{file}", "damaged", "file", f"{file}.damaged")
    assert caplog.messages == [expected]


class Failing:
    """A service that is down."""

    def __init__(self, **_: object) -> None:
        self.calls = 0

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.calls += 1
        raise ConnectionError("cannot reach\nhttp://me:secret@host")

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        """It was there at the start."""

    finalize = log_metrics


def test_a_failing_service_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    down = Failing()
    monkeypatch.setattr(loggers, "TensorBoard", lambda **_: down)
    logger = RunLogger(folder=tmp_path, enabled=True)
    logger.log_hyperparams({"lr": 1.0})
    for step in (1, 2, 3):
        logger.log_metrics({"train/loss": 0.5}, step)
    logger.finalize("success")
    assert (steps(tmp_path / "metrics.jsonl"), down.calls) == ([1, 2, 3], 1)
    assert caplog.messages == [Message("tensorboard", "ConnectionError", "http://***@host")]


def test_a_service_that_is_down_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_server(*_: object, **__: object) -> None:
        raise ConnectionError("cannot reach http://host")

    monkeypatch.setattr(loggers, "_wandb", no_server)
    monkeypatch.setattr(loggers, "installed", lambda package: True)
    with pytest.raises(UserError) as raised:
        RunLogger(folder=tmp_path, enabled=True, tensorboard=False, wandb={})
    assert str(raised.value) == Message(
        "wandb", "opened", "ConnectionError", "http://host", "exp_manager.create_wandb_logger=false"
    )
    logger = RunLogger(folder=tmp_path, enabled=True, tensorboard=False, wandb={}, resumed_step=0)
    logger.log_metrics({"train/loss": 0.5}, 1)
    assert steps(tmp_path / "metrics.jsonl") == [1]
    assert caplog.messages == [Message("wandb", "ConnectionError", "http://host")]


class Closed(io.StringIO):
    """A terminal that was closed, or a file whose disk is full."""

    tried = 0

    def write(self, text: str) -> int:
        self.tried += 1
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_closed_progress_output() -> None:
    stream = Closed()
    progress = Progress(total_steps=2, stream=stream)
    progress.log_metrics({"train/loss": 0.5}, 1)
    progress.log_metrics({"train/loss": 0.5}, 2)
    progress.finalize("failed")
    assert stream.tried == 1, "no second attempt"
