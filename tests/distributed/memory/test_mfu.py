"""Logged model FLOPs utilisation: the number of passes per step. Layouts are compared in test_layouts.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import training_jobs
from tests.helpers.rank_pool import RankPool


def test_flops_of_a_step(ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path) -> None:
    """With samples S and KL examples K: 4 S + 2 K with a live reference, 3 S + K with a cached one, 5 S for BCO."""

    def flops(case: str, *overrides: str) -> float:
        short = ["trainer.kto.max_steps=1", "trainer.kto.limit_val_batches=0", *overrides]
        short.append(f"model.data.cache_dir={tmp_path / 'cache'}")
        ranks.run(1, training_jobs.train_with_known_peak, tiny_llama, kto_rows, tmp_path / case, 1, short, "kto")
        (step,) = training_jobs.flops(tmp_path / case, 1)
        return step

    swap, cached = flops("swap"), flops("cached", "model.reference.mode=cached")
    samples = flops("bco", "model.kto.preference_loss=bco") / 5
    kl_examples = cached - 3 * samples
    assert 0.9 < kl_examples / samples < 1.1, "responses of about the same lengths"
    assert swap == pytest.approx(4 * samples + 2 * kl_examples, rel=1e-9)
