"""Lines of the sweep file of examples/slurm/train.sbatch, with substitutes for srun and scontrol."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.messages import assert_names
from tests.slurm.cluster import SBATCH


def run_task(folder: Path, line: str, *, task: int = 2) -> tuple[int, list[str] | None, str]:
    """Task ``task`` of a job array whose sweep file has ``line`` as line 2: status, overrides after --, and stderr."""
    (folder / "srun").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {folder}/started\n')
    (folder / "srun").chmod(0o755)
    (folder / "sweep.txt").write_text(f"model.seed=1\n{line}\nmodel.seed=3\n")
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "sweep",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_CPUS_ON_NODE": "1",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": str(task),
        "SWEEP": "sweep.txt",
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    command = ["bash", str(SBATCH), "kto", "model", "rows.jsonl", "--"]
    done = subprocess.run(command, cwd=folder, env=slurm, capture_output=True, text=True, check=False)
    started = folder / "started"
    words = started.read_text().splitlines() if started.exists() else None
    return done.returncode, None if words is None else words[words.index("--") + 1 :], done.stderr


@pytest.mark.parametrize(
    ("line", "overrides"),
    [
        ("model.optim.lr=1e-4", ["model.optim.lr=1e-4"]),
        ("model.seed=2  'model.optim.betas=[0.8, 0.9]' ", ["model.seed=2", "model.optim.betas=[0.8, 0.9]"]),
        ('"exp_manager.name=it\'s" a\\ b=1', ["exp_manager.name=it's", "a b=1"]),
        ("model.seed=2\r", ["model.seed=2"]),
    ],
    ids=["one", "quoted", "quotes in quotes", "carriage return"],
)
def test_sweep_lines_are_split_as_in_a_shell(tmp_path: Path, line: str, overrides: list[str]) -> None:
    assert run_task(tmp_path, line) == (0, overrides, "")


@pytest.mark.parametrize(
    "line", ["model.seed=2 'model.optim.betas=[0.8, 0.9] model.optim.lr=2e-4", 'model.seed=2 "model.optim.lr=2e-4']
)
def test_a_line_with_an_unclosed_quote_is_refused(tmp_path: Path, line: str) -> None:
    status, started, errors = run_task(tmp_path, line)
    assert (status, started) == (2, None)
    assert_names(errors, "sweep.txt:2", line, "quote")
