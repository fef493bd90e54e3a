"""Phases of the learning-rate schedule in a run of a given length."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_kto.config.schema import ScheduleConfig
from nemo_kto.run.build_trainer import ScheduleLengths, schedule_lengths
from tests.helpers.messages import Message

NONE: dict[str, Any] = {
    "name": "CosineAnnealing", "warmup_steps": 0, "warmup_ratio": None, "constant_steps": 0, "min_lr": 0.0,
    "wsd_decay_steps": None, "wsd_decay_style": None, "num_cycles": None,
}  # fmt: skip
WSD: dict[str, Any] = {"name": "WSD", "wsd_decay_style": "linear"}


def lengths(steps: int, **given: Any) -> tuple[ScheduleLengths, list[str]]:
    return schedule_lengths(ScheduleConfig(**NONE | given), steps)


@pytest.mark.parametrize(
    ("ratio", "steps", "warmup"), [(0.1, 100, 10), (0.29, 100, 29), (0.1, 19, 1), (0.1, 9, 0), (0.99, 3, 2)]
)
def test_a_ratio_refers_to_the_run(ratio: float, steps: int, warmup: int) -> None:
    assert lengths(steps, warmup_ratio=ratio) == (ScheduleLengths(warmup, 0, None), [])


def test_lengths_that_fit_and_a_shorter_default_need_no_warning() -> None:
    assert lengths(100, warmup_steps=None) == (ScheduleLengths(10, 0, None), [])
    assert lengths(4, warmup_steps=None) == (ScheduleLengths(3, 0, None), [])
    assert lengths(10, **WSD, warmup_steps=2, constant_steps=3, wsd_decay_steps=5) == (ScheduleLengths(2, 3, 5), [])
    assert lengths(40, warmup_steps=None, warmup_ratio=0.1) == (ScheduleLengths(4, 0, None), [])


def test_too_long_phases_are_shortened_with_a_warning() -> None:
    found, warnings = lengths(4, **WSD, warmup_steps=9, constant_steps=2, wsd_decay_steps=3)
    assert found == ScheduleLengths(3, 0, 1)
    assert warnings == [
        Message("model.optim.sched.warmup_steps", "4", "9", "3"),
        Message("model.optim.sched.constant_steps", "1", "2", "0"),
        Message("model.optim.sched.wsd_decay_steps", "1", "min_lr", "3", "1"),
    ]
