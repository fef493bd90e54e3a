"""One SLURM cluster for all tests of this folder, a tiny model and rows, and the metrics of an uninterrupted job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.tiny_models import make_checkpoint, make_rows, write_rows
from tests.slurm.cluster import SBATCH, Cluster, Submitted, missing

STEPS = 20
SECONDS = 300  # of one job, on a machine that has other things to do


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(f"no SLURM here: {reason}")
    running = Cluster(folder=tmp_path_factory.mktemp("slurm"))
    yield running
    running.stop()


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the jobs, with ``model`` and ``kto.jsonl``."""
    folder = tmp_path_factory.mktemp("work")
    make_checkpoint(folder / "model", "llama")
    write_rows(folder / "kto.jsonl", make_rows(96))
    return folder


TWO_BY_TWO = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2")
SMALL = (
    "hardware=cpu",
    "model.data.splits_string=null",
    "model.data.cache_dir=cache",
    "model.global_batch_size=4",
    "model.optim.lr=5e-4",
    "export.enabled=false",
    "exp_manager.create_tensorboard_logger=false",
    "export.report=false",
)
LAYOUT = ("model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2")


def kto(*overrides: str) -> list[str]:
    """The job script with its arguments."""
    return [str(SBATCH), "kto", "model", "kto.jsonl", *SMALL, *overrides]


def kto_on_four_ranks(*overrides: str) -> list[str]:
    """The same on both nodes at TP2xPP2, with sbatch's own arguments."""
    return [*TWO_BY_TWO, *kto(*LAYOUT, f"trainer.kto.max_steps={STEPS}", "trainer.kto.save_interval=0", *overrides)]


def metrics(folder: Path) -> list[dict[str, float]]:
    """Logged metrics of each training step that do not depend on the machine."""
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
    steps = [line for line in lines if "train/loss" in line]
    return [{key: value for key, value in step.items() if key == "step" or key.startswith("train/")} for step in steps]


def folder_of(job: Submitted, work: Path) -> Path:
    return work / "results" / f"nemo-kto-{job.number}"


def after_step(job: Submitted, step: int, work: Path) -> None:
    """Wait until the job has taken a number of steps."""
    done = lambda: len(metrics(folder_of(job, work))) >= step  # noqa: E731
    job.wait_until(f"step {step}", done, seconds=SECONDS)


@pytest.fixture(scope="session")
def uninterrupted(cluster: Cluster, work: Path) -> list[dict[str, float]]:
    """The metrics of each step of a job on four ranks."""
    (job,) = cluster.submit(*kto_on_four_ranks(), cwd=work)
    state = job.finish(seconds=SECONDS)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "0"), job.output()
    assert "0:   layout      4 ranks = 1 data x 2 tensor x 2 pipeline parallel" in job.output()
    found = metrics(folder_of(job, work))
    assert [step["step"] for step in found] == [*range(1, STEPS + 1)]
    assert found[0]["train/loss"] == 0.5
    assert found[-1]["train/loss"] != 0.5
    return found
