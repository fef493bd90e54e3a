"""Which losses are worth a warning."""

from __future__ import annotations

import logging
import math
import random

import pytest

from nemo_kto.telemetry.spikes import LossSpikes
from tests.helpers.messages import Message


def told(losses: list[float]) -> list[int]:
    """Steps that were warned of."""
    spikes = LossSpikes()
    return [step for step, loss in enumerate(losses, start=1) if spikes.spike(step, loss) is not None]


def noise(count: int, *, scale: float = 0.05) -> list[float]:
    draw = random.Random(3)
    return [0.5 + draw.gauss(0, scale) for _ in range(count)]


def test_a_spike_is_reported_once_in_fifty_steps() -> None:
    losses = noise(200)
    for step in (30, 31, 79, 80, 150):
        losses[step - 1] = 5.0
    assert told(losses) == [30, 80, 150]


def test_values_that_are_not_spikes() -> None:
    assert told(noise(2000)) == []
    assert told([0.5 * 0.99**step for step in range(500)]) == []  # it falls
    assert told([0.5] * 100 + [0.54] * 100) == []  # it hardly moves
    assert told([*noise(19), 50.0]) == []  # too little is known
    assert told([*noise(30), math.nan, math.inf]) == []  # said elsewhere


def test_the_threshold_follows_a_lasting_change() -> None:
    assert told([*noise(60), *(5 + loss for loss in noise(200))]) == [61]


def test_the_warning_about_a_spike(caplog: pytest.LogCaptureFixture) -> None:
    spikes = LossSpikes()
    with caplog.at_level(logging.WARNING):
        for step, loss in enumerate([0.5, 0.55, 0.6] * 10 + [4.0], start=1):
            spikes.watch(step, loss)
    said = Message("31", "4", "last", "30", "0.55")
    assert [record.getMessage() for record in caplog.records] == [said]
