"""A full or read-only disk: the run reports it and ends, complete files remain, and the same command resumes it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.job import Crash, Job, assert_resumes, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.chaos,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system"),
]
SIZE = "48m"
# Free bytes that are left on the disk.
FILL = "cd {folder} && head -c $(( $(df --output=avail -B1 . | tail -1) - {left} )) /dev/zero > filler || true"


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A separate file system at ``folder``."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def finishing_saves(job: Job) -> Job:
    """The same job, whose earlier checkpoint is complete when the next one begins."""
    return replace(job, overrides=(*job.overrides, "exp_manager.checkpoint_callback_params.async_save=false"))


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


# Name: the point, how often it has been reached, the bytes left, and the checkpoints that there are then.
FULL = {
    "before_a_save": ("checkpoint", 2, 65536, ["step_000002"]),
    "within_a_save": ("save_write_4", 1, 0, ["step_000002", "step_000003"]),
    "within_the_first_save": ("save_write_2", 1, 0, []),
    "within_the_export": ("export_write", 1, 0, ["step_000003", "step_000006"]),
}


@pytest.mark.parametrize("case", FULL)
def test_full_disk(case: str, job: Job, whole: Callable[[Job], Path], tmp_path: Path) -> None:
    point, count, left, kept = FULL[case]
    first = finishing_saves(job) if case == "before_a_save" else job
    with small_disk(tmp_path / "run"):
        fill = Crash(point=point, count=count, shell=FILL.format(folder=tmp_path / "run", left=left))
        ended = run(first, tmp_path, crash=fill)
        assert ended.fired
        assert (ended.status != 0, ended.hung, ended.left_running) == (True, False, []), ended.output
        assert str(tmp_path / "run") in ended.last_lines
        assert re.search("No space left|is free", ended.last_lines), ended.output
        assert checkpoints(tmp_path) == kept, "only complete checkpoints"
        (tmp_path / "run" / "filler").unlink()
        assert_resumes(job, tmp_path, whole(job))


def test_disk_read_only_during_a_save(job: Job, whole: Callable[[Job], Path], tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    with small_disk(folder):
        read_only = Crash(point="checkpoint", count=2, shell=f"mount -o remount,ro {folder}")
        ended = run(finishing_saves(job), tmp_path, crash=read_only)
        assert ended.fired
        assert (ended.status != 0, ended.hung, ended.left_running) == (True, False, []), ended.output
        assert str(folder) in ended.last_lines
        assert "Read-only file system" in ended.last_lines, ended.output
        assert checkpoints(tmp_path) == ["step_000002"]
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
        assert_resumes(job, tmp_path, whole(job))


def test_disk_read_only_from_the_start(job: Job, tmp_path: Path) -> None:
    with small_disk(tmp_path / "run"):
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "run")], check=True)
        ended = run(job, tmp_path)
        assert (ended.status, ended.hung, ended.left_running) == (2, False, []), ended.output
        assert str(tmp_path / "run") in ended.last_lines
        assert "Traceback" not in ended.output
