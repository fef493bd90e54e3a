"""Detection of ranks from the environment variables of torchrun and SLURM."""

from __future__ import annotations

import os

import lightning_fabric.utilities.rank_zero  # noqa: F401  (looks for the rank when imported: before a test pretends one)
import pytest

from nemo_kto.processes.ranks import World, detect_world

SRUN = {
    "SLURM_JOB_ID": "31234",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "n[1-2]",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "1",
}


def test_a_single_process() -> None:
    assert detect_world({}) is None


def test_torchrun() -> None:
    assert detect_world(dict(TORCHRUN)) == World(rank=5, size=8, local_rank=1, local_size=4)
    elastic = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}  # set only by torchrun
    assert detect_world(elastic) == World(rank=5, size=8, local_rank=1, local_size=4, sees_same=True)


def test_srun_sets_what_torch_distributed_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    try:
        assert detect_world() == World(rank=3, size=4, local_rank=1, local_size=None)
        got = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    finally:
        for name in (*TORCHRUN, "SLURM_NTASKS_PER_NODE"):
            os.environ.pop(name, None)
    assert got == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "16234"}


def test_torchrun_inside_an_srun_step_comes_first() -> None:
    assert detect_world({**SRUN, **TORCHRUN}) == World(rank=5, size=8, local_rank=1, local_size=4)


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": None},  # the batch script itself: it has a PROCID and the job's NTASKS
        {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
        {"SLURM_STEP_NUM_TASKS": "1"},  # a step of one task in a job of four
        {"SLURM_PROCID": None},
    ],
)
def test_slurm_variables_without_srun(changes: dict[str, str | None]) -> None:
    environment = {name: value for name, value in {**SRUN, **changes}.items() if value is not None}
    assert detect_world(environment) is None
    assert "RANK" not in environment
