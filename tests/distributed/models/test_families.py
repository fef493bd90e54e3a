"""numerics.md, point 2, for other model families: one trajectory on one rank, and at TP2xPP2.

The differences from llama may cause errors: norms of queries and keys of all heads, which ranks have a part of each
(olmo2); norms after attention and MLP, soft caps, embeddings that are scaled and tied over two stages (gemma2, gemma3_text);
windows and rotations that change from layer to layer, whatever stage it is on (gemma3_text, smollm3); fused weights, whose
heads are rotated in part (phi3). Mixtures are in test_experts.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.families import TRAJECTORIES
from tests.helpers.rank_pool import RankPool
from tests.helpers.training_jobs import assert_same, length, train, trajectory

TP2_PP2 = ["model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2"]
QUICK = "gemma3_text"


@pytest.mark.parametrize(
    ("family", "steps"), [(QUICK, 2), *(pytest.param(family, 10, marks=pytest.mark.full) for family in TRAJECTORIES)]
)
def test_same_trajectory(
    family: str, steps: int, ranks: RankPool, tiny_checkpoint: Callable[..., Path], kto_rows: Path, tmp_path: Path
) -> None:
    model, given = tiny_checkpoint(family, **TRAJECTORIES[family]), length("kto", steps)
    for name, world_size, layout in (("one_rank", 1, []), ("tp2_pp2", 4, TP2_PP2)):
        ranks.run(world_size, train, model, kto_rows, tmp_path / name, world_size, [*layout, *given])
    ours, expected = (trajectory(tmp_path / name) for name in ("tp2_pp2", "one_rank"))
    assert expected[-1]["val/rewards_margin"] > 0.05, "the policy must move, or equality proves nothing"
    assert ours != expected, "computed and rounded differently"
    assert_same(ours, expected, steps=steps)
