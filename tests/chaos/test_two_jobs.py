"""Two jobs on one run folder: one trains, the other is refused and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.chaos.job import Crash, Ended, Job, compare, run

pytestmark = [pytest.mark.slow, pytest.mark.chaos]


def assert_refused(ended: Ended, folder: Path) -> None:
    assert (ended.status, ended.hung, ended.left_running) == (2, False, []), ended.output
    assert str(folder / "run") in ended.last_lines
    assert "Traceback" not in ended.output


def test_a_second_job_is_refused(job: Job, whole: Callable[[Job], Path], tmp_path: Path) -> None:
    over = tmp_path / "second_is_over"
    wait = Crash(point="data", count=5, shell=f"while [ ! -e {over} ]; do sleep 0.05; done")
    with ThreadPoolExecutor() as pool:
        first = pool.submit(run, job, tmp_path, crash=wait)
        while not (tmp_path / "chaos_job" / "fired").exists() and not first.done():
            pass
        try:
            assert_refused(run(job, tmp_path, name="second"), tmp_path)
        finally:
            over.touch()
    assert first.result().status == 0, first.result().output
    assert compare(tmp_path, whole(job)).clean, str(compare(tmp_path, whole(job)))
