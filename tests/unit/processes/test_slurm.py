"""Requeueing the SLURM job of a run that ends early."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from nemo_kto.processes.ranks import requeue
from tests.helpers.messages import Message


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake scontrol that records its arguments and fails for job 13."""
    file = tmp_path / "scontrol"
    file.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n[ "$2" != 13 ] || {{ echo "Job is pending" >&2; exit 1; }}\n')
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "asked"


ARRAY = {"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize(("environ", "job"), [({"SLURM_JOB_ID": "12"}, "12"), (ARRAY, "12_3")])
def test_the_job_is_requeued(environ: dict[str, str], job: str, scontrol: Path) -> None:
    assert requeue(environ) == job
    assert scontrol.read_text() == f"requeue {job}\n"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Message("trainer.requeue", "SLURM", "none", "SLURM_JOB_ID", "nothing")),
        ({"SLURM_JOB_ID": "13"}, Message("13", "nothing", "requeued")),
    ],
)
def test_a_job_that_cannot_be_requeued_is_a_warning(
    environ: dict[str, str], expected: str, scontrol: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert requeue(environ) is None
    assert [record.getMessage() for record in caplog.records] == [expected]


def test_a_machine_without_scontrol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert requeue({"SLURM_JOB_ID": "12"}) is None
    assert caplog.records[0].getMessage() == Message("scontrol requeue 12", "requeued", "[Errno 2]")
