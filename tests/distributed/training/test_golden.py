"""Three steps of every preference loss equal tests/data/golden.json, which tests/distributed/golden.py writes."""

from __future__ import annotations

import pytest

from tests.distributed import golden
from tests.helpers.rank_pool import RankPool
from tests.helpers.training_jobs import assert_same

# With AVX-512, AVX2 only and SSE only, values differ by up to 1.6e-5.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def logged(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, golden.Trajectory]:
    """All of them, in one job of one rank."""
    (found,) = ranks.run(1, golden.train_with_each, tmp_path_factory.mktemp("golden"), golden.LOSSES)
    return dict(found)


@pytest.mark.parametrize("name", [f"{algorithm}-{loss}" for algorithm, loss in golden.LOSSES])
def test_three_steps(name: str, logged: dict[str, golden.Trajectory]) -> None:
    expected = golden.read()[name]
    assert len(expected) == golden.STEPS
    assert len({step["train/loss"] for step in expected}) == golden.STEPS
    assert "val/loss" in expected[-1]
    ours = [{figure: found[figure] for figure in step} for found, step in zip(logged[name], expected, strict=True)]
    assert_same(ours, expected, steps=golden.STEPS, first=TOLERANCE)


def test_the_golden_file_has_exactly_the_losses() -> None:
    found = golden.read()
    assert sorted(found) == sorted(f"{algorithm}-{loss}" for algorithm, loss in golden.LOSSES)
    assert max(step["train/kl"] for step in found["kto-kto"]) > 0.01, "a clamped z0 proves nothing"
