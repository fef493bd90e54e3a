"""BCO's delta: the running mean of rewards, resumed after a kill, unchanged by validation and skipped steps."""

from __future__ import annotations

import functools
import json
import math
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.distributed.checkpoint.test_checkpoint import losses
from tests.helpers.job_cache import JobCache
from tests.helpers.training_jobs import assert_same, train, trajectory

BCO = ["model.kto.preference_loss=bco", "trainer.kto.max_steps=4"]
BCO += ["trainer.kto.limit_train_batches=3", "trainer.kto.save_interval=2"]


def saved_rewards(folder: Path, step: int) -> dict[str, float]:
    """Sum and number of the rewards in the checkpoint of a step."""
    info = json.loads((folder / f"checkpoints/step_{step:06d}/trainer.json").read_text())
    return dict(info["trainer"]["objective"]["rewards"])


@pytest.mark.parametrize(
    "layout", [[], pytest.param(["model.tensor_model_parallel_size=2"], marks=pytest.mark.full)], ids=["same", "tp2"]
)
def test_delta_is_the_mean_of_all_rewards_and_is_resumed(layout: list[str], jobs: JobCache, tmp_path: Path) -> None:
    """Each step's rewards are of the weights before it, so that the passes before the step and in it see the same ones."""
    given = [*BCO, "trainer.kto.val_check_interval=2"]
    whole = jobs(overrides=given, world_size=2)
    steps = trajectory(whole)
    means = [step["train/rewards_all_mean"] for step in steps]  # of 16 rows each
    for number, step in enumerate(steps, start=1):
        assert step["train/delta"] == pytest.approx(sum(means[:number]) / number, rel=1e-5, abs=1e-9)
    assert steps[0]["train/preference_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(steps[-1]["train/delta"]) > 1e-3, "the policy must move, or equality proves nothing"
    for number in (2, 4):
        assert steps[number - 1]["val/delta"] == steps[number - 1]["train/delta"], "a validation does not change it"
        saved = saved_rewards(whole, number)
        assert saved["count"] == 16 * number
        assert saved["total"] / saved["count"] == steps[number - 1]["train/delta"]

    resumed = tmp_path / "resumed"
    shutil.copytree(whole / "checkpoints/step_000002", resumed / "checkpoints/step_000002")
    shutil.copy(whole / "metrics.jsonl", resumed)
    jobs.start(resumed, overrides=[*given, *layout], world_size=2)
    assert (resumed / "checkpoints/step_000004").is_dir(), "the copied log has all lines without any training"
    if layout:
        assert losses(resumed)[2:] != losses(whole)[2:], "recomputed with other rounding"
    else:
        assert losses(resumed) == losses(whole)
    assert_same(trajectory(resumed), steps, steps=4)


def with_unknown_references(steps: set[int], *arguments: Any) -> None:
    """On a rank: a job in which the reference log-probs of some steps are not finite."""
    from nemo_kto.algorithms.dpo import DPOTrainer
    from nemo_kto.models.nlp.gpt.megatron_gpt_kto_model import MegatronGPTKTOModel

    evaluate, fit = MegatronGPTKTOModel.get_ref_policy_logprobs, DPOTrainer.fit
    trainers: list[DPOTrainer] = []

    def spoil(model: MegatronGPTKTOModel, batch: Any) -> torch.Tensor:
        return evaluate(model, batch) + (math.nan if trainers[0].step + 1 in steps else 0.0)

    def watch(trainer: DPOTrainer) -> None:
        trainers.append(trainer)
        fit(trainer)

    with (
        mock.patch.object(MegatronGPTKTOModel, "get_ref_policy_logprobs", spoil),
        mock.patch.object(DPOTrainer, "fit", watch),
    ):
        train(*arguments)


def test_rewards_of_a_skipped_step_are_not_in_the_mean(jobs: JobCache, tmp_path: Path) -> None:
    run = functools.partial(with_unknown_references, {2, 3})
    jobs.start(tmp_path, overrides=[*BCO, "trainer.kto.limit_val_batches=0"], run=run)
    rows = losses(tmp_path)
    assert [row["train/skipped_steps"] for row in rows] == [0, 1, 2, 2]
    assert [row["train/delta"] is None for row in rows] == [False, True, True, False]
    kept = [row["train/rewards_all_mean"] for row in rows if row["train/delta"] is not None]
    assert rows[3]["train/delta"] == pytest.approx(sum(kept) / 2, rel=1e-5)
    assert [saved_rewards(tmp_path, step)["count"] for step in (2, 4)] == [16, 32]
