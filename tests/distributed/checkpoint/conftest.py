from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.consumed_rows import train_and_record
from tests.helpers.job_cache import CHECKPOINTS, JobCache


@pytest.fixture(scope="session")
def saved_run(jobs: JobCache) -> Path:
    """Folder of a run on one rank with three checkpoints and a record of its rows: to be copied, not changed."""
    return jobs("kto", overrides=CHECKPOINTS, run=train_and_record)
