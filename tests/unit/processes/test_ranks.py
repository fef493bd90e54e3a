"""Ranks: detection from the variables of torchrun and SLURM, requeueing, and the limit on open files."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning_fabric.utilities.rank_zero  # noqa: F401  (looks for the rank when imported: before a test pretends one)
import pytest

from nemo_kto.errors import UserError
from nemo_kto.processes.ranks import MIN_FILES, World, detect_world, explain_open_files, raise_open_files, requeue
from tests.helpers.messages import Message, assert_names
from tests.unit.conftest import FindErrors

SRUN = {
    "SLURM_JOB_ID": "31234", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NODELIST": "n[1-2]",
}  # fmt: skip
TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1",
}  # fmt: skip
FIFTH = World(rank=5, size=8, local_rank=1, local_size=4)


@pytest.mark.parametrize(
    ("environment", "world"),
    [
        ({}, None),
        (TORCHRUN, FIFTH),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, World(**{**vars(FIFTH), "sees_same": True})),  # set only by torchrun
        ({**SRUN, **TORCHRUN}, FIFTH),  # torchrun inside an srun step comes first
        ({**SRUN, "SLURM_STEP_ID": None}, None),  # the batch script itself: it has a PROCID and the job's NTASKS
        ({**SRUN, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}, None),  # srun --pty bash
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, None),  # a step of one task in a job of four
        ({**SRUN, "SLURM_PROCID": None}, None),
    ],
)
def test_position_of_a_process(environment: dict[str, str | None], world: World | None) -> None:
    variables = {name: value for name, value in environment.items() if value is not None}
    assert detect_world(variables) == world
    assert ("RANK" in variables) is (world is not None)


def test_srun_sets_what_torch_distributed_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, "SLURM_NTASKS_PER_NODE"):
        monkeypatch.setenv(name, "")  # so that the values that are set below are removed afterwards
        monkeypatch.delenv(name)
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    assert detect_world() == World(rank=3, size=4, local_rank=1, local_size=None)
    got = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    assert got == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "16234"}


ARRAY = {"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize(
    ("environ", "job", "warning"),
    [
        ({"SLURM_JOB_ID": "12"}, "12", None),
        (ARRAY, "12_3", None),
        ({}, None, Message("trainer.requeue", "SLURM", "none", "SLURM_JOB_ID", "nothing")),
        ({"SLURM_JOB_ID": "13"}, None, Message("13", "nothing", "requeued")),
    ],
)
def test_requeueing_a_slurm_job(
    environ: dict[str, str],
    job: str | None,
    warning: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A substitute for scontrol records its arguments and fails for job 13."""
    file = tmp_path / "scontrol"
    file.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n[ "$2" != 13 ] || {{ echo "Job is pending" >&2; exit 1; }}\n')
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with caplog.at_level(logging.WARNING):
        assert requeue(environ) == job
    assert [record.getMessage() for record in caplog.records] == [warning] * (warning is not None)
    if job is not None:
        assert (tmp_path / "asked").read_text() == f"requeue {job}\n"


def limited(soft: int, hard: int, work: Callable[[], Any]) -> Any:
    """Result of ``work`` in a separate process with these limits on open files."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            for handle in map(int, os.listdir("/proc/self/fd")):  # earlier tests of this process may have left many
                if handle > 2 and handle != writer:
                    with contextlib.suppress(OSError):
                        os.close(handle)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            os.write(writer, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as results:
        answer = results.read()
    os.waitpid(child, 0)
    return json.loads(answer)


def test_a_too_low_limit_is_reported_before_the_start(find_errors: FindErrors) -> None:
    (mistake,) = limited(64, 64, find_errors)
    assert_names(mistake, "ulimit -n", f"at least {MIN_FILES}", "got 64", "ulimit -n 4096")
    assert limited(64, MIN_FILES, find_errors) == []


def test_the_limit_is_raised_to_the_hard_limit() -> None:
    def limits() -> tuple[int, int]:
        raise_open_files()
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    assert limited(100, 1000, limits) == [1000, 1000]


def test_too_few_open_files_are_a_user_error() -> None:
    def open_too_many() -> str:
        opened = []
        try:
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        except OSError as error:
            for handle in opened:
                os.close(handle)
            found = explain_open_files(error)
        assert isinstance(found, UserError)
        return str(found)

    assert_names(limited(200, 200, open_too_many), "ulimit -n", "got 200", "Too many open files", "ulimit -n 4096")


def test_too_many_open_files_are_found_among_the_causes_of_an_error() -> None:
    assert isinstance(explain_open_files(RuntimeError("enforce fail at device.cc:186. Too many open files")), UserError)
    outer = ValueError("a checkpoint cannot be read")
    outer.__cause__ = OSError(errno.EMFILE, "Too many open files")
    assert isinstance(explain_open_files(outer), UserError)
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__context__ = second, first  # a cycle
    assert explain_open_files(first) is first


@pytest.mark.parametrize(
    "start",
    [
        "threading.Thread(target=sys.stdin.read, name='upload_0').start()",
        "ThreadPoolExecutor(thread_name_prefix='upload').submit(sys.stdin.read)",
    ],
)
def test_threads_that_keep_a_finished_rank_are_named(start: str) -> None:
    code = (
        "import sys, threading; from concurrent.futures import ThreadPoolExecutor; from nemo_kto.processes import ranks;"
        f"ranks._THREAD_SECONDS = 0; {start}; ranks.confirm_end()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "RANK": "3"}) as rank:
        assert rank.stdin is not None
        assert rank.stderr is not None
        line = rank.stderr.readline().decode()
        rank.stdin.close()  # the thread ends
        assert rank.wait() == 0
    assert_names(line, "rank 3", "1 thread:", "'upload_0'", "on_fit_end", "daemon=True")
