"""A lock is held by one process and becomes free when the process or its machine is gone."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.utils import files, locks
from nemo_kto.utils.files import publish_file
from nemo_kto.utils.locks import certain_holder, locked, one_writer, owner_file, this_process
from tests.helpers.messages import Message


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"HEARTBEAT": 0.05, "GONE": 0.3, "KERNEL": 0.6, "_POLL": 0.01, "_GRACE": 0.1}.items():
        monkeypatch.setattr(locks, f"{name}_SECONDS", seconds)


@contextlib.contextmanager
def other_process(action: Callable[[Callable[[], None]], None]) -> Iterator[int]:
    """A process that runs ``action``; the block starts when it calls its argument. It is killed at the end."""
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        with contextlib.suppress(BaseException):
            action(lambda: (os.write(tell, b"."), None)[1])
        os._exit(0)
    os.read(ready, 1)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def kill(pid: int) -> None:
    """Kill a child and wait until it has ended: on a busy machine it may send another heartbeat before."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def holder(file: Path, released: int | None = None) -> Callable[[Callable[[], None]], None]:
    """Holds the lock until it is killed, or until the pipe ``released`` has a byte."""

    def hold(ready: Callable[[], None]) -> None:
        with locked(file, when_held=lambda who: None):
            ready()
            time.sleep(60) if released is None else os.read(released, 1)

    return hold


class HeldError(Exception):
    """The error of a caller that does not wait."""


def refuse(who: str) -> None:
    raise HeldError(who)


def taken(file: Path) -> str | None:
    """The owner of the lock, or None."""
    try:
        with locked(file, when_held=refuse):
            return None
    except HeldError as error:
        return str(error)


def test_a_second_process_is_refused_with_the_owner_of_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "99")
    monkeypatch.setattr(locks.time, "time", lambda: 1.7e9)
    with other_process(holder(tmp_path / "lock")) as pid:
        owners = taken(tmp_path / "lock")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "lock.owner"]
    assert owners == f"process {pid} on {this_process().host} (SLURM job 99) since 2023-11-14 22:13:20 UTC"
    assert taken(tmp_path / "lock") is None, "the kernel frees the lock of a killed process"
    assert list(tmp_path.iterdir()) == [], "a normal end leaves no files"


def test_the_holder_of_a_lock_is_certain_only_while_the_kernel_says_so(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    assert certain_holder(file) is None
    with other_process(holder(file)) as pid:
        owner = certain_holder(file)
        assert owner is not None
        assert owner.pid == pid
        for other in ({"machine": "another"}, {"pid": 2**22 + 1}, {"pid": "../self"}):  # a container has its own numbers
            owner_file(file).write_text(json.dumps({**vars(owner), **other}))
            assert certain_holder(file) is None
        owner_file(file).write_text(json.dumps(vars(owner)))
        kill(pid)
        assert certain_holder(file) is None, "nobody has to wait for a killed process"
    assert taken(file) is None


def test_a_waiting_process_gets_the_released_lock(tmp_path: Path) -> None:
    owners: list[str] = []
    released, release = os.pipe()

    def on_wait(who: str) -> None:
        owners.append(who)
        os.write(release, b".")

    with other_process(holder(tmp_path / "lock", released)) as pid:
        with locked(tmp_path / "lock", when_held=on_wait):
            assert json.loads(owner_file(tmp_path / "lock").read_text())["pid"] == os.getpid()
        assert [who.split(" on ")[0] for who in owners] == [f"process {pid}"]


def test_a_forked_child_does_not_hold_the_lock(tmp_path: Path) -> None:
    def hold_and_fork(ready: Callable[[], None]) -> None:
        with locked(tmp_path / "lock", when_held=refuse):
            if os.fork():
                ready()
            time.sleep(60)

    with other_process(hold_and_fork) as pid:
        kill(pid)
        assert taken(tmp_path / "lock") is None


def owned_elsewhere(file: Path) -> Path:
    owner = {**vars(this_process()), "host": "node7", "pid": 5, "machine": "another", "job": None, "since": 1.7e9}
    owner_file(file).write_text(json.dumps(owner))
    return owner_file(file)


NODE7 = "process 5 on node7 since 2023-11-14 22:13:20 UTC"


def test_a_lock_without_heartbeat_is_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "lock"
    owner = owned_elsewhere(file)
    with caplog.at_level(logging.INFO, "nemo_kto"):
        assert taken(file) is None
    assert caplog.messages == [
        Message(f"{owner}", "5", "node7", "2023-11-14", "22:13:20", "UTC"),
        Message(f"{file}", "5", "node7", "2023-11-14", "22:13:20", "UTC", "taken"),
    ]


def test_a_heartbeat_holds_the_lock_without_kernel_support(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "GONE_SECONDS", 60.0)  # a busy machine may not run the other process for a while
    owner = owned_elsewhere(tmp_path / "lock")

    def beat(ready: Callable[[], None]) -> None:
        ready()
        while True:
            os.utime(owner)
            time.sleep(0.05)

    with other_process(beat):
        assert taken(tmp_path / "lock") == NODE7


def test_a_lock_of_a_dead_machine_kept_by_a_server(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with other_process(holder(file)) as pid:
        os.kill(pid, signal.SIGSTOP)
        owned_elsewhere(file)
        assert taken(file) == Message(NODE7, f"remove {file}")
        file.unlink()
        assert taken(file) is None


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks.fcntl, "lockf", no_locks)
    with other_process(holder(tmp_path / "lock")) as pid:
        with monkeypatch.context() as patient:
            patient.setattr(locks, "GONE_SECONDS", 60.0)
            assert (taken(tmp_path / "lock") or "").startswith(f"process {pid} on ")
        kill(pid)
        assert taken(tmp_path / "lock") is None


@pytest.mark.parametrize("text", ["", "\0\1", "[" * 10_000])
def test_an_owner_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    file = tmp_path / "lock"
    owner_file(file).write_text(text)
    assert taken(file) is None
    with other_process(holder(file)):
        owner_file(file).write_text(text)
        assert taken(file) == "another process"


def test_a_replaced_owner_file_is_not_removed(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with locked(file, when_held=refuse):
        owned_elsewhere(file)
    assert file.exists()
    assert json.loads(owner_file(file).read_text())["host"] == "node7"


def test_two_writers_of_a_cached_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(ready: Callable[[], None]) -> None:
        with one_writer(tmp_path / "rows.arrow", private=True):
            ready()
            time.sleep(60)

    with other_process(write) as pid:
        who = f"process {pid} on {this_process().host}"
        warn = locks.logger.warning

        def end_writer(*message: Any) -> None:
            warn(*message)
            os.kill(pid, signal.SIGKILL)

        monkeypatch.setattr(locks.logger, "warning", end_writer)
        with one_writer(tmp_path / "rows.arrow", private=True):
            modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert [text.split(" since ")[0] for text in caplog.messages] == [f"waiting for {who}"]
    assert caplog.messages[0].endswith(f", which writes {tmp_path / 'rows.arrow'}")
    assert modes == {".rows.arrow.lock": 0o600, ".rows.arrow.lock.owner": 0o600}


@pytest.mark.parametrize("stage", ["while it is written", "before it has its name"])
def test_a_killed_writer_keeps_the_old_file_and_the_next_one_cleans_up(stage: str, tmp_path: Path) -> None:
    target = tmp_path / "rows.arrow"
    (tmp_path / ".rows.arrow-mine").touch()
    target.write_text("before")

    def write(ready: Callable[[], None]) -> None:
        def end(path: Path) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        with one_writer(target, private=True), publish_file(target, private=True) as writing:
            ready()
            writing.write_text("half")
            if stage == "while it is written":
                end(writing)
            files.flush = end

    with other_process(write) as pid:
        os.waitpid(pid, 0)
    assert target.read_text() == "before"
    left = [path for path in tmp_path.iterdir() if path.name.startswith(".rows.arrow-") and len(path.name) > 40]
    assert [path.read_text() for path in left] == ["half"]
    with one_writer(target, private=True):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"rows.arrow", ".rows.arrow-mine"}


def test_a_cache_without_a_lock_is_still_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ".rows.arrow.lock").mkdir()
    with one_writer(tmp_path / "rows.arrow", private=True):
        pass
    assert caplog.messages == [Message(f"{tmp_path / 'rows.arrow'}", "lock")]
