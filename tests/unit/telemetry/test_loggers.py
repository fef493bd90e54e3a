"""What is logged can be read back: json lines, TensorBoard event files, and the other services where installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.telemetry import loggers
from nemo_kto.telemetry.loggers import RunLogger


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


def test_going_on_drops_the_lines_past_the_resumed_step(tmp_path: Path) -> None:
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


def test_a_new_run_starts_the_file_anew(tmp_path: Path) -> None:
    for loss in (0.5, 0.4):
        logger = quiet(tmp_path)
        logger.log_metrics({"train/loss": loss}, 1)
        logger.finalize("success")
    assert [row["train/loss"] for row in read(tmp_path)] == [0.4]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    logger = RunLogger(folder=tmp_path / "run", enabled=False, tensorboard=True)
    logger.log_hyperparams({"lr": 1.0})
    logger.log_metrics({"train/loss": 0.5}, 1)
    logger.finalize("success")
    assert not (tmp_path / "run").exists()


def test_every_sink_gets_every_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Sink:
        def __init__(self) -> None:
            self.got: list[Any] = []

        def log_metrics(self, metrics: Any, step: int) -> None:
            self.got.append((step, metrics))

        def finalize(self, status: str) -> None:
            self.got.append(status)

    sink = Sink()
    monkeypatch.setattr(loggers, "TensorBoard", lambda **_: sink)
    logger = quiet(tmp_path, tensorboard=True)
    logger.log_metrics({"train/loss": 1}, 7)
    logger.finalize("aborted")
    assert sink.got == [(7, {"train/loss": 1.0}), "aborted"]


def test_tensorboard_event_file_reads_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = RunLogger(folder=tmp_path, enabled=True)
    logger.log_hyperparams({"model": {"optim": {"lr": 9e-6}}})
    for step in (1, 2, 3):
        logger.log_metrics({"train/loss": 0.5 / step, "val/kl": 0.25}, step)
    logger.finalize("success")
    # A restart from step 2 makes step 3 again; the first step 3 must not show.
    logger = RunLogger(folder=tmp_path, enabled=True, resumed_step=2)
    logger.log_metrics({"train/loss": 0.125}, 3)
    logger.finalize("success")

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(1, 0.5), (2, 0.25), (3, 0.125)]
    assert [event.value for event in events.Scalars("val/kl")] == [0.25, 0.25]
    (text,) = events.Tensors("hyperparameters/text_summary")
    assert '"lr": 9e-06' in text.tensor_proto.string_val[0].decode()


def test_mlflow_database_lies_in_the_run_folder(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
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


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = quiet(tmp_path, wandb={"project": "tests", "name": "one", "offline": True})
    logger.log_metrics({"train/loss": 0.5}, 1)
    logger.finalize("success")
    identity = (tmp_path / "wandb_run_id").read_text().strip()
    assert list((tmp_path / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb"))


def test_a_missing_package_is_an_error_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "installed", lambda package: package != "wandb")
    with pytest.raises(ModuleNotFoundError, match=r"pip install wandb.*create_wandb_logger=false"):
        quiet(tmp_path / "run", wandb={"project": "tests"})
    assert not (tmp_path / "run").exists()


def test_a_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leftover_of_a_run").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert loggers.installed("leftover_of_a_run") is False
    assert loggers.installed("json") is True
