"""Two jobs on one run folder: one trains, the other is refused and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.chaos.job import Crash, Job, compare, run

pytestmark = [pytest.mark.slow, pytest.mark.chaos]


def test_a_second_job_is_refused(job: Job, whole: Callable[[Job], Path], tmp_path: Path) -> None:
    over = tmp_path / "second_is_over"
    wait = Crash(point="data", count=5, shell=f"while [ ! -e {over} ]; do sleep 0.05; done")
    with ThreadPoolExecutor() as pool:
        first = pool.submit(run, job, tmp_path, crash=wait)
        while not (tmp_path / "chaos_job" / "fired").exists() and not first.done():
            pass
        try:
            second = run(job, tmp_path, name="second")
        finally:
            over.touch()
    assert (second.status, second.hung, second.left_running) == (2, False, []), second.output
    assert str(tmp_path / "run") in second.last_lines
    assert "Traceback" not in second.output
    assert first.result().status == 0, first.result().output
    assert compare(tmp_path, whole(job)).clean, str(compare(tmp_path, whole(job)))
