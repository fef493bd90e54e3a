"""Logged values can be read back, failing loggers give one warning, and warnings are in a file of the run."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.errors import UserError
from nemo_kto.telemetry import loggers
from nemo_kto.telemetry.display import Progress
from nemo_kto.telemetry.evaluations import Sample
from nemo_kto.telemetry.loggers import WARNINGS_FILE, RunLogger, check_loggers, collect_warnings, import_package
from tests.helpers.full_disk import files_of_at_most
from tests.helpers.messages import Message, assert_names


@pytest.fixture
def fresh_wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variables of wandb, and no settings that it remembers, such as whether it is offline; also afterwards."""
    import wandb

    for name in {"WANDB_MODE", *(name for name in os.environ if name.startswith("WANDB_"))}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()
    yield
    wandb.teardown()


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def quiet(folder: Path, **changes: Any) -> RunLogger:
    return RunLogger(**{"folder": folder, "enabled": True, "tensorboard": False, **changes})


def test_metrics_are_on_disk_as_soon_as_they_are_logged(tmp_path: Path) -> None:
    logger = quiet(tmp_path / "run")
    logger.log_metrics({"train/loss": 0.1 + 0.2, "train/kl": float("nan")}, 1)
    row = read(tmp_path / "run")[0]  # before finalize
    assert row.pop("time") > 1.6e9
    assert row == {"step": 1, "train/loss": 0.1 + 0.2, "train/kl": None}
    logger.finalize("success")


@pytest.mark.usefixtures("fresh_wandb")
def test_wandb_offline_does_not_record_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "tracking_uri=http://me:pass1word@host"])
    logger = quiet(tmp_path, wandb={"project": "tests", "name": "one", "offline": True}, samples=True)
    logger.log_hyperparams({"lr": 9e-6})
    logger.log_metrics({"train/loss": 0.5}, 1)
    sample = Sample(step=1, model="policy", index=0, prompt="p", messages=None, answer="*a*", tokens=2, ended=True)
    logger.log_samples([sample], 1)
    logger.log_samples([replace(sample, answer="private")], 1, to_services=False)
    logger.finalize("success")
    __import__("wandb").finish()  # as at the end of the process
    identity = (tmp_path / "wandb_run_id").read_text().strip()
    (file,) = (tmp_path / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb")
    while b"train/loss" not in file.read_bytes():  # wandb's own process may write it later
        time.sleep(0.05)
    tables = "".join(table.read_text() for table in file.parent.rglob("*.table.json"))
    assert "*a*" in tables
    assert "private" not in tables
    written = b"".join(each.read_bytes() for each in tmp_path.rglob("*") if each.is_file())
    assert b"pass1word" not in written


def test_resuming_drops_later_lines(tmp_path: Path) -> None:
    logger = quiet(tmp_path)
    for step in (1, 2, 3, 4):
        logger.log_metrics({"train/loss": step / 10}, step)
    logger.log_metrics({"val/loss": 0.5}, 2)
    logger.finalize("failed")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "train/lo')  # killed in the middle of a line

    logger = quiet(tmp_path, resumed_step=2)
    logger.log_metrics({"train/loss": 0.9}, 3)
    logger.finalize("success")
    assert [(row["step"], row.get("train/loss"), row.get("val/loss")) for row in read(tmp_path)] == [
        (1, 0.1, None),
        (2, 0.2, None),
        (2, None, 0.5),
        (3, 0.9, None),
    ]


def test_mlflow_database_is_in_the_run_folder(tmp_path: Path) -> None:
    import mlflow

    logger = quiet(tmp_path, mlflow={"experiment_name": "tests"})
    logger.log_hyperparams({"lr": 9e-6})
    logger.log_metrics({"train/loss": 0.5}, 1)
    logger.finalize("failed")
    logger = quiet(tmp_path, mlflow={"experiment_name": "tests"}, resumed_step=1)
    logger.log_metrics({"train/loss": 0.25}, 2)
    logger.finalize("success")

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert len(runs) == 1
    history = client.get_metric_history(runs[0].info.run_id, "train/loss")
    assert [(entry.step, entry.value) for entry in history] == [(1, 0.5), (2, 0.25)]


def test_a_missing_package_is_an_error_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "installed", lambda package: package != "wandb")
    message = r"pip install wandb.*create_wandb_logger=false"
    with pytest.raises(UserError, match=message):
        check_loggers(folder=tmp_path / "run", wandb={"project": "tests"})
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match=message):
        quiet(tmp_path / "run", wandb={"project": "tests"})


def test_all_unusable_loggers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "installed", lambda package: package == "tensorboard")
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "tensorboard").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError) as raised:
        check_loggers(folder=tmp_path, wandb={"project": "tests"}, mlflow={})
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"
    for name in ("tensorboard", "wandb", "mlflow"):
        assert_names(raised.value, f"the log {name} ", f"exp_manager.create_{name}_logger=false")
    assert_names(raised.value, str(tmp_path / "metrics.jsonl"), str(tmp_path / "tensorboard"), "pip install wandb")


def test_an_unreachable_mlflow_server(tmp_path: Path) -> None:
    with socket.socket() as server:  # bound, without listening
        server.bind(("127.0.0.1", 0))
        uri = f"http://me:secret@127.0.0.1:{server.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(UserError) as raised:
            RunLogger(folder=tmp_path, enabled=True, tensorboard=False, mlflow={"experiment_name": "x", "tracking_uri": uri})
    assert time.monotonic() - started < 60, "without the minutes of mlflow's own retries"
    assert_names(raised.value, "mlflow", uri.rpartition(":")[2], "create_mlflow_logger=false")
    assert "secret" not in str(raised.value)
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ


def test_a_broken_package_is_not_reported_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "an_old_logger.py").write_text("import a_module_that_newer_pythons_lack\n")
    (tmp_path / "an_old_logger-1.27.0.dist-info").mkdir()
    (tmp_path / "an_old_logger-1.27.0.dist-info/METADATA").write_text("Name: an_old_logger\nVersion: 1.27.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError) as raised:
        import_package("an_old_logger")
    assert_names(raised.value, "an_old_logger 1.27.0", "a_module_that_newer_pythons_lack", "constraints.txt")
    assert "not installed" not in str(raised.value)
    with pytest.raises(UserError) as raised:
        import_package("a_logger_that_nobody_installed")
    assert_names(raised.value, "not installed", "pip install a_logger_that_nobody_installed")


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


SOMEWHERE = logging.getLogger("nemo_kto.somewhere")


def lines(folder: Path) -> list[tuple[int, str, str]]:
    content = map(json.loads, (folder / WARNINGS_FILE).read_text().splitlines())
    return [(line["step"], line["level"], line["text"]) for line in content]


def test_warnings_are_written_with_their_step(tmp_path: Path) -> None:
    step = 0
    with collect_warnings() as warnings:
        SOMEWHERE.warning("before the folder is known")
        assert not list(tmp_path.iterdir())
        warnings.open_file(tmp_path, step=lambda: step, resumed_step=None)
        SOMEWHERE.info("no warning")
        step = 7
        for _ in range(2):
            SOMEWHERE.warning("loss of %.1f and https://me:password@host", 3.5)
        logging.getLogger("library").error("failed")
    SOMEWHERE.warning("after the run")
    assert lines(tmp_path) == [
        (0, "warning", "before the folder is known"),
        (7, "warning", "loss of 3.5 and https://***@host"),
        (7, "error", "failed"),
    ]


def test_a_resumed_run_drops_the_warnings_of_repeated_steps(tmp_path: Path) -> None:
    for resumed_step, at in ((None, 4), (None, 9), (5, 6)):
        with collect_warnings() as warnings:
            warnings.open_file(tmp_path, step=lambda at=at: at, resumed_step=resumed_step)  # type: ignore[misc]
            SOMEWHERE.warning("at step %s", at)
    assert lines(tmp_path) == [(6, "warning", "at step 6")]
