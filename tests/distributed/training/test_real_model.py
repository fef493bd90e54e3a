"""The real SmolLM2, whose nine heads two ranks cannot divide, at TP=2 x PP=2 and on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.rank_pool import RankPool
from tests.helpers.training_jobs import difference, long, train, trajectory

OVERRIDES = [
    long(),
    "model.global_batch_size=4",
    "model.micro_batch_size=2",
    "trainer.kto.limit_val_batches=2",
    "model.data.seq_length=48",
    "model.optim.lr=1e-5",
    "model.kto.ref_policy_kl_penalty=0.1",
    "trainer.kto.val_check_interval=10",
]


@pytest.mark.slow
def test_ten_steps_agree(ranks: RankPool, smollm2: Path, kto_rows: Path, tmp_path: Path) -> None:
    layout = ["model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2"]
    ranks.run(1, train, smollm2, kto_rows, tmp_path / "one", 1, OVERRIDES)
    ranks.run(4, train, smollm2, kto_rows, tmp_path / "four", 4, [*OVERRIDES, *layout])
    one, four = trajectory(tmp_path / "one"), trajectory(tmp_path / "four")
    assert len(one) == len(four) == 10
    assert one[0]["train/loss"] == pytest.approx(0.5, abs=1e-6)
    assert abs(one[-1]["train/loss"] - 0.5) > 0.01, "the policy must move, or equality proves nothing"
    assert (
        max(
            abs(ours["train/loss"] - theirs["train/loss"]) / theirs["train/loss"]
            for ours, theirs in zip(four, one, strict=True)
        )
        < 1e-4
    )
    assert max(difference(ours, theirs) for ours, theirs in zip(four, one, strict=True)) < 1e-3
