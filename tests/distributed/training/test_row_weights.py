"""A row of weight 2 counts twice in the sum of the losses, from the file to the gradient."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_pairs, make_rows, write_rows
from tests.helpers.training_jobs import train, trajectory

# A loss with z0 would see another batch of KL examples: its gradient is in test_gradients.py.
JOBS: dict[str, tuple[list[dict[str, Any]], list[str], float]] = {
    "kto": (make_rows(8), ["model.kto.preference_loss=apo_zero_unpaired"], 0.5),
    "dpo": (make_pairs(8), ["model.dpo.sft_loss_weight=0.1"], math.log(2)),
}


@pytest.mark.parametrize(
    ("algorithm", "world_size"),
    [("kto", 1), ("dpo", 1), *(pytest.param(algorithm, 2, marks=pytest.mark.full) for algorithm in JOBS)],
)
def test_a_row_of_weight_2_counts_twice(
    algorithm: str, world_size: int, ranks: RankPool, tiny_llama: Path, tmp_path: Path
) -> None:
    rows, overrides, first_loss = JOBS[algorithm]
    forms = {"weighted": [rows[0], {**rows[1], "weight": 2}, *rows[2:]], "repeated": [*rows[:2], *rows[1:]]}
    steps = {}
    for name, form in forms.items():
        file = write_rows(tmp_path / f"{name}.jsonl", form)
        run = [*overrides, f"trainer.{algorithm}.max_steps=1", f"model.global_batch_size={len(form)}"]
        run += ["model.data.splits_string=null", "model.micro_batch_size=2", f"trainer.{algorithm}.limit_val_batches=0"]
        ranks.run(world_size, train, tiny_llama, file, tmp_path / name, world_size, run, algorithm)
        (steps[name],) = trajectory(tmp_path / name)
    weighted, repeated = steps["weighted"], steps["repeated"]
    for figure in ("train/loss", "train/grad_norm"):
        assert 8 * weighted[figure] == pytest.approx(9 * repeated[figure], rel=1e-5), figure
    assert weighted["train/preference_loss"] == pytest.approx(first_loss, abs=1e-6), "metrics have no weights"
    if algorithm == "kto":
        assert weighted["train/loss"] == pytest.approx(first_loss * 9 / 8, abs=1e-6)
