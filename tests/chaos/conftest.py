from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.job import Job, make_job, run


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job of two data-parallel ranks."""
    return make_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Job], Path]:
    """A job -> the folder in which it ran and nothing happened to it; each runs once."""
    known: dict[Job, Path] = {}

    def get(job: Job) -> Path:
        if job not in known:
            folder = tmp_path_factory.mktemp("whole")
            ended = run(job, folder)
            assert ended.status == 0, ended.output
            known[job] = folder
        return known[job]

    return get
