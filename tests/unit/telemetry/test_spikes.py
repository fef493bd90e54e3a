"""Detection of loss spikes."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable

import pytest

from nemo_kto.telemetry.watch import LossSpikes
from tests.helpers.messages import Message


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[list[float]], list[int]]:
    """Steps with a warning."""

    def steps(losses: list[float]) -> list[int]:
        caplog.clear()
        spikes = LossSpikes()
        for step, loss in enumerate(losses, start=1):
            spikes.watch(step, loss)
        return [int(record.getMessage().split(":")[0].removeprefix("step ")) for record in caplog.records]

    return steps


def noise(count: int, *, scale: float = 0.05) -> list[float]:
    draw = random.Random(3)
    return [0.5 + draw.gauss(0, scale) for _ in range(count)]


def test_a_spike_is_reported_once_in_fifty_steps(warned: Callable[[list[float]], list[int]]) -> None:
    losses = noise(200)
    for step in (30, 31, 79, 80, 150):
        losses[step - 1] = 5.0
    assert warned(losses) == [30, 80, 150]


def test_values_that_are_not_spikes(warned: Callable[[list[float]], list[int]]) -> None:
    assert warned(noise(2000)) == []
    assert warned([0.5 * 0.99**step for step in range(500)]) == []  # it falls
    assert warned([0.5] * 100 + [0.54] * 100) == []  # it hardly moves
    assert warned([*noise(19), 50.0]) == []  # too little is known
    assert warned([*noise(30), math.nan, math.inf]) == []  # reported elsewhere


def test_the_warning_about_a_spike(caplog: pytest.LogCaptureFixture) -> None:
    spikes = LossSpikes()
    with caplog.at_level(logging.WARNING):
        for step, loss in enumerate([0.5, 0.55, 0.6] * 10 + [4.0], start=1):
            spikes.watch(step, loss)
    expected = Message("31", "4", "last", "30", "0.55")
    assert [record.getMessage() for record in caplog.records] == [expected]
