"""Three steps of every preference loss equal tests/data/golden.json, which tests/distributed/golden.py writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import golden
from tests.helpers.rank_pool import RankPool
from tests.helpers.training_jobs import assert_same

# With AVX-512, AVX2 only and SSE only, values differ by up to 1.6e-5.
TOLERANCE = 1e-4


# One of each kind: with z0, with delta, without KL examples, without a reference, with given rewards, sorted.
QUICK = "kto-kto kto-bco kto-apo_zero_unpaired dpo-dpo dpo-ipo dpo-orpo dpo-rpo_bwd_kl dpo-aot_unpaired".split()


@pytest.mark.parametrize(
    ("algorithm", "loss"),
    [pytest.param(*loss, marks=[pytest.mark.full] * ("-".join(loss) not in QUICK)) for loss in golden.LOSSES],
)
def test_three_steps(algorithm: str, loss: str, ranks: RankPool, tmp_path: Path) -> None:
    name = f"{algorithm}-{loss}"
    (logged,) = ranks.run(1, golden.train_with_each, tmp_path, [(algorithm, loss)])
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
