"""The Python interface: nemo_kto.train in a script, from rows in memory to the exported model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import nbformat
import numpy as np
import pandas as pd
import pytest
from nbclient import NotebookClient

import nemo_kto
from nemo_kto.data.rows.data_sources import data_prefix_of
from nemo_kto.data.rows.row_files import read_rows
from tests.helpers.commands import REPOSITORY, environment
from tests.helpers.messages import Message
from tests.helpers.tiny_models import make_rows, write_rows, write_stub_model

SCRIPT = """
from __future__ import annotations

import json
import sys
from typing import Annotated

from annotated_types import Ge

import nemo_kto

with open("starts.txt", "a") as file:
    file.write("start\\n")
assert not {"torch", "hydra", "numpy"} & set(sys.modules), "importing nemo_kto loads nothing"
try:
    nemo_kto.train("kto", model="nowhere", data="nothing")
except nemo_kto.UserError as error:
    assert str(error).count("nowhere") == str(error).count("nothing") == 1
assert "torch" not in sys.modules, "nor do mistakes load torch"

import torch

from nemo_kto.algorithms.callbacks import Callback


def scale(ratios_N):  # called by the loss, and taken along
    return 2 * ratios_N


def square(log_ratios_N, desirable_N, *, beta, desirable_weight, undesirable_weight, tau: Annotated[float, Ge(0)] = 0.5):
    weights_N = torch.where(desirable_N.bool(), desirable_weight, undesirable_weight)
    return weights_N * (beta * scale(log_ratios_N) - torch.where(desirable_N.bool(), tau, -tau)).square()


class Watch(Callback):
    def __init__(self, factor):
        self.factor = factor

    def on_train_step_end(self, trainer, event):
        event.report["mine/step"] = self.factor * event.step


if __name__ == "__main__":
    settings = {"model.kto.tau": 0.25, "model.global_batch_size": 16, "model.data.cache_dir": "cache", "recipe": "auto"}
    settings["export.report"] = False
    with open("rows.jsonl") as file:
        rows = [json.loads(line) for line in file]
    run = nemo_kto.train("kto", model=sys.argv[1], data=rows, devices=2, folder="out", loss=square, callbacks=[Watch(10.0)],
                         **settings)
    model, tokenizer = run.load()
    logits = model(torch.tensor([tokenizer.encode("ember")])).logits
    first = run.metrics[0]
    print("first", json.dumps(first), bool(torch.isfinite(logits).all()))
    print("steps", json.dumps(run.metrics_frame()["mine/step"].to_dict()))
    print(run.report())
"""


@pytest.mark.full
def test_a_script_trains_with_its_own_loss_on_two_ranks(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    write_rows(tmp_path / "rows.jsonl", make_rows(48))
    words = [sys.executable, "script.py", str(tiny_llama)]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "starts.txt").read_text() == "start\n", "no rank runs the script"
    lines = done.stdout.splitlines()
    first, finite = next(line for line in lines if line.startswith("first ")).split(" ", 1)[1].rsplit(" ", 1)
    assert finite == "True"
    assert json.loads(first)["train/loss"] == pytest.approx(0.25**2, rel=1e-6), "tau^2: policy and reference are equal"
    assert f"steps {json.dumps({str(step): 10.0 * step for step in (1, 2, 3)})}" in lines
    assert f"run in {tmp_path}/out" in lines
    assert any(line.startswith("  layout") and "2 ranks" in line for line in lines)
    saved = (tmp_path / "out" / "config.yaml").read_text()
    assert "preference_loss: python_session.square\n" in saved
    assert "tau: 0.25\n" in saved


def test_rows_of_every_kind_give_the_same_records(tmp_path: Path) -> None:
    rows = [
        {"prompt": "é \n", "response": "r", "label": True, "weight": 0.1},
        {"prompt": "q", "response": "s", "label": False, "weight": 1e-9},
    ]
    turns = [{"messages": [{"role": "user", "content": "x"}], "label": np.bool_(True), "extra": float("nan")}]
    for kind in (rows, datasets.Dataset.from_list(rows), pd.DataFrame(rows), (row for row in rows)):
        path = data_prefix_of(kind, tmp_path)
        assert [row for _, row in read_rows(str(path))] == rows
    assert data_prefix_of(rows, tmp_path) == data_prefix_of(tuple(rows), tmp_path), "equal rows are written once"
    named = data_prefix_of({"train": rows, "validation": {"a": "a.jsonl", "b": rows[:1]}}, tmp_path)
    assert isinstance(named, dict)
    assert named["validation"]["a"] == "a.jsonl"
    assert [row for _, row in read_rows(named["validation"]["b"])] == rows[:1]
    assert data_prefix_of(["a.jsonl", Path("b.jsonl")], tmp_path) == ["a.jsonl", Path("b.jsonl")]
    assert [row for _, row in read_rows(str(data_prefix_of(turns, tmp_path)))] == [
        {**turns[0], "label": True, "extra": None}
    ]


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (7, ["data", "7", "DataFrame"]),
        ([{"prompt": "p"}, "text"], ["data", "mappings", "'text'", "2"]),
        ([{"prompt": object}], ["data", "object", "1"]),
    ],
)
def test_rows_that_cannot_be_written(data: object, parts: list[str], tmp_path: Path) -> None:
    with pytest.raises(nemo_kto.UserError) as refused:
        data_prefix_of(data, tmp_path / "rows")
    assert str(refused.value) == Message(*parts)
    assert not [*tmp_path.glob("rows/*")]


def lines_of(*arguments: Any, **named: Any) -> list[str]:
    with pytest.raises(nemo_kto.UserError) as refused:
        nemo_kto.train(*arguments, **named)
    return str(refused.value).splitlines()


def test_mistakes_are_raised_together(tmp_path: Path) -> None:
    rows = str(write_rows(tmp_path / "rows.jsonl", make_rows(2)))
    model = write_stub_model(tmp_path / "model")
    good: dict[str, Any] = {"model": model, "data": rows, "hardware": "cpu"}
    assert lines_of("ppo", **good) == [Message("algorithm", "kto", "dpo", "'ppo'")]
    assert lines_of("kto", **good, devices=1, **{"trainer.devices": 2}) == [Message("trainer.devices", "once")]
    assert lines_of("kto", **good, learning_rate=1e-6, loss="ktoo", **{"model.optim.lr": "fast", "model.seed": -1})[1:] == [
        Message("model.kto.preference_loss", "kto", "bco", "ktoo"),
        Message("learning_rate", "model.optim.lr"),
        Message("model.optim.lr", "fast"),
        Message("model.seed", "0", "-1"),
    ]
    assert lines_of("kto", **good, **{"model.seed": object}) == [Message("model.seed", "number", "object")]
    lock = threading.Lock()

    def unfit(log_ratios_N: Any, desirable_N: Any, *, beta: Any, desirable_weight: Any, undesirable_weight: Any) -> Any:
        return lock

    assert lines_of("kto", **good, loss=unfit) == [Message("loss", "unfit", "lock")]


def test_calls_in_threads_are_checked_one_after_the_other(tmp_path: Path) -> None:
    rows = str(write_rows(tmp_path / "rows.jsonl", make_rows(2)))
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(lines_of, "kto", model="nowhere", data=rows, **{"model.seed": -n}) for n in range(1, 9)]
    for n, call in enumerate(calls, start=1):
        assert call.result()[1:] == [
            Message("pretrained_checkpoint.restore_from_path", "nowhere"),
            Message("model.seed", f"-{n}"),
        ]


@pytest.mark.slow
def test_an_interrupt_ends_the_ranks(tiny_llama: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", make_rows(64))
    script = f"""
    import nemo_kto

    try:
        nemo_kto.train("kto", model="{tiny_llama}", data="rows.jsonl", devices=2, folder="out", hardware="cpu",
                       **{{"model.global_batch_size": 4, "trainer.kto.max_epochs": 1000, "model.data.cache_dir": "cache",
                          "export.enabled": False}})
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    words, metrics = [sys.executable, "script.py"], tmp_path / "out" / "metrics.jsonl"
    with subprocess.Popen(words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 150
        while not (metrics.is_file() and metrics.read_bytes()) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert output.splitlines()[-1] == "interrupted"
    assert len(list((tmp_path / "out" / "checkpoints").glob("step_*"))) == 1, "a checkpoint was saved"


def test_the_notebooks_are_those_that_the_documents_name() -> None:
    folder = REPOSITORY / "examples" / "notebooks"
    assert sorted(path.name for path in folder.glob("*.ipynb")) == ["custom_loss.ipynb", "first_model.ipynb"]


def notebook_output(name: str, model: Path, folder: Path, devices: int) -> list[str]:
    """The text of each output of a notebook that was run with this model."""
    notebook = nbformat.read(REPOSITORY / "examples" / "notebooks" / f"{name}.ipynb", as_version=4)
    parameters = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    parameters.source = f"MODEL, DEVICES = {str(model)!r}, {devices}"
    NotebookClient(notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    texts = list[str]()
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        texts.append(output.text if output.output_type == "stream" else output.data["text/plain"])
    return "\n".join(texts).splitlines()


@pytest.fixture
def notebooks_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kernels start in an empty home folder; the ranks need the package's folder where it is not installed."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "home" / "ipython"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "0")
    return tmp_path


DEVICES = [1, pytest.param(2, marks=pytest.mark.full)]


@pytest.mark.slow
@pytest.mark.parametrize("devices", DEVICES)
def test_the_notebook_from_a_csv_to_chatting(tiny_llama: Path, notebooks_home: Path, devices: int) -> None:
    lines = notebook_output("first_model", tiny_llama, notebooks_home, devices)
    layout = next(line for line in lines if line.startswith("  layout"))
    assert layout.split(maxsplit=1)[1].startswith("1 rank" if devices == 1 else "2 ranks = 2 data")
    assert f"run in {notebooks_home}/results/first_model" in lines
    assert sum(line.startswith("What is the capital of ") for line in lines) == 2
    assert any(line.startswith("  checkpoints ") and "step 6" in line for line in lines), "24 rows, 2 epochs of 3 steps"


@pytest.mark.slow
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.full), 2])
def test_the_notebook_with_a_loss(tiny_llama: Path, notebooks_home: Path, devices: int) -> None:
    lines = notebook_output("custom_loss", tiny_llama, notebooks_home, devices)
    assert any(line.startswith("  layout") and f"{devices} rank" in line for line in lines)
    first = json.loads((notebooks_home / "results/custom_loss/metrics.jsonl").read_text().splitlines()[0])
    assert first["train/loss"] == pytest.approx(0.25**2, rel=1e-6)
    assert (first["mine/reached"], "tensor([0.2500, 1.0000])" in lines) == (0.0, True)
    assert lines[-2:] == [Message("model.kto.tau", "large"), Message("model.optim.lr", "0", "-1")]
