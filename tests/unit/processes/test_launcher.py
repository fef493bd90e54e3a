"""Handling of ended ranks and of signals in the launcher."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from nemo_kto.errors import UserError
from nemo_kto.processes import launcher
from tests.helpers.messages import Message


def failure_of(rank: int, status: int, ended: int) -> Any:
    process: Any = SimpleNamespace(returncode=status)
    return launcher._Rank(number=rank, process=process, error_file="/nowhere", ended_ns=ended * 10**9)


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([failure_of(0, 1, 20), failure_of(1, 1, 10)], 1),  # who came first
        ([failure_of(0, 1, 10), failure_of(1, -9, 30)], 1),  # who was killed is noticed late
        ([failure_of(0, 1, 10), failure_of(1, 2, 30)], 1),  # the rank with an error message
        ([failure_of(0, -15, 5), failure_of(1, 1, 30)], 1),  # who was ended because of another
        ([failure_of(0, 1, 10), failure_of(1, 0, 30)], 1),  # who ended in the middle of the run
    ],
)
def test_the_failure_that_caused_the_others(failures: list[Any], rank: int) -> None:
    assert launcher._first(failures).number == rank


def test_failures_within_one_second_are_ordered_by_their_files(tmp_path: Path) -> None:
    failures = [failure_of(0, 1, 10), failure_of(1, 1, 10)]
    for failure, moment in zip(failures, (10.9, 10.8), strict=True):
        file = tmp_path / str(failure.number)
        file.write_text("why")
        os.utime(file, (moment, moment))
        failure.error_file = str(file)
    assert launcher._first(failures).number == 1


@pytest.mark.parametrize(
    ("exitcode", "status", "text"),
    [
        (-9, 1, Message("1", "4", "SIGKILL", "other")),
        (-11, 1, Message("1", "4", "SIGSEGV", "other")),
        (7, 7, Message("1", "4", "7", "other")),
        (2, 2, ""),
        (0, 1, Message("1", "4", "0", "callback", "other")),
    ],
)
def test_the_report_of_a_failure(exitcode: int, status: int, text: str) -> None:
    assert launcher._report(failure_of(1, exitcode, 0), 4) == (status, text)


CONFIRM = "import os, subprocess; from nemo_kto.processes import ranks; os.environ['RANK'] == '0' and ranks.confirm_end()"


def test_without_a_loopback_interface_no_rank_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: dict[str, list[Any]] = {"lo": [], "eth0": [SimpleNamespace(address="192.0.2.2")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    with pytest.raises(UserError) as refused:
        launcher.spawn_ranks(2, ["-c", "print('started')"], stop_signals=[])
    assert str(refused.value) == Message("127.0.0.1", "none", "trainer.devices=1")


def test_output_input_and_status_of_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    code = f"""
{CONFIRM}
import sys
os.write(1, open(os.environ["NEMO_KTO_OBJECTS_FILE"], "rb").read() + b"\\n")
print("é" * 100_000, file=sys.stderr)
sys.exit(int(os.environ["RANK"]) * 7)
"""
    printed = list[str]()
    with pytest.raises(launcher.RanksEnded) as ended:
        launcher.spawn_ranks(2, ["-c", code], stop_signals=[], payload=b"for the ranks", output=printed.append)
    assert (ended.value.status, ended.value.received) == (7, frozenset())
    assert str(ended.value) == Message("1", "2", "7", "other")
    text = "".join(printed)
    assert (text.count("for the ranks\n"), text.count("é")) == (2, 200_000)
    assert capfd.readouterr() == ("", "")


def test_a_rank_must_confirm_its_end() -> None:
    with pytest.raises(launcher.RanksEnded) as ended:
        launcher.spawn_ranks(2, ["-c", CONFIRM], stop_signals=[])
    assert (ended.value.status, str(ended.value)) == (1, Message("1", "2", "0", "callback", "other"))


def test_processes_left_by_a_rank_are_ended_and_others_are_not(tmp_path: Path) -> None:
    """A script may start a TensorBoard before its training, or ranks in another thread."""
    go, printed = tmp_path / "go", list[str]()
    waiting = f"{CONFIRM}\nimport time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)"
    leave = "print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, {}).pid)\n"
    leaving = f"{CONFIRM}\n" + "".join(map(leave.format, ("start_new_session=False", "start_new_session=True", "env={}")))
    here = psutil.Process()
    before = set(here.children(recursive=True))
    with ThreadPoolExecutor() as pool, subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL) as other:
        slow = pool.submit(launcher.spawn_ranks, 1, ["-c", waiting], stop_signals=[])
        while len(set(here.children()) - before) < 2:
            time.sleep(0.01)
        launcher.spawn_ranks(1, ["-u", "-c", leaving], stop_signals=[], output=printed.append)
        spared = set(here.children(recursive=True)) - before
        go.touch()
        slow.result()
        other.kill()
    left = list(map(int, "".join(printed).split()))
    assert len(left) == 3
    assert len(spared) == 2, "the other process and the rank of the other run"
    assert not spared & {psutil.Process(pid) for pid in left if psutil.pid_exists(pid)}
    assert not set(here.children(recursive=True)) - before, "no zombies"


def test_ranks_find_the_package_where_their_launcher_found_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package may be in the working directory, as with ``python -m`` in a checkout that is not installed."""
    root = str(Path(launcher.__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setattr(sys, "path", [root, "/mine"])
    assert launcher._search_path() == {"PYTHONPATH": f"{root}:/mine"}
    monkeypatch.setattr(sys, "path", ["/usr/bin", root])
    assert launcher._search_path() == {}
