"""What the launcher makes of the ends of its ranks, and of signals."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from nemo_kto.parallel import launcher
from tests.messages import Message


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
    assert launcher._first(failures).local_rank == rank


def test_failures_within_one_second_are_told_apart_by_their_files(tmp_path: Path) -> None:
    failures = [Failure(0, 1, 10), Failure(1, 1, 10)]
    for failure, moment in zip(failures, (10.9, 10.8), strict=True):
        file = tmp_path / str(failure.local_rank)
        file.touch()
        os.utime(file, (moment, moment))
        failure.error_file = str(file)
    assert launcher._first(failures).local_rank == 1


@pytest.mark.parametrize(
    ("exitcode", "status", "text"),
    [
        (-9, 1, Message("nemo-kto", "1", "4", "SIGKILL", "other")),
        (-11, 1, Message("nemo-kto", "1", "4", "SIGSEGV", "other")),
        (7, 7, Message("nemo-kto", "1", "4", "7", "other")),
        (2, 2, ""),
    ],
)
def test_what_is_said_of_a_failure(exitcode: int, status: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launcher._report(Failure(1, exitcode, 0), 4) == status
    assert capsys.readouterr().err == text


class Address:
    def __init__(self, address: str) -> None:
        self.address = address


def test_without_a_loopback_interface_no_rank_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [], "eth0": [Address("192.0.2.2")]})
    with pytest.raises(SystemExit) as ended:
        launcher.spawn_ranks(2, ["-c", "print('started')"], stop_signals=[])
    assert ended.value.code == 2
    assert capsys.readouterr().err == Message("nemo-kto", "127.0.0.1", "none", "trainer.devices=1")
