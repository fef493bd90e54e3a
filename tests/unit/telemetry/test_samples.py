"""Samples can be read back from every logger, and a resumed run drops those that it repeats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.telemetry.loggers import RunLogger
from nemo_kto.telemetry.samples import SAMPLES_FILE, Sample, read_samples
from tests.unit.telemetry.test_loggers import logged_to_wandb, quiet

ASKED: list[Mapping[str, Any]] = [{"role": "user", "content": "Is it hot?"}]


def samples(step: int) -> list[Sample]:
    return [
        Sample(
            step=step, model="policy", index=0, prompt="2 + 2 =", messages=None, answer=f"4 {step}", tokens=2, ended=True
        ),
        Sample(step=step, model="policy", index=1, prompt="Hot?", messages=ASKED, answer="*a*\nb", tokens=9, ended=False),
    ]


def log(logger: RunLogger, *steps: int) -> None:
    for step in steps:
        logger.log_samples(samples(step), step)
    logger.finalize("success")


def test_the_file_has_one_line_per_answer(tmp_path: Path) -> None:
    log(quiet(tmp_path, samples=True), 0, 2)
    lines = [json.loads(line) for line in (tmp_path / SAMPLES_FILE).read_text().splitlines()]
    assert lines[3] == {
        "step": 2,
        "model": "policy",
        "index": 1,
        "prompt": "Hot?",
        "messages": ASKED,
        "answer": "*a*\nb",
        "tokens": 9,
        "ended": False,
    }
    assert read_samples(tmp_path / SAMPLES_FILE) == [*samples(0), *samples(2)]
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_resumed_run_drops_later_samples(tmp_path: Path) -> None:
    log(quiet(tmp_path, samples=True), 0, 2, 4)
    with (tmp_path / SAMPLES_FILE).open("a") as file:
        file.write('{"step": 4, "mod')  # killed in the middle of a line
    assert [sample.step for sample in read_samples(tmp_path / SAMPLES_FILE)] == [0, 0, 2, 2, 4, 4]
    log(quiet(tmp_path, samples=True, resumed_step=3), 4)
    assert [sample.step for sample in read_samples(tmp_path / SAMPLES_FILE)] == [0, 0, 2, 2, 4, 4]


def test_there_is_no_file_without_samples(tmp_path: Path) -> None:
    log(quiet(tmp_path))
    assert not (tmp_path / SAMPLES_FILE).exists()
    assert read_samples(tmp_path / SAMPLES_FILE) == []


def test_tensorboard_has_a_text_for_each_prompt(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log(RunLogger(folder=tmp_path, enabled=True, samples=True), 0, 2)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    texts = [
        [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(f"samples/{n}/text_summary")]
        for n in range(2)
    ]
    assert texts[0] == [(step, f"**prompt**\n\n    2 + 2 =\n\n**policy**\n\n    4 {step}") for step in (0, 2)]
    assert texts[1][0][1].endswith("**policy** (cut after 9 tokens)\n\n    *a*\n    b")


def test_mlflow_has_one_table_of_the_run(tmp_path: Path) -> None:
    import mlflow

    for resumed_step, step in ((None, 0), (0, 2)):
        log(quiet(tmp_path, mlflow={"experiment_name": "tests"}, samples=True, resumed_step=resumed_step), step)
    assert sorted(tmp_path.glob("mlflow*")) == [
        tmp_path / name for name in ("mlflow.db", "mlflow_artifacts", "mlflow_run_id")
    ]
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "samples.json", str(tmp_path))).read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [(row["step"], row["answer"]) for row in rows] == [(0, "4 0"), (0, "*a*\nb"), (2, "4 2"), (2, "*a*\nb")]


@pytest.mark.usefixtures("fresh_wandb")
def test_wandb_has_a_table_of_each_validation(tmp_path: Path) -> None:
    log(quiet(tmp_path, wandb={"project": "tests", "name": "one", "offline": True}, samples=True), 0, 2)
    __import__("wandb").finish()  # as at the end of the process
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (file,) = run.glob("*.wandb")
    found = []
    for values in logged_to_wandb(file, "samples.path", count=2):
        table = json.loads((run / "files" / values["samples.path"]).read_text())
        found.append((values["trainer/global_step"], [row[table["columns"].index("answer")] for row in table["data"]]))
    assert found == [(0, ["4 0", "*a*\nb"]), (2, ["4 2", "*a*\nb"])]
