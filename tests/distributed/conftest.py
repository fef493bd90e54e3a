from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.job_cache import JobCache
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_pairs, make_rows, write_rows


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(max_ranks=8)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def jobs(
    ranks: RankPool,
    tiny_checkpoint: Callable[..., Path],
    kto_rows: Path,
    dpo_rows: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> JobCache:
    """Runs of tiny models, shared by the tests of all files and workers."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if hasattr(request.config, "workerinput") else base) / "jobs"
    shared.mkdir(exist_ok=True)
    write_rows(kto_rows.with_name("others.jsonl"), make_rows(23, seed=2))
    write_rows(dpo_rows.with_name("others.jsonl"), make_pairs(23, seed=3))
    return JobCache(ranks, shared, models=tiny_checkpoint, rows={"kto": kto_rows, "dpo": dpo_rows})
