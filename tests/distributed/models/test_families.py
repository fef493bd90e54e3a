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

from nemo_kto.distributed.state import Layout
from tests.families import TRAJECTORIES
from tests.helpers import lora_jobs
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


def decayed(folder: Path) -> set[str]:
    """On a rank: names of the weights that weight decay applies to."""
    chunks, _ = lora_jobs.build(folder, Layout(), distributed=False)
    groups = lora_jobs.optimizer_of(chunks, distributed=False).param_groups
    found = {id(each) for group in groups if group["wd_mult"] > 0 for each in group["params"]}
    return {name for name, parameter in chunks[0].named_parameters() if id(parameter) in found}


@pytest.mark.parametrize("family", ["cohere", "olmo2"])
def test_norms_have_no_weight_decay(family: str, ranks: RankPool, tiny_checkpoint: Callable[..., Path]) -> None:
    """Neither those with a weight for each head, which are matrices."""
    (found,) = ranks.run(1, decayed, tiny_checkpoint(family))
    assert any("linear_qkv.weight" in name for name in found)
    assert [name for name in found if "norm" in name] == []
