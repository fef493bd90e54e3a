"""Handling of ended ranks and of signals in the launcher."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from nemo_kto.errors import UserError
from nemo_kto.processes import launcher
from tests.helpers import fork_server
from tests.helpers.commands import environment
from tests.helpers.messages import Message, assert_names


def failure_of(rank: int, status: int, ended: int) -> Any:
    process: Any = SimpleNamespace(returncode=status)
    return launcher._Rank(number=rank, process=process, error_file="/nowhere", confirmed=True, ended_ns=ended * 10**9)


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


class Address:
    def __init__(self, address: str) -> None:
        self.address = address


def test_without_a_loopback_interface_no_rank_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [], "eth0": [Address("192.0.2.2")]})
    with pytest.raises(UserError) as refused:
        launcher.spawn_ranks(2, ["-c", "print('started')"], stop_signals=[])
    assert str(refused.value) == Message("127.0.0.1", "none", "trainer.devices=1")


def test_what_the_ranks_print_and_read(capfd: pytest.CaptureFixture[str]) -> None:
    code = """
import os, sys
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


def launch(folder: Path, rank: str, before: str = "", after: str = "") -> subprocess.CompletedProcess[str]:
    """A process that starts one rank with this code, in a folder with a separate temporary folder."""
    (folder / "tmp").mkdir()
    (folder / "rank.py").write_text(textwrap.dedent(rank))
    code = f"""
import os, subprocess, sys, tempfile, time
import psutil
from nemo_kto.processes import launcher
tempfile.tempdir = None  # what another process has found does not count
{before}
try:
    launcher.spawn_ranks(1, ["rank.py"], stop_signals=[])
except launcher.RanksEnded as end:
    print(f"nemo-kto: {{end.message}}", file=sys.stderr)
    raise SystemExit(end.status)
{after}
"""
    env = environment() | {"TMPDIR": str(folder / "tmp")}
    return fork_server.run(["-c", code], cwd=folder, env=env, preload=["nemo_kto.processes.launcher"], timeout=100)


def test_processes_not_started_by_a_rank_are_not_ended(tmp_path: Path) -> None:
    """An example is a TensorBoard that a script starts before its training."""
    before = """
other = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
while not (children := psutil.Process(other.pid).children()):
    time.sleep(0.01)
"""
    after = """
spared = [one for one in (psutil.Process(other.pid), *children) if one.is_running() and one.status() != "zombie"]
print("spared", len(spared))
for one in spared:
    one.kill()
"""
    leave = "print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, {}).pid)\n"
    ways = ("start_new_session=False", "start_new_session=True", "env={}")
    done = launch(tmp_path, "import subprocess\n" + "".join(map(leave.format, ways)), before, after)
    assert (done.returncode, done.stderr) == (0, "")
    *left, spared = done.stdout.splitlines()
    assert spared == "spared 2"
    assert len(left) == len(ways)
    assert not [pid for pid in map(int, left) if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


def test_ranks_do_not_need_the_temporary_folder(tmp_path: Path) -> None:
    """A folder there could be cleaned while a long run needs it, and would stay behind a launcher that is killed."""
    rank = """
    import os, shutil
    from nemo_kto.errors import UserError
    from nemo_kto.processes import ranks

    print(os.listdir(os.environ["TMPDIR"]), flush=True)
    shutil.rmtree(os.environ["TMPDIR"])
    ranks.fail(UserError("model.seed must be another, got 1"), world=ranks.detect_world())
    """
    done = launch(tmp_path, rank)
    assert (done.returncode, done.stdout) == (2, "[]\n")
    assert_names(done.stderr, "nemo-kto: model.seed must be another, got 1\n")


def test_ranks_find_the_package_where_their_launcher_found_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package may be in the working directory, as with ``python -m`` in a checkout that is not installed."""
    root = str(Path(launcher.__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setattr(sys, "path", [root, "/mine"])
    assert launcher._search_path() == {"PYTHONPATH": f"{root}:/mine"}
    monkeypatch.delenv("PYTHONPATH")
    assert launcher._search_path() == {"PYTHONPATH": root}
    monkeypatch.setattr(sys, "path", ["/usr/bin", root])
    assert launcher._search_path() == {}


def test_a_rank_must_confirm_its_end(capfd: pytest.CaptureFixture[str]) -> None:
    confirm = "from nemo_kto.processes import ranks; import os; os.environ['RANK'] == '0' and ranks.confirm_end()"
    with pytest.raises(launcher.RanksEnded) as ended:
        launcher.spawn_ranks(2, ["-c", confirm], stop_signals=[], confirmed=True)
    assert (ended.value.status, str(ended.value)) == (1, Message("1", "2", "0", "callback", "other"))
    launcher.spawn_ranks(1, ["-c", confirm], stop_signals=[], confirmed=True)


def test_runs_in_two_threads_end_neither_each_other_nor_leave_zombies(tmp_path: Path) -> None:
    go, before = tmp_path / "go", set(psutil.Process().children(recursive=True))
    waiting = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)"
    leaving = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(launcher.spawn_ranks, 1, ["-c", waiting], stop_signals=[])
        while len(set(psutil.Process().children()) - before) < 1:
            time.sleep(0.01)
        launcher.spawn_ranks(1, ["-c", leaving], stop_signals=[])
        left = [one.name() for one in set(psutil.Process().children(recursive=True)) - before]
        go.touch()
        slow.result()
    assert left == [psutil.Process().name()], "the rank of the other run"
    assert not set(psutil.Process().children(recursive=True)) - before
