"""numerics.md, point 2: one trajectory, whatever the layout, the micro-batch, the recomputation or the optimizer's sharding.

Every case is the whole job: configuration, data, reference, steps, through the builder the command line uses.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.jobs import train
from tests.distributed.ranks import RankPool

STEPS = 10
# What must agree, as the job logs it.
COMPARED = (
    "train/loss",
    "train/kl",
    "train/rewards_chosen_mean",
    "train/rewards_rejected_mean",
    "train/rewards_margin",
    "train/rewards_all_std",
    "train/grad_norm",
    "val/loss",
    "val/kl",
    "val/rewards_margin",
)
LAYOUTS = {
    "tp2": (2, ["model.tensor_model_parallel_size=2"]),
    "tp4": (4, ["model.tensor_model_parallel_size=4"]),
    "pp2": (2, ["model.pipeline_model_parallel_size=2"]),
    "dp2": (2, []),
    "dp2_replicated_optimizer": (2, ["model.optim.use_distributed_optimizer=false"]),
    "dp4": (4, []),
    "tp2_pp2": (4, ["model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2"]),
    "tp2_dp2": (4, ["model.tensor_model_parallel_size=2"]),
    "pp2_dp2": (4, ["model.pipeline_model_parallel_size=2"]),
    "sequence_parallel": (2, ["model.tensor_model_parallel_size=2", "model.sequence_parallel=true"]),
    "sequence_parallel_pp2": (
        4,
        ["model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2", "model.sequence_parallel=true"],
    ),
    "micro_batch_2": (1, ["model.micro_batch_size=2"]),
    "micro_batch_4": (1, ["model.micro_batch_size=4", "model.kto.log_prob_forward_micro_batch_size=3"]),
    "logprob_chunks_of_5": (1, ["model.logprob_chunk_size=5"]),
    "recompute_full": (
        1,
        [
            "model.activations_checkpoint_granularity=full",
            "model.activations_checkpoint_method=uniform",
            "model.activations_checkpoint_num_layers=1",
        ],
    ),
    "recompute_selective": (1, ["model.activations_checkpoint_granularity=selective"]),
}


def trajectory(folder: Path) -> list[dict[str, float]]:
    """What the run logged, one dict a step (training and validation lines of a step together)."""
    steps: dict[int, dict[str, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        steps.setdefault(row["step"], {}).update({name: row[name] for name in COMPARED if name in row})
    return [steps[number] for number in sorted(steps)]


def difference(ours: dict[str, float], theirs: dict[str, float]) -> float:
    """Largest difference, relative to the value or, for values near nothing, to 0.1."""
    assert ours.keys() == theirs.keys()
    return max(abs(ours[name] - theirs[name]) / max(abs(theirs[name]), 0.1) for name in ours)


@pytest.fixture(scope="module")
def one_rank(
    ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, float]]:
    folder = tmp_path_factory.mktemp("one_rank")
    ranks.run(1, train, tiny_llama, kto_rows, folder, 1, [])
    steps = trajectory(folder)
    assert len(steps) == STEPS
    assert steps[0]["train/loss"] == pytest.approx(0.5, abs=1e-6)
    assert steps[0]["train/kl"] == pytest.approx(0.0, abs=1e-6)
    assert all("val/loss" in step for step in steps[4::5])
    assert steps[-1]["val/rewards_margin"] > 0.1, "the policy must move, or equality proves nothing"
    return steps


@pytest.mark.parametrize("case", LAYOUTS)
def test_same_trajectory(
    case: str, one_rank: list[dict[str, float]], ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path
) -> None:
    world_size, overrides = LAYOUTS[case]
    ranks.run(world_size, train, tiny_llama, kto_rows, tmp_path, world_size, overrides)
    steps = trajectory(tmp_path)
    assert len(steps) == STEPS
    assert difference(steps[0], one_rank[0]) < 1e-5
    assert max(difference(ours, theirs) for ours, theirs in zip(steps, one_rank, strict=True)) < 1e-4
