"""numerics.md, point 5: a stopped run goes on with the same losses; to the last bit at its layout, close at another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.distributed.jobs import difference, train, trajectory
from tests.distributed.ranks import RankPool

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one_rank": (1, []),
    "tp2": (2, ["model.tensor_model_parallel_size=2"]),
    "pp2": (2, ["model.pipeline_model_parallel_size=2"]),
    "dp2": (2, []),
    "dp2_replicated_optimizer": (2, ["model.optim.use_distributed_optimizer=false"]),
    "dp2_bf16": (2, ["trainer.precision=bf16"]),
}


def losses(folder: Path) -> list[dict[str, float]]:
    """Every logged figure of training that is not a time."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name.startswith("train/")} for row in rows if "train/loss" in row]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_goes_on_to_the_last_bit(layout: str, ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path) -> None:
    world_size, overrides = LAYOUTS[layout]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ranks.run(world_size, train, tiny_llama, kto_rows, whole, world_size, [*overrides, "trainer.kto.save_interval=4"])
    # the same run, ended after step 4: everything later than its checkpoint is taken away
    shutil.copytree(whole, parts)
    for later in ("step_000008", "step_000010"):
        shutil.rmtree(parts / "checkpoints" / later)
    ranks.run(world_size, train, tiny_llama, kto_rows, parts, world_size, [*overrides, "trainer.kto.save_interval=4"])
    assert len(losses(whole)) == 10
    assert losses(parts) == losses(whole)
    assert [row["train/consumed_samples"] for row in losses(parts)] == [16.0 * step for step in range(1, 11)]


@pytest.fixture(scope="module")
def stopped_at_4(
    ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, float]]]:
    """A run on one rank: its folder as it was after step 4, and its whole trajectory."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    ranks.run(1, train, tiny_llama, kto_rows, folder, 1, ["trainer.kto.save_interval=4"])
    steps = trajectory(folder)
    for later in ("step_000008", "step_000010"):
        shutil.rmtree(folder / "checkpoints" / later)
    return folder, steps


OTHERS: dict[str, tuple[int, list[str]]] = {
    "tp2": (2, ["model.tensor_model_parallel_size=2"]),
    "dp2": (2, []),
    "tp2_pp2": (4, ["model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2"]),
}


@pytest.mark.parametrize("layout", OTHERS)
def test_goes_on_at_another_layout(
    layout: str,
    stopped_at_4: tuple[Path, list[dict[str, float]]],
    ranks: RankPool,
    tiny_llama: Path,
    kto_rows: Path,
    tmp_path: Path,
) -> None:
    folder, steps = stopped_at_4
    world_size, overrides = OTHERS[layout]
    shutil.copytree(folder, tmp_path / "run")
    ranks.run(world_size, train, tiny_llama, kto_rows, tmp_path / "run", world_size, overrides)
    ours = trajectory(tmp_path / "run")
    assert len(ours) == len(steps) == 10
    assert difference(ours[4], steps[4]) < 1e-5
    assert max(difference(mine, theirs) for mine, theirs in zip(ours, steps, strict=True)) < 1e-4


def test_what_is_kept(ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path) -> None:
    overrides = [
        "trainer.kto.save_interval=2",
        "trainer.kto.val_check_interval=2",
        "exp_manager.checkpoint_callback_params.save_top_k=2",
        "exp_manager.checkpoint_callback_params.monitor=val_rewards_margin",
        "exp_manager.checkpoint_callback_params.mode=max",
    ]
    leftover = tmp_path / "checkpoints" / ".writing-step_000002" / "state"
    leftover.mkdir(parents=True)
    (leftover / "half").write_text("cut short")
    ranks.run(1, train, tiny_llama, kto_rows, tmp_path, 1, overrides)
    margins = {
        row["step"]: row["val/rewards_margin"]
        for row in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        if "val/rewards_margin" in row
    }
    best = sorted([2, 4, 6, 8], key=lambda step: -margins[step])[:2]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        f"step_{step:06d}" for step in sorted([*best, 10])
    ]


def test_a_checkpoint_is_a_start_of_its_own(ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path) -> None:
    ranks.run(1, train, tiny_llama, kto_rows, tmp_path / "first", 1, [])
    checkpoint = tmp_path / "first" / "checkpoints" / "step_000010"
    ranks.run(2, train, checkpoint, kto_rows, tmp_path / "second", 2, ["model.tensor_model_parallel_size=2"])
    last, first = trajectory(tmp_path / "first")[-1], trajectory(tmp_path / "second")[0]
    assert first["train/loss"] == pytest.approx(0.5, abs=1e-6), "the reference is what the run starts from"
    assert last["val/rewards_margin"] > 0.1
