"""The learning rate of every step, with megatron-core's schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_kto.models.optimizer import build_scheduler


def rates(*, name: str, warmup_steps: int, constant_steps: int, max_steps: int) -> list[float]:
    optimizer: Any = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = build_scheduler(
        optimizer=optimizer, name=name, lr=1.0, min_lr=0.1, warmup_steps=warmup_steps, constant_steps=constant_steps,
        max_steps=max_steps, weight_decay=0.0,
    )  # fmt: skip
    found = []
    for _ in range(max_steps):
        scheduler.step(1)
        found.append(float(optimizer.param_groups[0]["lr"]))
    return found


def test_the_last_steps_are_at_the_lowest_rate() -> None:
    falling = [0.5, 1.0, 0.7, 0.4, 0.1]
    assert rates(name="LinearAnnealing", warmup_steps=2, constant_steps=0, max_steps=5) == pytest.approx(falling)
    assert rates(name="LinearAnnealing", warmup_steps=2, constant_steps=3, max_steps=8) == pytest.approx(
        [*falling, 0.1, 0.1, 0.1]
    )
    cosine = rates(name="CosineAnnealing", warmup_steps=0, constant_steps=2, max_steps=4)
    assert cosine == pytest.approx([0.55, 0.1, 0.1, 0.1])
