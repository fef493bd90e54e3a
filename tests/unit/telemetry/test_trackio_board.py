"""trackio's own store has curves, samples, histograms and alerts, and resumed runs continue in it."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from nemo_kto.telemetry.evaluations import RewardHistogram, Sample
from nemo_kto.telemetry.loggers import RunLogger
from nemo_kto.telemetry.trackio_board import TrackioBoard

pytest.importorskip("trackio", reason="needs the extra live")
SETTINGS = {"project": "tests", "name": "one"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run folder of a process that has not imported trackio, and in which the hub must not be asked."""
    for name in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in os.environ if name.startswith("TRACKIO_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(huggingface_hub, "whoami", lambda **_: pytest.fail("asked the hub"))
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 20)
    yield tmp_path / "run"
    os.environ.pop("TRACKIO_DIR", None)


def opened(folder: Path, **changes: Any) -> RunLogger:
    return RunLogger(**{"folder": folder, "enabled": True, "tensorboard": False, "trackio": SETTINGS, **changes})


def rows(folder: Path, text: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(folder / "trackio" / "tests.db") as store:
        return store.execute(text).fetchall()


def test_values_are_in_the_store_of_the_run_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model": {"lr": 9e-6}, "path": Path("x")}
    logger = opened(folder)
    logger.log_hyperparams(config)
    logger.log_metrics({"train/loss": 0.5}, 1)
    found = RewardHistogram.of("", {"desirable": torch.tensor([1.0, 2.0]), "undesirable": torch.tensor([-1.0])})
    assert found is not None
    logger.log_rewards([found], 1)
    logger.log_samples(
        [Sample(step=1, model="policy", index=0, prompt="p", messages=None, answer="*a*", tokens=2, ended=True)], 1
    )
    logger.finalize("success")
    logger = opened(folder, resumed_step=1)
    logger.log_hyperparams(config)
    logger.log_metrics({"train/loss": 0.25}, 2)
    logger.finalize("success")

    logged = [(step, json.loads(text)) for step, text in rows(folder, "select step, metrics from metrics order by id")]
    values = {name: (step, value) for step, metrics in logged for name, value in metrics.items() if name != "train/loss"}
    assert [(step, metrics["train/loss"]) for step, metrics in logged if "train/loss" in metrics] == [(1, 0.5), (2, 0.25)]
    step, histogram = values["val/rewards_desirable"]
    assert (step, histogram["_type"], sum(histogram["values"])) == (1, "trackio.histogram", 2)
    assert (histogram["bins"][0], histogram["bins"][-1]) == (found.first * found.width, found.edges[-1])
    assert values["samples"][1]["_value"][0]["answer"] == "*a*"
    ((stored,),) = rows(folder, "select config from configs")
    assert json.loads(stored)["model"] == {"lr": 9e-6}
    assert len(rows(folder, "select distinct run_id from metrics")) == 1, "a resumed run continues"
    assert capsys.readouterr().out == ""


def test_alerts(folder: Path) -> None:
    logger = opened(folder, val_prefixes=["val/a_"])
    for step, loss in enumerate([0.5, 0.25, 0.5, 0.75, 0.5, 0.75]):
        logger.log_metrics({"val/a_loss": loss, "val/b_loss": step}, step)
    for name in ("nemo_kto.telemetry.watch", "nemo_kto.telemetry.watch", "urllib3"):
        logging.getLogger(name).warning("the loss jumped")
    try:
        raise RuntimeError("no memory")
    except RuntimeError:
        logger.finalize("failed")
    logging.getLogger("nemo_kto").warning("after the end")
    assert rows(folder, "select level, title, text, step from alerts order by id") == [
        ("warn", "val/a_loss rises", "0.25 -> 0.5 -> 0.75", 3),
        ("warn", "the loss jumped", "the loss jumped", 5),
        ("error", "training failed", "RuntimeError: no memory", 5),
    ]


def test_a_folder_for_several_runs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "all"))
    opened(folder).finalize("success")
    assert (tmp_path / "all" / "tests.db").exists()
    assert not (folder / "trackio").exists()


def test_an_alert_that_fails_does_not_end_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger, alerts = opened(folder), list[str]()

    def fail(board: TrackioBoard, title: str, *_: object) -> None:
        alerts.append(title)
        raise OSError("full disk")

    monkeypatch.setattr(TrackioBoard, "_alert", fail)
    for text in ("slow rank", "loss spike"):
        logging.getLogger("nemo_kto.test").warning(text)
    assert alerts == ["slow rank"], "no further ones are tried"
    logger.log_metrics({"train/loss": 0.5}, 1)
    logger.finalize("success")
    assert '"train/loss": 0.5' in (folder / "metrics.jsonl").read_text()
