"""Complete command lines: a job that is killed and restarted, and its export.

Five steps, in processes that are forked; --matrix=full repeats everything with 27 steps and new interpreters. own.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from tests.helpers import fork_server
from tests.helpers.commands import CLI, REPOSITORY, TRAINING, environment, run, start
from tests.helpers.messages import assert_names
from tests.helpers.tiny_models import make_rows

EXAMPLE = [sys.executable, str(REPOSITORY / "examples/nlp/gpt/train_gpt_kto.py")]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job of two ranks and its expected results.

    Attributes:
        rows: number of rows in its file.
        overrides: how long it is.
        steps: number of steps.
        validated: steps after which it validates.
        validation_rows: rows of a validation.
        kept: number of checkpoints that stay.
    """

    rows: int
    overrides: tuple[str, ...]
    steps: int
    validated: list[int]
    validation_rows: int
    kept: int


# 22 rows for training, 2 batches of 8, two and a half times.
SHORT = Job(
    rows=28,
    overrides=("trainer.kto.max_steps=5", "trainer.kto.val_check_interval=1.0", "model.micro_batch_size=4"),
    steps=5,
    validated=[2, 4, 5],
    validation_rows=6,
    kept=3,
)


def command(model: Path, rows: Path, folder: Path, job: Job) -> list[str]:
    """The command line of the contract, and a job small enough for a test."""
    return [
        *EXAMPLE,
        f"pretrained_checkpoint.restore_from_path={model}",
        "model.kto.ref_policy_kl_penalty=0.1",
        "model.kto.desirable_loss_weight=1.0",
        "model.kto.undesirable_loss_weight=1.0",
        "model.peft.peft_scheme=none",
        f"model.data.data_prefix={rows}",
        'model.data.splits_string="80,20,0"',
        f"model.data.cache_dir={rows.parent / 'cache'}",
        f"exp_manager.explicit_log_dir={folder}",
        "trainer.devices=2",
        "trainer.accelerator=cpu",
        "trainer.precision=32",
        "trainer.kto.max_epochs=3",
        "trainer.kto.save_interval=2",
        "export.report=false",
        "model.global_batch_size=8",
        "model.data.seq_length=64",
        "model.optim.lr=5e-4",
        "model.optim.sched.warmup_steps=2",
        *job.overrides,
    ]


def finish(words: list[str], *, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The finished command."""
    return run(words, cwd=cwd, env=environment(), preload=TRAINING, timeout=300)


@pytest.fixture(scope="module")
def job() -> Job:
    return SHORT


@pytest.fixture(scope="module")
def rows(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "kto.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in make_rows(job.rows)))
    return file


def trained(folder: Path) -> list[dict[str, float]]:
    """Logged metrics of each step without times."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if name.startswith(("train/", "val/", "step"))}
        for row in rows
        if "timing/checkpoint" not in row
    ]


@pytest.fixture(scope="module")
def whole(job: Job, rows: Path, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of two ranks that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = finish(command(tiny_llama, rows, folder, job), cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    assert_names(done.stdout, f"{folder / 'hf'}", "last", f"{job.steps}")
    return folder


def test_the_reference_job(job: Job, whole: Path) -> None:
    steps = [row for row in trained(whole) if "train/loss" in row]
    assert [row["step"] for row in steps] == list(range(1, job.steps + 1))
    assert steps[0]["train/loss"] == pytest.approx(0.5, abs=1e-6)
    assert steps[0]["train/lr"] == pytest.approx(5e-4 / 2)
    validations = [row for row in trained(whole) if "val/loss" in row]
    assert [row["step"] for row in validations] == job.validated
    assert {row["val/rows"] for row in validations} == {job.validation_rows}, "the incomplete batch is included"
    kept = {path.name for path in (whole / "checkpoints").iterdir()}
    assert f"step_{job.steps:06}" in kept
    assert len(kept) == job.kept
    assert (whole / "config.yaml").is_file()
    assert list((whole / "tensorboard").glob("events.out.tfevents.*"))


def test_the_export_is_the_aligned_model(whole: Path, tiny_llama: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    after = AutoModelForCausalLM.from_pretrained(whole / "hf", dtype=torch.float32)
    tokens = torch.arange(5, 25)[None]
    assert (before(tokens).logits - after(tokens).logits).abs().max() > 0.01
    tokenizer = AutoTokenizer.from_pretrained(whole / "hf")
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
        == "<|im_start|>user\nx<|im_end|>\n"
    )


def test_export_of_a_checkpoint_equals_the_export_of_the_run(job: Job, whole: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    done = finish([*CLI, "export", str(whole), str(tmp_path / "again")], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (ours,), (theirs,) = ((folder.glob("*.safetensors")) for folder in (tmp_path / "again", whole / "hf"))
    first, second = load_file(ours), load_file(theirs)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.full)])
def test_killed_and_started_again(victim: int, job: Job, rows: Path, whole: Path, tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = command(tiny_llama, rows, folder, job)
    with (tmp_path / "output").open("w") as output:
        number = output.fileno()
        process = start(words, cwd=tmp_path, env=environment(), output=number, errors=number, preload=TRAINING)
    # Some moment after the first checkpoint: a step, a validation or a save.
    wait_until(lambda: (folder / "checkpoints" / "step_000002").exists(), process)
    time.sleep(random.Random(victim).uniform(0.0, 0.3))
    os.kill(rank_process(process.pid, victim), signal.SIGKILL)
    assert process.wait(timeout=60) != 0, "a killed rank ends the job"
    reached = len([row for row in trained(folder) if "train/loss" in row])
    done = finish(words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert trained(folder) == trained(whole), f"killed when {reached} steps were logged"
    assert not list((folder / "checkpoints").glob(".*")), "files of a killed save are removed"


def wait_until(condition: Callable[[], bool], process: fork_server.Process, seconds: float = 120) -> None:
    """Poll, and fail early where the process has ended."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended before the kill"
        assert time.monotonic() < end
        time.sleep(0.01)


def rank_process(parent: int, rank: int) -> int:
    """Process number of one of two ranks, which are started one after the other, each as the head of a session."""
    children = [child.pid for child in psutil.Process(parent).children()]
    ranks = sorted(child for child in children if os.getsid(child) == child)
    assert len(ranks) == 2
    return ranks[rank]
