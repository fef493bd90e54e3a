"""A resumed run uses its own learning rates, betas, eps and weight decay."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from nemo_kto.checkpoint.manager import CheckpointManager, newest_checkpoint
from nemo_kto.distributed import state
from nemo_kto.models.engine.optimizer import build_optimizer
from tests.distributed.checkpoint.test_checkpoint_adams import FORMS
from tests.helpers import lora_jobs
from tests.helpers.rank_pool import RankPool


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
