from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(max_ranks=8)
    yield pool
    pool.close()
