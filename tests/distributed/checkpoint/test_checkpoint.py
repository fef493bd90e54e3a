"""numerics.md, point 5: a resumed run has the same losses, bitwise at its layout.

In the quick matrix only from one rank, over the end of an epoch; test_elastic.py resumes at other layouts. Runs are also
resumed at a new layout after every checkpoint, with another Adam, and with other rates, betas, eps and weight decay.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from nemo_kto.checkpoint.manager import CheckpointManager, newest_checkpoint
from nemo_kto.checkpoint.safe_loading import load_plain
from nemo_kto.checkpoint.sharded_state import get_rng_state, set_rng_state
from nemo_kto.distributed import state
from nemo_kto.distributed.state import Layout
from nemo_kto.model_files.checkpoint_files import find_checkpoints
from nemo_kto.models.engine.optimizer import build_optimizer
from tests.distributed.optimizer import fused_adam
from tests.helpers import hf_models, lora_jobs
from tests.helpers.consumed_rows import train_and_record
from tests.helpers.job_cache import CHECKPOINTS, JobCache
from tests.helpers.rank_pool import RankPool
from tests.helpers.saved_runs import SavedRun
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


QUICK = {
    "tensor 2": (2, Layout(tensor=2)),
    "pipeline 2 in 2 chunks": (2, Layout(pipeline=2, virtual=2)),
    "data 2 in 2 optimizer instances": (2, Layout(optimizer_instances=2)),
}
LAYOUTS_IN_TURN = {
    "tensor 2 x pipeline 2": (4, Layout(tensor=2, pipeline=2)),
    "pipeline 2 in 2 chunks x data 2": (4, Layout(pipeline=2, virtual=2)),
    "data 4": (4, Layout()),
    "data 4 in 2 optimizer instances": (4, Layout(optimizer_instances=2)),
    "one rank": (1, Layout()),
    "tensor 2 x data 2": (4, Layout(tensor=2)),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads and a vocabulary that are padded, differently at each layout."""
    folder = tmp_path_factory.mktemp("model") / "llama"
    hf_models.write_model("llama-odd-heads", folder)
    return folder


@pytest.mark.parametrize(
    ("layouts", "distributed"),
    [(QUICK, True), *(pytest.param(LAYOUTS_IN_TURN, distributed, marks=pytest.mark.full) for distributed in (True, False))],
    ids=["two ranks", "distributed_optimizer", "replicated_optimizer"],
)
def test_resuming_at_a_new_layout_after_every_checkpoint(
    layouts: dict[str, tuple[int, Layout]], distributed: bool, model: Path, ranks: RankPool, tmp_path: Path
) -> None:
    run, job = tmp_path / "run", lora_jobs.train_and_save
    (whole,) = ranks.run(1, job, Layout(), model, None, tmp_path / "whole", len(layouts), distributed)
    for step, (world_size, layout) in enumerate(layouts.values(), start=1):
        layout = layout if distributed else replace(layout, optimizer_instances=1)
        for norms in ranks.run(world_size, job, layout, model, None, run, step, distributed):
            # of a single step to 1e-5, after several to 1e-4, as docs/internals/numerics.md has it
            assert norms == pytest.approx(whole[step - 1 : step], rel=1e-5 if step == 1 else 1e-4), layout


# name: type of the weights, whether the optimizer is distributed
FORMS = {
    "fp32": (torch.float32, False),
    "bf16_with_main_weights": (torch.bfloat16, False),
    "fp32_distributed": (torch.float32, True),
    "bf16_distributed": (torch.bfloat16, True),
}
CHANGES = {"torch_to_fused": (False, True), "fused_to_torch": (True, False), "fused": (True, True)}


class Run(SavedRun):
    """A model in training, and its checkpoints."""

    def __init__(self, model: Path, folder: Path, form: str, *, fused: bool) -> None:
        dtype, distributed = FORMS[form]
        with fused_adam.used() if fused else contextlib.nullcontext():
            chunks, _ = lora_jobs.build(model, state.Layout(), None, distributed=distributed, dtype=dtype)
            optimizer = lora_jobs.optimizer_of(chunks, distributed=distributed, dtype=dtype)
        super().__init__(model, folder, chunks, optimizer)
        self.fused = fused

    def save(self) -> None:
        with fused_adam.used() if self.fused else contextlib.nullcontext():
            self.manager.save({"step": 2}, {})

    def load(self) -> None:
        with fused_adam.used() if self.fused else contextlib.nullcontext():
            super().load()

    def counts(self) -> list[float]:
        """What Adam has counted, wherever it does."""
        (part,) = self.optimizer.chained_optimizers
        assert isinstance(part.optimizer, fused_adam.FusedAdam) is self.fused
        counted = part.optimizer.param_groups if self.fused else part.optimizer.state.values()
        return sorted({float(kept["step"]) for kept in counted})


def resumed(model: Path, folder: Path, form: str) -> dict[str, tuple[float, list[float]]]:
    """For each change, the largest difference to a run that nothing stopped, and what Adam has counted."""
    state.init_distributed(layout=state.Layout(), seed=3)
    saved = {fused: Run(model, folder / str(fused), form, fused=fused) for fused in (False, True)}
    for run in saved.values():
        run.steps(2)
        run.save()
    saved[False].steps(2)
    found = {}
    for change, (before, after) in CHANGES.items():
        run = Run(model, folder / str(before), form, fused=after)
        run.load()
        run.steps(2)
        pairs = zip(run.weights(), saved[False].weights(), strict=True)
        found[change] = (max(float((mine - other).abs().max()) for mine, other in pairs), run.counts())
    return found


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.full] * (form != "bf16_distributed")) for form in FORMS]
)
def test_steps_continue_as_without_interruption(form: str, ranks: RankPool, tiny_llama: Path, tmp_path: Path) -> None:
    (found,) = ranks.run(1, resumed, tiny_llama, tmp_path, form)
    assert found.keys() == CHANGES.keys()
    for change, (difference, counts) in found.items():
        assert counts == [4.0], change
        assert difference < 1e-6, f"{change}: weights of about 1, which each step moves by about 0.01"


class Settings(NamedTuple):
    """Of an optimizer and its schedule."""

    lr: float
    min_lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    schedule: str
    warmup_steps: int
    max_steps: int


BEFORE = Settings(0.01, 0.005, 0.1, (0.9, 0.99), 1e-4, "constant", 0, 10)
AFTER = Settings(0.02, 0.004, 0.3, (0.8, 0.95), 1e-2, "LinearAnnealing", 1, 5)


def built(model: Path, folder: Path, settings: Settings, dtype: torch.dtype, distributed: bool) -> tuple[list[Any], Any]:
    """The model and a manager of its checkpoints."""
    layout = state.Layout()
    chunks, _ = lora_jobs.build(model, layout, None, distributed=distributed, dtype=dtype)
    rates: dict[str, Any] = {"lr": settings.lr, "min_lr": settings.min_lr, "weight_decay": settings.weight_decay}
    optimizer = build_optimizer(
        chunks=chunks,
        betas=settings.betas,
        eps=settings.eps,
        clip_grad=1.0,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
        **rates,
    )
    lengths = {"warmup_steps": settings.warmup_steps, "max_steps": settings.max_steps}
    return chunks, lora_jobs.manager_of(chunks, optimizer, folder, model, name=settings.schedule, **rates, **lengths)


def take_step(chunks: list[Any], manager: CheckpointManager) -> None:
    lora_jobs.backward(chunks)
    manager.scheduler.step(1)
    manager.optimizer.step()


def watched_step(chunks: list[Any], manager: CheckpointManager, settings: Settings, *, number: int) -> dict[str, Any]:
    """Take step ``number`` and compare it with AdamW's closed form, for every trained tensor."""
    (part,) = manager.optimizer.chained_optimizers
    inner, before = part.optimizer, []
    assert all(group["fused"] for group in inner.param_groups), "one kernel, on the CPU as well"

    def note(*_: Any) -> None:
        for group in inner.param_groups:
            decay = settings.weight_decay * group["wd_mult"]
            for weight in group["params"]:
                moments = (inner.state[weight][name].clone() for name in ("exp_avg", "exp_avg_sq"))
                before.append((weight, weight.detach().clone(), weight.grad.clone(), *moments, decay))

    hook = inner.register_step_pre_hook(note)
    take_step(chunks, manager)
    hook.remove()
    lr, (beta1, beta2) = part.param_groups[0]["lr"], settings.betas
    worst = moved = 0.0
    for weight, old, gradient, first, second, decay in before:
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        size = (second / (1 - beta2**number)).sqrt() + settings.eps
        expected = old * (1 - lr * decay) - lr * first / (1 - beta1**number) / size
        worst = max(worst, float((weight.detach() - expected).abs().max()))
        moved = max(moved, float((weight.detach() - old).abs().max()))
    decays = {group["wd_mult"]: group["weight_decay"] for group in part.param_groups}
    return {"lr": lr, "worst": worst, "moved": moved, "tensors": len(before), "weight_decay": decays[1.0]}


def resumed_with_other_settings(model: Path, folder: Path) -> dict[str, Any]:
    state.init_distributed(layout=state.Layout(), seed=3)
    found = {}
    for name, (dtype, distributed) in FORMS.items():
        chunks, manager = built(model, folder / name, BEFORE, dtype, distributed)
        for _ in range(2):
            take_step(chunks, manager)
        manager.save({"step": 2}, {})
        chunks, manager = built(model, folder / name, AFTER, dtype, distributed)
        newest = newest_checkpoint(folder / name)
        assert newest is not None
        manager.load(newest)
        found[name] = watched_step(chunks, manager, AFTER, number=3)
    return found


@pytest.fixture(scope="module")
def found(ranks: RankPool, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """On two data-parallel ranks."""
    return ranks.run(2, resumed_with_other_settings, tiny_llama, tmp_path_factory.mktemp("settings"))


@pytest.mark.parametrize("form", FORMS)
def test_the_next_step_uses_the_new_settings(form: str, found: list[dict[str, Any]]) -> None:
    steps = [of_rank[form] for of_rank in found]
    assert sum(step["tensors"] for step in steps) == (15 if "distributed" in form else 30), "each has its shard, or all"
    for step in steps:
        # the third of five steps, the first of which warms up: half of the way from lr to min_lr
        assert step["lr"] == pytest.approx(0.004 + 0.016 / 2, rel=1e-12)
        assert step["weight_decay"] == 0.3
        assert step["moved"] > 5e-3
        assert step["worst"] < 2e-7, "weights of about 1, in fp32"


def draws_before_and_after(file: Path) -> list[list[float]]:
    """Numbers drawn from every generator: after its state was saved to ``file``, again, and after it was restored."""
    state.init_distributed(layout=state.Layout(), seed=3)

    def draw() -> list[float]:
        tracked = []
        for name in sorted(get_cuda_rng_tracker().get_states()):
            with get_cuda_rng_tracker().fork(name):
                tracked.append(float(torch.rand(())))
        return [random.random(), float(np.random.rand()), float(torch.rand(())), *tracked]

    torch.save(get_rng_state(), file)
    saved, later = draw(), draw()
    set_rng_state(load_plain(file))
    return [saved, later, draw()]


def test_every_generator_is_restored(ranks: RankPool, tmp_path: Path) -> None:
    ((saved, later, restored),) = ranks.run(1, draws_before_and_after, tmp_path / "generators.pt")
    assert restored == saved
    assert len(saved) > 3, "megatron-core has further generators"
    assert all(before != after for before, after in zip(saved, later, strict=True))
