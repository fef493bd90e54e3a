"""numerics.md, point 5: a resumed run has the same losses, bitwise at its layout.

In the quick matrix only from one rank, over the end of an epoch; test_elastic.py resumes at other layouts.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nemo_kto.model_files.checkpoint_files import find_checkpoints
from tests.helpers.consumed_rows import train_and_record
from tests.helpers.job_cache import CHECKPOINTS, JobCache
from tests.helpers.rank_pool import RankPool
from tests.helpers.training_jobs import train, trajectory
from tests.unit.model_files.test_checkpoint_files import flip

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one_rank": (1, []),
    "tp2": (2, ["model.tensor_model_parallel_size=2"]),
    "pp2": (2, ["model.pipeline_model_parallel_size=2"]),
    "pp2_vp2": (
        2,
        ["model.pipeline_model_parallel_size=2", "model.virtual_pipeline_model_parallel_size=2", "model.micro_batch_size=2"],
    ),
    "dp2": (2, []),
    "dp2_replicated_optimizer": (2, ["model.optim.use_distributed_optimizer=false"]),
    "dp2_bf16": (2, ["trainer.precision=bf16-forced"]),
    "cp2_dp2": (4, ["model.context_parallel_size=2"]),
}


def losses(folder: Path) -> list[dict[str, float]]:
    """Every logged figure of training that is not a time."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name.startswith("train/")} for row in rows if "train/loss" in row]


@pytest.mark.parametrize("layout", [pytest.param(each, marks=[pytest.mark.full] * (each != "one_rank")) for each in LAYOUTS])
def test_resumes_bitwise(
    layout: str, jobs: JobCache, ranks: RankPool, deep_llama: Path, kto_rows: Path, tmp_path: Path
) -> None:
    """A damaged checkpoint after the one that the run is resumed from is replaced."""
    world_size, overrides = LAYOUTS[layout]
    overrides = [*overrides, *CHECKPOINTS]
    whole = jobs("kto", layers=4, overrides=overrides, world_size=world_size, run=train_and_record)
    resumed = Path(shutil.copytree(whole, tmp_path / "resumed"))
    shutil.rmtree(resumed / "checkpoints/step_000003")
    flip(next((resumed / "checkpoints/step_000002/state").glob("*.distcp")))
    ranks.run(world_size, train, deep_llama, kto_rows, resumed, world_size, overrides)
    assert losses(resumed) == losses(whole)
    assert [row["train/consumed_samples"] for row in losses(resumed)] == [16.0, 32.0, 48.0]
    assert [checkpoint.step for checkpoint in find_checkpoints(resumed / "checkpoints")] == [1, 2, 3]
    assert len(list((resumed / "checkpoints").iterdir())) == 3


def test_retained_checkpoints(ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path) -> None:
    overrides = [
        *("trainer.kto.max_steps=4", "trainer.kto.save_interval=1", "trainer.kto.val_check_interval=1"),
        *(f"exp_manager.checkpoint_callback_params.{each}" for each in ("save_top_k=2", "mode=max")),
        "exp_manager.checkpoint_callback_params.monitor=val_rewards_margin",
    ]
    leftover = tmp_path / "checkpoints" / ".writing-step_000001" / "state"
    leftover.mkdir(parents=True)
    (leftover / "half").write_text("cut short")
    ranks.run(1, train, tiny_llama, kto_rows, tmp_path, 1, overrides)
    rows = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    margins = {row["step"]: row["val/rewards_margin"] for row in rows if "val/rewards_margin" in row}
    assert len(set(margins.values())) == 4
    kept = sorted([*sorted([1, 2, 3], key=lambda step: -margins[step])[:2], 4])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [f"step_{step:06d}" for step in kept]


def test_a_checkpoint_can_be_the_pretrained_model(saved_run: Path, ranks: RankPool, kto_rows: Path, tmp_path: Path) -> None:
    overrides = ["model.tensor_model_parallel_size=2", "trainer.kto.max_steps=1", "trainer.kto.limit_val_batches=0"]
    ranks.run(2, train, saved_run / "checkpoints" / "step_000003", kto_rows, tmp_path, 2, overrides)
    (first,), before = trajectory(tmp_path), trajectory(saved_run)[0]
    assert first["train/loss"] == pytest.approx(0.5, abs=1e-6), "the reference is the initial model"
    logps = ("train/logps_chosen_mean", "train/logps_rejected_mean")
    assert max(abs(first[name] - before[name]) for name in logps) > 0.1, "it was trained"
