"""One trajectory for every reference mode: swapped, disabled adapters or precomputed; a synced reference in a checkpoint."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.distributed.state import Layout
from tests.distributed.training.test_layouts import job as layout_job
from tests.helpers.job_cache import JobCache
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_checkpoint
from tests.helpers.training_jobs import assert_same, train, trajectory

LORA = ["model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dim=4", "model.optim.lr=5e-3"]
CACHED = "model.reference.mode=cached"


class Job:
    """Starts of one run with different overrides and a common cache."""

    def __init__(self, jobs: JobCache, folder: Path, algorithm: str) -> None:
        self.jobs, self.folder, self.algorithm, self.runs = jobs, folder, algorithm, 0

    def __call__(self, *overrides: str, world_size: int = 1, folder: Path | None = None) -> list[dict[str, float]]:
        self.runs += 1
        out, given = folder or self.folder / str(self.runs), [f"model.data.cache_dir={self.folder / 'cache'}", *overrides]
        return trajectory(self.jobs.start(out, self.algorithm, overrides=given, world_size=world_size))

    def parts(self) -> list[Path]:
        """The files of reference log-probs."""
        return sorted((self.folder / "cache").glob("reference/*/part-*.npy"))


@pytest.fixture
def job(jobs: JobCache, tmp_path: Path) -> Callable[[str], Job]:
    return lambda algorithm: Job(jobs, tmp_path, algorithm)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("lora", 3),
        *(pytest.param(name, 10, marks=pytest.mark.full) for name in ("kto", "dpo", "mixture", "lora", "lora_dpo")),
    ],
)
def test_every_mode_gives_the_same_trajectory(name: str, steps: int, jobs: JobCache) -> None:
    given = layout_job(name, "one_rank", steps)
    expected = trajectory(jobs(**given))  # with the adapters disabled, or with swapped weights
    for mode in ("cached", "swap") if "lora" in name else ("cached",):
        other = given | {"overrides": [*given["overrides"], f"model.reference.mode={mode}"]}
        assert_same(trajectory(jobs(**other)), expected, steps=steps)


TWO_EPOCHS = ["trainer.kto.limit_train_batches=2", "trainer.kto.max_steps=4", "trainer.kto.val_check_interval=4"]


def kl_estimates(folder: Path) -> list[float]:
    """Of each of four steps, before it is clamped."""
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [line["train/kl_unclamped"] for line in logged if "train/kl_unclamped" in line]
    assert len(found) == 4
    assert any(found), "zeros would prove nothing"
    return found


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        pytest.param(1, [], id="weights"),
        pytest.param(2, [], id="weights-dp2", marks=pytest.mark.full),
        pytest.param(1, [*LORA, "model.reference.restore_from_path={other}"], id="lora-other", marks=pytest.mark.full),
        pytest.param(1, LORA, id="lora", marks=pytest.mark.full),
        pytest.param(2, ["model.tensor_model_parallel_size=2"], id="tp2", marks=pytest.mark.full),
    ],
)
def test_a_cache_filled_per_epoch_gives_the_same_numbers_as_swap(
    world_size: int, overrides: list[str], job: Callable[[str], Job], tmp_path: Path
) -> None:
    """The values are equal in the second epoch too, where the reference is evaluated after the policy has moved.

    Without shared prompts, KL examples are evaluated in the same micro-batches, so that their mean log-ratio is the same to
    the last bit where the policy is, which it is in the first step of the second epoch.
    """
    run, other = job("kto"), str(make_checkpoint(tmp_path / "other", "llama", seed=3, num_hidden_layers=2))
    given = [*TWO_EPOCHS, "model.data.share_prompts=false", *(text.format(other=other) for text in overrides)]
    swapped = run(*given, world_size=world_size)
    assert abs(swapped[3]["train/rewards_all_mean"] - swapped[0]["train/rewards_all_mean"]) > 1e-4, "the policy must move"
    assert_same(run(*given, CACHED, world_size=world_size), swapped, steps=4)
    assert kl_estimates(run.folder / "2")[:3] == kl_estimates(run.folder / "1")[:3]


@pytest.mark.full
def test_a_run_resumed_without_its_cache_evaluates_the_rest(job: Callable[[str], Job], tmp_path: Path) -> None:
    """The run is resumed in the middle of the first epoch and evaluates the rest of it beforehand."""
    run, first, second = job("kto"), tmp_path / "first", tmp_path / "second"
    given = [*TWO_EPOCHS, CACHED, "trainer.kto.save_interval=1", "exp_manager.checkpoint_callback_params.save_top_k=4"]
    whole = run(*given, folder=first)
    shutil.copytree(first / "checkpoints/step_000001", second / "checkpoints/step_000001")
    shutil.copy(first / "metrics.jsonl", second)
    shutil.rmtree(tmp_path / "cache/reference")
    assert_same(run(*given, folder=second), whole, steps=4)
    assert run.parts()


@pytest.mark.parametrize(("steps", "batches"), [(3, 3), pytest.param(10, 6, marks=pytest.mark.full)])
def test_a_cache_is_reused_by_other_runs_and_layouts(steps: int, batches: int, job: Callable[[str], Job]) -> None:
    """Ten steps reach the second epoch with its new KL examples."""
    length, run = [f"trainer.kto.max_steps={steps}", f"trainer.kto.limit_train_batches={batches}"], job("kto")
    swapped = run(*length)
    assert_same(run(CACHED, *length, "model.pipeline_model_parallel_size=2", world_size=2), swapped, steps=steps)
    written = [(part, part.stat().st_mtime_ns) for part in run.parts()]
    assert written
    # the values are those that another layout rounded, so that policy and reference are not one to the last bit
    tp2 = run(CACHED, *length, "model.tensor_model_parallel_size=2", world_size=2)
    assert_same(tp2, swapped, steps=steps, first=1e-4)
    assert [(part, part.stat().st_mtime_ns) for part in run.parts()] == written, "all sequences were cached"
    run(CACHED, *length, "model.seed=99", f"trainer.kto.max_steps={steps - 2}")  # other pairs for KL rows
    epochs = 1 + (steps > batches)  # KL rows of an epoch are evaluated together, when it begins
    assert len(run.parts()) == len(written) + epochs


def forward_passes(model: Path, rows: Path, folder: Path, overrides: list[str]) -> list[int]:
    """On a rank: sequences evaluated without gradient, before training and in seven steps of two epochs."""
    from nemo_kto.models.engine.engine import LogProbEngine
    from nemo_kto.models.engine.optimizer import build_optimizer

    evaluated, before_training = [0], [0]
    original = LogProbEngine.logprobs

    def counted(self: LogProbEngine, *parts: Any) -> Any:
        evaluated[0] += sum(map(len, parts))
        return original(self, *parts)

    def recorded(**arguments: Any) -> Any:
        before_training[0] = evaluated[0]
        return build_optimizer(**arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LogProbEngine, "logprobs", counted)
        patch.setattr("nemo_kto.run.build_trainer.build_optimizer", recorded)
        length = ["trainer.kto.max_steps=7", "trainer.kto.limit_val_batches=0", "model.micro_batch_size=16"]
        train(model, rows, folder, 1, [*length, *overrides])
    return [before_training[0], evaluated[0] - before_training[0]]


def test_the_first_epoch_is_evaluated_once_before_the_optimizer_exists(
    ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path
) -> None:
    def passes(number: int, *overrides: str) -> list[int]:
        arguments = [f"model.data.cache_dir={tmp_path / 'cache'}", *overrides]
        (counts,) = ranks.run(1, forward_passes, tiny_llama, kto_rows, tmp_path / str(number), arguments)
        return list(counts)

    samples = kl_rows = 7 * 16  # into a second epoch: 96 examples once, and 16 of them again, with new KL examples
    later = 16  # KL rows of the second epoch
    assert passes(1) == [0, samples + kl_rows + kl_rows], "reference of both, policy of the KL rows"
    assert passes(2, CACHED) == [96 + 96, later + kl_rows], "KL rows of an epoch when it begins"
    assert passes(3, CACHED, "model.optim.lr=1e-4", "model.kto.ref_policy_kl_penalty=0.5") == [0, kl_rows]


@pytest.mark.full
@pytest.mark.parametrize("mode", ["swap", "cached"])
def test_another_model_as_the_reference(mode: str, job: Callable[[str], Job], tiny_llama: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", seed=3, num_hidden_layers=2)
    run, short = job("dpo"), "trainer.dpo.max_steps=3"
    same = run(short, f"model.reference.mode={mode}", f"model.reference.restore_from_path={tiny_llama}")
    assert_same(same, run(short), steps=3)
    steps = run(short, f"model.reference.mode={mode}", f"model.reference.restore_from_path={other}")
    assert abs(steps[0]["train/rewards_all_mean"]) > 0.1
    if mode == "cached":
        assert_same(steps, run(short, f"model.reference.restore_from_path={other}"), steps=3)


@pytest.mark.parametrize(
    "modes",
    [pytest.param(("adapter",), id="adapter"), pytest.param(("swap", "cached"), id="others", marks=pytest.mark.full)],
)
def test_pretrained_adapters_are_the_reference(modes: tuple[str, ...], job: Callable[[str], Job], tmp_path: Path) -> None:
    run = job("dpo")
    first = ("trainer.dpo.max_steps=2", "export.enabled=true", f"export.path={tmp_path / 'hf'}")
    run(*LORA, *first, folder=tmp_path / "first")
    (checkpoint,) = (tmp_path / "first" / "checkpoints").iterdir()
    sources = {
        "checkpoint": f"pretrained_checkpoint.restore_from_path={checkpoint}",
        "folder": f"model.peft.restore_from_path={tmp_path / 'first' / 'adapter'}",
    }
    short = "trainer.dpo.max_steps=2"
    runs = [run(*LORA, short, sources["checkpoint"], "model.reference.mode=adapter")]
    runs += [
        run(*LORA, short, source, f"model.reference.mode={mode}")
        for name, source in sources.items()
        for mode in modes
        if (name, mode) != ("checkpoint", "adapter")
    ]
    assert len(runs) == (2 if len(modes) == 1 else 5)
    for steps in runs:
        assert steps[0]["train/preference_loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert_same(steps, runs[0], steps=2)


@pytest.mark.full
def test_a_reference_that_moves_half_the_way_is_equal_at_two_ranks(job: Callable[[str], Job]) -> None:
    """With alpha 0.5 the rewards after the sync are neither those of a fixed reference nor zero, whatever the layout."""
    run, short = job("dpo"), "trainer.dpo.max_steps=3"
    moving = (short, "model.reference.sync_interval=2", "model.reference.sync_alpha=0.5")
    stays, moved = run(short), run(*moving)
    assert abs(moved[2]["train/rewards_all_mean"]) > 1e-4
    assert moved[2]["train/rewards_all_mean"] != pytest.approx(stays[2]["train/rewards_all_mean"], rel=1e-2)
    assert_same(run(*moving, world_size=2), moved, steps=3)


@pytest.mark.parametrize(
    ("name", "alpha"), [("dpo", 1.0), *(pytest.param(name, 0.5, marks=pytest.mark.full) for name in ("dpo", "lora_dpo"))]
)
def test_a_synced_reference_and_its_resumption(name: str, alpha: float, jobs: JobCache, tmp_path: Path) -> None:
    """With adapters, frozen weights of the policy change in a reference on another base."""
    fixed, moving = (layout_job(name, "one_rank", steps) for steps in (3, 4))
    moving["overrides"] += ["model.reference.sync_interval=2", f"model.reference.sync_alpha={alpha}"]
    moving["overrides"] += [f"trainer.dpo.{key}=1" for key in ("save_interval", "limit_val_batches")]
    if name == "lora_dpo":
        other = make_checkpoint(tmp_path / "other", "llama", seed=3)
        moving["overrides"] += [f"model.reference.restore_from_path={other}", "model.reference.mode=swap"]
    whole = jobs.start(tmp_path / "whole", **moving)
    expected, stays = trajectory(whole), trajectory(jobs(**fixed))
    if name == "dpo":
        assert [step["train/loss"] for step in expected[:2]] == [step["train/loss"] for step in stays[:2]]
        assert stays[2]["train/rewards_all_mean"] != pytest.approx(0.0, abs=1e-3)
    if alpha == 1.0:
        assert expected[2]["train/rewards_all_mean"] == pytest.approx(0.0, abs=1e-6), "the reference is the policy again"
    last = Path("checkpoints/step_000004")
    halves = shutil.copytree(whole, tmp_path / "halves", ignore=shutil.ignore_patterns(last.name))
    both = trajectory(jobs.start(halves, **moving))
    assert (halves / last).is_dir(), "the copied log has four lines without any training"
    assert len(both) == len(expected) == 4
    assert both[3] == expected[3]


ADAPTERS = LoRASettings(rank=3, alpha=6, target_modules=("all",))


def moved(host: list[torch.Tensor]) -> list[torch.Tensor]:
    """Values that bf16 cannot hold, the same at every layout."""
    return [values.float() * (1 + 1 / 3 * 2**-9) for values in host]


def save_or_load(
    layout: Layout, model: Path, settings: LoRASettings | None, run: Path, save: bool, moves: bool
) -> dict[str, Any]:
    """On a rank: write a checkpoint with a moved reference, or load it over one that has not moved."""
    from nemo_kto.checkpoint.manager import newest_checkpoint
    from nemo_kto.distributed import state
    from nemo_kto.models.engine.reference import SwappedWeights
    from tests.helpers import lora_jobs

    state.init_distributed(layout=layout, seed=3)
    chunks, _ = lora_jobs.build(model, layout, settings, dtype=torch.bfloat16)
    swapped = SwappedWeights(parameters=chunks[0].parameters(), moves=moves)
    optimizer = lora_jobs.optimizer_of(chunks, dtype=torch.bfloat16)
    manager = lora_jobs.manager_of(chunks, optimizer, run, model)
    manager.reference_weights = swapped
    expected = moved(swapped.kept)
    if save:
        for values, new in zip(swapped.values, expected, strict=True):
            values.copy_(new)
        lora_jobs.backward(chunks)
        optimizer.step()
        manager.save({"step": 1}, {})
        return {}
    newest = newest_checkpoint(run)
    assert newest is not None
    assert manager.load(newest) == {"step": 1}
    return {
        "dtypes": {str(values.dtype) for values in swapped.values},
        "exact": [torch.equal(*pair) for pair in zip(swapped.values, expected, strict=True)],
        "rounded": [torch.equal(*pair) for pair in zip(swapped.kept, [v.bfloat16() for v in expected], strict=True)],
        "of_bf16": [
            torch.equal(values, new.bfloat16().float()) for values, new in zip(swapped.values, expected, strict=True)
        ],
    }


@pytest.mark.parametrize(
    ("settings", "layout", "ranks_of_layout"),
    [
        pytest.param(None, Layout(tensor=2), 2, id="tp2", marks=pytest.mark.full),
        pytest.param(None, Layout(pipeline=2), 2, id="pp2", marks=pytest.mark.full),
        pytest.param(ADAPTERS, Layout(tensor=2), 2, id="adapters and another base, tp2"),
    ],
)
def test_fp32_values_are_restored_at_another_layout(
    settings: LoRASettings | None, layout: Layout, ranks_of_layout: int, ranks: RankPool, tiny_llama: Path, tmp_path: Path
) -> None:
    ranks.run(1, save_or_load, Layout(), tiny_llama, settings, tmp_path, True, True)
    for found in ranks.run(ranks_of_layout, save_or_load, layout, tiny_llama, settings, tmp_path, False, True):
        assert found["dtypes"] == {"torch.float32"}
        assert all(found["exact"])
        assert all(found["rounded"])


def test_a_checkpoint_with_a_reference_in_bf16_is_loaded(ranks: RankPool, tiny_llama: Path, tmp_path: Path) -> None:
    ranks.run(1, save_or_load, Layout(), tiny_llama, None, tmp_path, True, False)
    (found,) = ranks.run(1, save_or_load, Layout(), tiny_llama, None, tmp_path, False, True)
    assert found["dtypes"] == {"torch.float32"}
    assert all(found["of_bf16"])
