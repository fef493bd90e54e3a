"""The command line as a user types it: a whole job, killed at some moment and started again, and its export."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.integration.commands import CLI, REPOSITORY, environment, run

EXAMPLE = [sys.executable, str(REPOSITORY / "examples/nlp/gpt/train_gpt_kto.py")]


def overrides(model: Path, rows: Path, folder: Path, ranks: int) -> list[str]:
    """The command line of the contract, and a job small enough for a test."""
    return [
        f"pretrained_checkpoint.restore_from_path={model}",
        "model.kto.ref_policy_kl_penalty=0.1",
        "model.kto.desirable_loss_weight=1.0",
        "model.kto.undesirable_loss_weight=1.0",
        "model.peft.peft_scheme=none",
        f"model.data.data_prefix={rows}",
        'model.data.splits_string="80,20,0"',
        f"model.data.cache_dir={rows.parent / 'cache'}",
        f"exp_manager.explicit_log_dir={folder}",
        f"trainer.devices={ranks}",
        "trainer.accelerator=cpu",
        "trainer.precision=32",
        "trainer.kto.max_epochs=3",
        "trainer.kto.val_check_interval=0.5",
        "trainer.kto.save_interval=2",
        "model.global_batch_size=8",
        "model.data.seq_length=64",
        "model.optim.lr=5e-4",
        "model.optim.sched.warmup_steps=2",
    ]


def trained(folder: Path) -> list[dict[str, float]]:
    """What was logged of each step, without the times."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if name.startswith(("train/", "val/", "step"))}
        for row in rows
        if "timing/checkpoint" not in row
    ]


@pytest.fixture(scope="module")
def whole(tiny_llama: Path, kto_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of two ranks that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = run([*EXAMPLE, *overrides(tiny_llama, kto_rows, folder, 2)], cwd=folder.parent, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"aligned model in Hugging Face format: {folder / 'hf'}" in done.stdout
    return folder


def test_the_job_of_the_contract(whole: Path, tiny_llama: Path) -> None:
    steps = [row for row in trained(whole) if "train/loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 28))  # 77 rows for training: 9 batches of 8, three times
    assert steps[0]["train/loss"] == pytest.approx(0.5, abs=1e-6)
    assert steps[0]["train/lr"] == pytest.approx(5e-4 / 2)
    assert [row["step"] for row in trained(whole) if "val/loss" in row] == [4, 8, 12, 16, 20, 24, 27]
    assert {row["val/rows"] for row in trained(whole) if "val/loss" in row} == {19.0}, "the incomplete batch counts too"
    kept = {path.name for path in (whole / "checkpoints").iterdir()}
    assert "step_000027" in kept
    assert len(kept) == 4
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


def test_export_of_a_checkpoint_equals_the_export_of_the_run(whole: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    done = run([*CLI, "export", str(whole), str(tmp_path / "again")], cwd=tmp_path, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    (ours,), (theirs,) = ((folder.glob("*.safetensors")) for folder in (tmp_path / "again", whole / "hf"))
    first, second = load_file(ours), load_file(theirs)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_and_started_again(victim: int, whole: Path, tiny_llama: Path, kto_rows: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [*EXAMPLE, *overrides(tiny_llama, kto_rows, folder, 2)]
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=output, stderr=subprocess.STDOUT)
    # Some moment after the first checkpoint: a step, a validation or a save.
    wait_until(lambda: (folder / "checkpoints" / "step_000002").exists(), process)
    time.sleep(random.Random(victim).uniform(0.0, 4.0))
    pid = rank_process(process.pid, victim)
    os.kill(pid, signal.SIGKILL)
    assert process.wait(timeout=60) != 0, "a rank that dies takes the job down"
    reached = len([row for row in trained(folder) if "train/loss" in row])
    done = run(command, cwd=tmp_path, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    assert trained(folder) == trained(whole), f"killed when {reached} steps were logged"
    assert not list((folder / "checkpoints").glob(".*")), "what a killed save leaves is cleared away"


def wait_until(condition, process: subprocess.Popen[bytes], seconds: float = 120) -> None:  # type: ignore[no-untyped-def]
    """Poll, and fail early where the process has ended."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended before it was to be killed"
        assert time.monotonic() < end
        time.sleep(0.05)


def rank_process(parent: int, rank: int) -> int:
    """Process number of a rank."""
    for child in psutil.Process(parent).children(recursive=True):
        if child.environ().get("RANK") == str(rank) and "train_gpt_kto" in " ".join(child.cmdline()):
            return child.pid
    raise AssertionError(f"rank {rank} is not there")
