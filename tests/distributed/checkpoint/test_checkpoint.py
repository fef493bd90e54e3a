"""numerics.md, point 5: a resumed run has the same losses, bitwise at its layout and closely at another layout.

In the quick matrix only from one rank, over the end of an epoch; test_layouts.py resumes at several layouts.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.rank_pool import RankPool
from tests.helpers.training_jobs import difference, long, train, trajectory

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
    "dp2_bf16": (2, ["trainer.precision=bf16"]),
    "cp2_dp2": (4, ["model.context_parallel_size=2"]),
}


# Name of a length: overrides, steps, and the step after which a run is ended. Both go on in the middle of an epoch and over
# its end.
LENGTHS: dict[str, tuple[list[str], int, int]] = {
    "epochs_of_3": (["trainer.kto.limit_train_batches=3", "trainer.kto.save_interval=2"], 5, 2),
    "epochs_of_6": ([long(), "trainer.kto.save_interval=4"], 10, 4),
}


def cases(layouts: dict[str, tuple[int, list[str]]], quick: set[str]) -> list[Any]:
    """Every layout at full length, and some of them at the small one."""
    return [
        *(pytest.param(layout, "epochs_of_3", id=layout) for layout in layouts if layout in quick),
        *(pytest.param(layout, "epochs_of_6", id=f"{layout}-long", marks=pytest.mark.full) for layout in layouts),
    ]


def losses(folder: Path) -> list[dict[str, float]]:
    """Every logged figure of training that is not a time."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name.startswith("train/")} for row in rows if "train/loss" in row]


@pytest.fixture(scope="module")
def whole_run(
    ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """Names of a layout and a length -> the folder of a run that nothing stopped."""
    known: dict[tuple[str, str], Path] = {}

    def run(layout: str, length: str) -> Path:
        if (layout, length) not in known:
            folder = tmp_path_factory.mktemp(f"{layout}-{length}") / "run"
            world_size, overrides = LAYOUTS[layout]
            ranks.run(world_size, train, tiny_llama, kto_rows, folder, world_size, [*overrides, *LENGTHS[length][0]])
            known[layout, length] = folder
        return known[layout, length]

    return run


def end_early(whole: Path, folder: Path, length: str) -> None:
    """The same run, ended earlier: everything later than the first checkpoint is taken away."""
    shutil.copytree(whole, folder)
    _, last, stop = LENGTHS[length]
    checkpoints = {path.name for path in (folder / "checkpoints").iterdir()}
    later = {f"step_{step:06d}" for step in (2 * stop, last)}
    assert checkpoints == later | {f"step_{stop:06d}"}
    for name in later:
        shutil.rmtree(folder / "checkpoints" / name)


@pytest.mark.parametrize(("layout", "length"), cases(LAYOUTS, {"one_rank"}))
def test_resumes_bitwise(
    layout: str,
    length: str,
    whole_run: Callable[[str, str], Path],
    ranks: RankPool,
    tiny_llama: Path,
    kto_rows: Path,
    tmp_path: Path,
) -> None:
    world_size, overrides = LAYOUTS[layout]
    of_length, steps, _ = LENGTHS[length]
    whole, parts = whole_run(layout, length), tmp_path / "parts"
    end_early(whole, parts, length)
    ranks.run(world_size, train, tiny_llama, kto_rows, parts, world_size, [*overrides, *of_length])
    assert len(losses(whole)) == steps
    assert sorted(os.listdir(parts / "checkpoints")) == sorted(os.listdir(whole / "checkpoints")), "the run continued"
    assert losses(parts) == losses(whole)
    assert [row["train/consumed_samples"] for row in losses(parts)] == [16.0 * step for step in range(1, steps + 1)]


OTHERS: dict[str, tuple[int, list[str]]] = {
    "tp2": (2, ["model.tensor_model_parallel_size=2"]),
    "dp2": (2, []),
    "tp2_pp2": (4, ["model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2"]),
    "cp2": (2, ["model.context_parallel_size=2"]),
}


@pytest.mark.parametrize(("layout", "length"), cases(OTHERS, {"tp2"}))
def test_resumes_at_another_layout(
    layout: str,
    length: str,
    whole_run: Callable[[str, str], Path],
    ranks: RankPool,
    tiny_llama: Path,
    kto_rows: Path,
    tmp_path: Path,
) -> None:
    whole = whole_run("one_rank", length)
    end_early(whole, tmp_path / "run", length)
    world_size, overrides = OTHERS[layout]
    of_length, count, stop = LENGTHS[length]
    ranks.run(world_size, train, tiny_llama, kto_rows, tmp_path / "run", world_size, [*overrides, *of_length])
    ours, steps = trajectory(tmp_path / "run"), trajectory(whole)
    assert len(ours) == len(steps) == count
    assert ours[stop:] != steps[stop:], "recomputed with other rounding"
    assert difference(ours[stop], steps[stop]) < 1e-5
    assert max(difference(mine, theirs) for mine, theirs in zip(ours, steps, strict=True)) < 1e-4


def test_retained_checkpoints(ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path) -> None:
    overrides = [
        "trainer.kto.save_interval=1",
        "trainer.kto.val_check_interval=1",
        "exp_manager.checkpoint_callback_params.save_top_k=2",
        "exp_manager.checkpoint_callback_params.monitor=val_rewards_margin",
        "exp_manager.checkpoint_callback_params.mode=max",
    ]
    leftover = tmp_path / "checkpoints" / ".writing-step_000001" / "state"
    leftover.mkdir(parents=True)
    (leftover / "half").write_text("cut short")
    ranks.run(1, train, tiny_llama, kto_rows, tmp_path, 1, overrides)
    margins = {
        row["step"]: row["val/rewards_margin"]
        for row in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        if "val/rewards_margin" in row
    }
    assert len(set(margins.values())) == 5
    best = sorted([1, 2, 3, 4], key=lambda step: -margins[step])[:2]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        f"step_{step:06d}" for step in sorted([*best, 5])
    ]


def test_a_checkpoint_can_be_the_pretrained_model(
    whole_run: Callable[[str, str], Path], ranks: RankPool, kto_rows: Path, tmp_path: Path
) -> None:
    whole = whole_run("one_rank", "epochs_of_3")
    overrides = ["model.tensor_model_parallel_size=2", "trainer.kto.max_steps=1"]
    ranks.run(2, train, whole / "checkpoints" / "step_000005", kto_rows, tmp_path, 2, overrides)
    last, first = trajectory(whole)[-1], trajectory(tmp_path)[0]
    assert first["train/loss"] == pytest.approx(0.5, abs=1e-6), "the reference is the initial model"
    assert last["val/rewards_margin"] > 0.1
