"""A rank that is slow and later stuck is reported by the others; errors that ranks find end with status 2, one message."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed.processes.test_hangs import free_port
from tests.helpers import fork_server
from tests.helpers.commands import CLI, TRAINING, environment, run
from tests.helpers.messages import assert_names
from tests.helpers.tiny_models import make_rows, write_rows

# The command with a short timeout, which the configuration counts in minutes; rank 1 is slow.
PROGRAM = """
import datetime, os, sys, time
from nemo_kto.run import train
from nemo_kto.cli.main import main
from nemo_kto.models.engine.engine import LogProbEngine

train.timedelta = lambda minutes: datetime.timedelta(seconds=10)
quick = LogProbEngine._sequence_logps

def slow(engine, *arguments):
    time.sleep(0.2)
    return quick(engine, *arguments)

if os.environ["RANK"] == "1":
    LogProbEngine._sequence_logps = slow
main()
"""
CALLBACK = """
import os, time
from nemo_kto.algorithms.callbacks import Callback

class Stays(Callback):
    def on_train_step_end(self, trainer, event):
        if event.step == 21 and os.environ["RANK"] == "1":
            time.sleep(1000)
"""


@pytest.mark.full
def test_a_slow_rank_and_a_rank_stuck_in_a_callback(tiny_llama: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(96))
    (tmp_path / "own.py").write_text(CALLBACK)
    words = [
        "kto",
        f"pretrained_checkpoint.restore_from_path={tiny_llama}",
        f"model.data.data_prefix={{train: {rows}}}",
        "model.data.cache_dir=cache",
        "hardware=cpu",
        "trainer.callbacks=[own.Stays]",
        "trainer.kto.max_epochs=4",
        "trainer.kto.save_interval=0",
        "model.global_batch_size=8",
        "model.micro_batch_size=4",
        "model.data.seq_length=64",
        "model.reference.mode=swap",
        "exp_manager.create_tensorboard_logger=false",
        "export.report=false",
        "export.enabled=false",
    ]
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(2):
        env = environment(tmp_path) | given | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (tmp_path / f"log{rank}").open("w") as log:
            output = log.fileno()
            processes.append(
                fork_server.Process(
                    ["-c", PROGRAM, *words], cwd=tmp_path, env=env, stdout=output, stderr=output, preload=TRAINING
                )
            )
    try:
        assert processes[0].wait(240) == 1, (tmp_path / "log0").read_text()
    finally:
        for process in processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
    lines = (tmp_path / "log0").read_text().splitlines()

    host = socket.gethostname()
    slow = rf"warning: rank 1 of 2 on {host} .* [\d.]+ s .*"
    slow += (
        r"\(data [\d.]+ s, forward [\d.]+ s(, reference_swap [\d.]+ s)?\), they need [\d.]+ s \(median, over 20 steps\), .*"
    )
    assert [bool(re.fullmatch(slow, line)) for line in lines].count(True) == 1
    logged = [json.loads(line) for line in (tmp_path / "results/gpt_kto/metrics.jsonl").read_text().splitlines()]
    compared = {row["step"]: row for row in logged if "timing/forward_max" in row}
    assert sorted(compared) == [10, 20]
    for row in compared.values():
        assert row["timing/forward_max_rank"] == 1
        assert row["timing/forward_max"] > row["timing/forward"] + 0.2
        assert "timing/optimizer_max" in row

    stuck = rf"nemo-kto: rank 1 of 2 on {host} has been between phases, after 'optimizer', for \d+ s \(21 steps done\), the "
    (first,) = [number for number, line in enumerate(lines) if re.match(stuck, line)]
    assert len(lines) - first <= 20
    assert re.search(r"own.py:\d+ in on_train_step_end: time.sleep\(1000\)$", lines[-2])


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def train(folder: Path, rows: list[dict[str, str]], *given: str) -> subprocess.CompletedProcess[str]:
    """Two ranks that share every layer."""
    words = [
        "pretrained_checkpoint.restore_from_path=model",
        f"model.data.data_prefix={write_rows(folder / 'rows.jsonl', rows).name}",
        "model.data.cache_dir=cache",
        "model.data.seq_length=64",
        "model.global_batch_size=4",
        "model.tensor_model_parallel_size=2",
        "trainer.devices=2",
        "hardware=cpu",
    ]
    return run([*CLI, "kto", *words, *given], cwd=folder, env=environment(), preload=TRAINING, timeout=300)


def assert_said_once(done: subprocess.CompletedProcess[str], *names: str) -> None:
    assert done.returncode == 2
    assert_names(done.stderr.partition("nemo-kto: ")[2], *names)  # libraries may have warned before
    assert done.stderr.count("nemo-kto: ") == 1
    assert "Traceback" not in done.stderr


def test_an_error_on_one_rank(model: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weights[DOWN][0, -1] = torch.nan  # of the last column, which the second rank holds
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    done = train(tmp_path, make_rows(8))
    assert_said_once(done, "model/model.safetensors", DOWN, "finite", "download")
    left = {path.name for path in (tmp_path / "results").rglob("*") if path.is_file()}
    assert left <= {".lock", ".lock.owner"}, "the waiting rank 0 is killed, and its lock becomes free"


def test_an_error_on_all_ranks(model: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    del weights[DOWN]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    done = train(tmp_path, make_rows(8))
    assert_said_once(done, "model", "config.json", "LlamaForCausalLM", "1", DOWN, "download", "save_pretrained")


def test_an_internal_error_has_a_traceback(model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from nemo_kto.algorithms.callbacks import Callback\n\nclass Own(Callback):\n"
        "    def __init__(self):\n        raise ValueError('not of the user')\n"
    )
    done = train(tmp_path, make_rows(8), "trainer.callbacks=[own.Own]")
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.count("ValueError: not of the user") == 1
