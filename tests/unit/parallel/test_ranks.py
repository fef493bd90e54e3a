"""Which ranks a process finds itself among, by the environment that torchrun and SLURM leave."""

from __future__ import annotations

import os
from pathlib import Path

import lightning_fabric.utilities.rank_zero  # noqa: F401  (looks for the rank when imported: before a test pretends one)
import psutil
import pytest

from nemo_kto.parallel import ranks
from nemo_kto.parallel.ranks import World, detect_world

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


def test_alone() -> None:
    assert detect_world({}) is None


def test_torchrun() -> None:
    assert detect_world(dict(TORCHRUN)) == World(rank=5, size=8, local_rank=1, local_size=4)


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
def test_slurm_variables_where_srun_started_nothing(changes: dict[str, str | None]) -> None:
    environment = {name: value for name, value in {**SRUN, **changes}.items() if value is not None}
    assert detect_world(environment) is None
    assert "RANK" not in environment


class Failure:
    def __init__(self, rank: int, exitcode: int, timestamp: int) -> None:
        self.local_rank, self.exitcode, self.timestamp = rank, exitcode, timestamp
        self.error_file = "/nowhere"


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([Failure(0, 1, 20), Failure(1, 1, 10)], 1),  # who came first
        ([Failure(0, 1, 10), Failure(1, -9, 30)], 1),  # who was killed is noticed late
        ([Failure(0, 1, 10), Failure(1, 2, 30)], 1),  # who has said what is wrong
        ([Failure(0, -15, 5), Failure(1, 1, 30)], 1),  # who was ended because of another
    ],
)
def test_the_failure_that_caused_the_others(failures: list[Failure], rank: int) -> None:
    assert ranks._first(failures).local_rank == rank


def test_failures_within_one_second_are_told_apart_by_their_files(tmp_path: Path) -> None:
    failures = [Failure(0, 1, 10), Failure(1, 1, 10)]
    for failure, moment in zip(failures, (10.9, 10.8), strict=True):
        file = tmp_path / str(failure.local_rank)
        file.touch()
        os.utime(file, (moment, moment))
        failure.error_file = str(file)
    assert ranks._first(failures).local_rank == 1


@pytest.mark.parametrize(
    ("exitcode", "status", "text"),
    [
        (-9, 1, "nemo-kto: rank 1 of 4 was killed by SIGKILL (out of memory?); the other ranks were ended\n"),
        (-11, 1, "nemo-kto: rank 1 of 4 was killed by SIGSEGV; the other ranks were ended\n"),
        (7, 7, "nemo-kto: rank 1 of 4 ended with status 7; the other ranks were ended. Its error is above.\n"),
        (2, 2, ""),
    ],
)
def test_what_is_said_of_a_failure(exitcode: int, status: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ranks._report(Failure(1, exitcode, 0), 4) == status
    assert capsys.readouterr().err == text


class Address:
    def __init__(self, address: str) -> None:
        self.address = address


def test_without_a_loopback_interface_no_rank_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [], "eth0": [Address("192.0.2.2")]})
    with pytest.raises(SystemExit) as ended:
        ranks.spawn_ranks(2, ["-c", "print('started')"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "nemo-kto: the ranks of one machine need the loopback interface with the address 127.0.0.1, got none; bring it up "
        "(ip link set lo up) or use trainer.devices=1\n"
    )
