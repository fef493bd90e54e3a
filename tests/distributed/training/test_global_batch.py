"""Values over the global batch: BCO's delta, AOT's ranks, means of metrics, and weights of rows."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import operator
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from nemo_kto.losses.preference import rank_partners
from tests.distributed.checkpoint.test_checkpoint import losses
from tests.helpers import lora_jobs
from tests.helpers.engines import engine, kto_model
from tests.helpers.job_cache import JobCache
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_pairs, make_rows, write_rows
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


SIZES = (3, 1)  # pairs of each rank
VALID = [True, False, True, True]


def log_ratios() -> tuple[torch.Tensor, torch.Tensor]:
    """Of the chosen and of the rejected answers of all pairs; the greatest and the least are those of an invalid pair."""
    return torch.tensor([0.5, 90.0, -1.0, 2.0]), torch.tensor([1.5, -90.0, 3.0, 0.25])


def partners_here() -> dict[str, torch.Tensor]:
    """On a rank: what its pairs are compared with, where the policy says :func:`log_ratios`."""
    from nemo_kto.distributed import state
    from nemo_kto.losses.preference import LOSSES
    from nemo_kto.models.nlp.gpt.megatron_gpt_dpo_model import MegatronGPTDPOModel

    state.init_distributed(layout=state.Layout(), seed=0)
    rank = state.rank()
    first, second = (values.split(SIZES)[rank] for values in log_ratios())
    valid = torch.tensor(VALID).split(SIZES)[rank]
    reference_and_valid = {
        "reference_logps_B": torch.zeros(2 * len(first)),
        "valid_B": torch.cat([torch.ones_like(valid), valid]),  # a pair whose rejected answer has no token
    }
    model: Any = SimpleNamespace(
        objective=SimpleNamespace(loss=LOSSES["aot_unpaired"]),
        engine=SimpleNamespace(logprobs=lambda _: torch.cat([first, second])),
        phase=lambda _: contextlib.nullcontext(),
    )
    model._compared = MegatronGPTDPOModel._compared
    answers: Any = None
    partners = MegatronGPTDPOModel._rank_partners(model, answers, reference_and_valid)
    state.destroy()
    return partners


def test_ranks_with_unequal_numbers_of_pairs_and_an_invalid_pair(ranks: RankPool) -> None:
    results = ranks.run(2, partners_here)
    valid = torch.tensor(VALID)
    expected = rank_partners(*(values[valid] for values in log_ratios()))
    for name, partners in zip(("first_partners_P", "second_partners_P"), expected, strict=True):
        assert [len(result[name]) for result in results] == list(SIZES)
        got = torch.cat([result[name] for result in results])[valid]
        assert got.tolist() == pytest.approx(partners.tolist())


W_PREFERENCE, W_SFT = 0.8, 0.1
ROWS, WIDTH, PROMPT = 8, 16, 4


def model_of(folder: Path, loss: str) -> Any:
    """On a rank: a KTO model of one loss."""
    from nemo_kto.distributed import state

    chunks, architecture = lora_jobs.build(folder, state.Layout(), distributed=False)
    weights = {"preference_loss_weight": W_PREFERENCE, "sft_loss_weight": W_SFT}
    return kto_model(engine(chunks, architecture), nullcontext, loss=loss, beta=0.3, weights=(1.0, 1.5), **weights)


def make_batch(*kinds: str) -> dict[str, torch.Tensor]:
    """Random examples, ``kl_sample`` two tokens longer than ``sample``, with the log-probs of some reference."""
    draw = torch.Generator().manual_seed(7)
    batch = {"preference": torch.tensor([1, 1, 1, 0, 1, 0, 0, 0])}
    for kind, width in zip(kinds, (WIDTH, WIDTH + 2), strict=False):
        tokens = torch.randint(0, 256, (ROWS, width), generator=draw)
        labels = tokens.clone()
        labels[:, :PROMPT] = -100
        batch |= {f"{kind}s": tokens, f"{kind}_labels": labels, f"{kind}_lengths": torch.full((ROWS,), width)}
        batch[f"ref_policy_log_probs_{kind}s"] = -60 + 9 * torch.randn(ROWS, generator=draw)
    return batch


def evaluated_in_batches_of(folder: Path, sizes: tuple[int, ...]) -> dict[int, list[dict[str, float]]]:
    """On a rank, of one model and eight examples: the metrics of a validation and of a line of the log, by batch size."""
    from nemo_kto.algorithms.callbacks import Event, StepLog

    model, batch = model_of(folder, "apo_zero_unpaired"), make_batch("sample")  # no z0, which is that of a global batch
    found = {}
    for size in sizes:
        parts, log = [], StepLog()
        for start in range(0, ROWS, size):
            one = {name: values[start : start + size] for name, values in batch.items()}
            loss, metrics = model.get_loss_and_metrics(one, forward_only=True)
            assert loss == metrics["loss"]
            parts.append(metrics)
            log.add(Event(step=len(parts), metrics=metrics, seconds=1.0, report={}))
        line = log.take()
        assert line is not None
        found[size] = [dict(functools.reduce(operator.add, parts)), dict(line.metrics)]
    return found


def work_of_a_batch(folder: Path) -> dict[str, float]:
    """On a rank: the counts of a batch with KL examples."""
    _, metrics = model_of(folder, "kto").get_loss_and_metrics(make_batch("sample", "kl_sample"), forward_only=True)
    return {name: metrics.sums[name] for name in ("tokens", "kl_tokens", "padded_tokens")}


def test_the_loss_with_an_sft_term_does_not_depend_on_the_global_batch(ranks: RankPool, tiny_llama: Path) -> None:
    (found,) = ranks.run(1, evaluated_in_batches_of, tiny_llama, (8, 4, 1))
    expected = found[8][0]
    assert expected["sft_loss"] > 10, "a much smaller term proves nothing"
    for size, both in found.items():
        for metrics in both:
            terms = W_PREFERENCE * metrics["preference_loss"] + W_SFT * metrics["sft_loss"]
            assert metrics["loss"] == pytest.approx(terms, rel=1e-6), size
            means = {name: value for name, value in metrics.items() if name != "auc"}  # it is no mean, and of validations
            assert means == pytest.approx({name: expected[name] for name in expected if name != "auc"}, rel=1e-6), size


def test_tokens_of_kl_examples_are_not_counted_as_trained(ranks: RankPool, tiny_llama: Path) -> None:
    samples, kl_samples = ROWS * WIDTH, ROWS * (WIDTH + 2)
    (found,) = ranks.run(1, work_of_a_batch, tiny_llama)
    assert found == {"tokens": samples, "kl_tokens": kl_samples, "padded_tokens": samples + kl_samples}


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
