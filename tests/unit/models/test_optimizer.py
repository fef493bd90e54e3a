"""Learning-rate schedules against those of transformers, torch's fused AdamW, and AdamW with moments in bf16.

Theirs are of a step counted from 0, so that a warm-up begins with a step at 0; ours are counted from 1 (see
``build_scheduler``). Our step k has the rate that theirs has at k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.optimization import get_cosine_with_hard_restarts_schedule_with_warmup, get_wsd_schedule

from nemo_kto.checkpoint.sharded_state import _set_counters
from nemo_kto.models.engine import optimizer as optimizers
from nemo_kto.models.engine.optimizer import build_scheduler, fuse_torch_adam


def rates(
    *, name: str, warmup_steps: int, constant_steps: int, max_steps: int, min_lr: float = 0.1, **shape: Any
) -> list[float]:
    optimizer: Any = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = build_scheduler(
        optimizer=optimizer, name=name, lr=1.0, min_lr=min_lr, warmup_steps=warmup_steps, constant_steps=constant_steps,
        max_steps=max_steps, weight_decay=0.0, **shape,
    )  # fmt: skip
    found = []
    for _ in range(max_steps):
        scheduler.step(1)
        found.append(float(optimizer.param_groups[0]["lr"]))
    return found


def test_the_last_steps_have_the_minimum_rate() -> None:
    falling = [0.5, 1.0, 0.7, 0.4, 0.1]
    assert rates(name="LinearAnnealing", warmup_steps=2, constant_steps=0, max_steps=5) == pytest.approx(falling)
    assert rates(name="LinearAnnealing", warmup_steps=2, constant_steps=3, max_steps=8) == pytest.approx(
        [*falling, 0.1, 0.1, 0.1]
    )
    cosine = rates(name="CosineAnnealing", warmup_steps=0, constant_steps=2, max_steps=4)
    assert cosine == pytest.approx([0.55, 0.1, 0.1, 0.1])


def of_transformers(make: Callable[..., Any], steps: int, **lengths: Any) -> list[float]:
    """The rates of their steps 1 to ``steps``, counted from 0."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule, found = make(optimizer, **lengths), []
    for _ in range(steps):
        optimizer.step()
        schedule.step()
        found.append(float(optimizer.param_groups[0]["lr"]))
    return found


@pytest.mark.parametrize(("ours", "theirs"), [("linear", "linear"), ("cosine", "cosine"), ("minus_sqrt", "1-sqrt")])
def test_wsd_equals_transformers(ours: str, theirs: str) -> None:
    found = rates(
        name="WSD", warmup_steps=3, constant_steps=0, max_steps=12, min_lr=0.0, wsd_decay_steps=5, wsd_decay_style=ours
    )
    lengths = {"num_warmup_steps": 3, "num_decay_steps": 5, "num_training_steps": 12, "decay_type": theirs}
    expected = of_transformers(get_wsd_schedule, 12, **lengths)
    assert found == pytest.approx(expected)
    assert (found[2:7], found[-1]) == ([1.0] * 5, 0.0)


def test_wsd_stays_above_its_minimum_rate() -> None:
    """2 * 0.5 ** progress - 1 of the way from 0.1 to 1, and then the last step once more."""
    found = rates(
        name="WSD", warmup_steps=0, constant_steps=1, max_steps=4, wsd_decay_steps=2, wsd_decay_style="exponential"
    )
    assert found == pytest.approx([1.0, 0.1 + 0.9 * (2 * 0.5**0.5 - 1), 0.1, 0.1])


@pytest.mark.parametrize(("warmup", "steps", "cycles"), [(0, 12, 3), (2, 14, 4), (3, 13, 3), (4, 10, 1), (0, 7, 1)])
def test_restarts_equal_transformers(warmup: int, steps: int, cycles: int) -> None:
    found = rates(
        name="CosineWithRestarts", warmup_steps=warmup, constant_steps=0, max_steps=steps, min_lr=0.0, cycles=cycles
    )
    lengths = {"num_warmup_steps": warmup, "num_training_steps": steps, "num_cycles": cycles}
    expected = of_transformers(get_cosine_with_hard_restarts_schedule_with_warmup, steps, **lengths)
    assert found == pytest.approx(expected)


def adam_steps(*, fused: bool) -> list[torch.Tensor]:
    """Weights after ten steps, in the middle of which the counters are those of a loaded checkpoint."""
    draw = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(size, generator=draw)) for size in (3, 500)]
    adam = torch.optim.AdamW(weights, lr=0.01, weight_decay=0.1)
    if fused:
        fuse_torch_adam([adam, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)])
    for number in range(10):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=draw)
        adam.step()
        if number == 5:
            _set_counters(adam, 5)
    assert [group["fused"] for group in adam.param_groups] == [fused or None]
    assert [int(state["step"]) for state in adam.state.values()] == [9, 9]
    return [weight.detach() for weight in weights]


def test_the_fused_kernel_takes_the_same_steps() -> None:
    for found, expected in zip(adam_steps(fused=True), adam_steps(fused=False), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_moments_in_bf16_are_those_of_adamw_rounded_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, also if a weight is updated in several slices."""
    monkeypatch.setattr(optimizers, "_VALUES", 100)
    generator = torch.Generator().manual_seed(1)
    ours, theirs = (torch.linspace(-1, 1, 256).view(8, 32).requires_grad_() for _ in range(2))
    groups: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}
    narrow, wide = optimizers.Bf16MomentsAdamW([ours], **groups), torch.optim.AdamW([theirs], **groups)
    for _ in range(4):
        ours.grad = torch.randn(8, 32, generator=generator)
        theirs.grad = ours.grad.clone()
        narrow.step()
        wide.step()
        for name in optimizers.MOMENTS:
            assert narrow.state[ours][name].dtype == torch.bfloat16
            wide.state[theirs][name].copy_(wide.state[theirs][name].bfloat16())
            assert torch.equal(narrow.state[ours][name].float(), wide.state[theirs][name])
        assert torch.equal(ours, theirs)
    assert float(narrow.state[ours]["step"]) == 4
