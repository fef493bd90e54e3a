"""Log lines that aggregate several steps, also in a resumed run."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nemo_kto.algorithms.callbacks import Callback, Event, SpikeCallback, StepLog, ThroughputCallback
from nemo_kto.losses.metrics import Metrics
from tests.helpers.messages import Message
from tests.unit.algorithms.trainer_doubles import LEARNING_RATE, Run

LINES = {3: [1, 2, 3], 6: [4, 5, 6], 9: [7, 8, 9], 10: [10]}  # step of a line -> steps it is of


def mean_over(values: dict[int, float]) -> list[tuple[int, Any]]:
    """Of a value of every step, that of each line."""
    return [(line, pytest.approx(sum(values[step] for step in steps) / len(steps))) for line, steps in LINES.items()]


def test_a_log_line_covers_the_steps_since_the_previous_line() -> None:
    every, third = Run().fit().notes, Run(log_every_n_steps=3).fit().notes
    assert third.steps_with("train/loss") == [3, 6, 9, 10]
    assert third.series("train/loss") == mean_over(dict(every.series("train/loss")))
    assert third.series("train/grad_norm") == mean_over(dict(every.series("train/grad_norm")))
    assert third.series("train/rows") == [(3, 6), (6, 6), (9, 6), (10, 2)], "a count is a sum"
    assert third.series("train/lr") == [(line, LEARNING_RATE) for line in LINES]
    assert third.series("train/consumed_samples") == [(line, 2 * line) for line in LINES]
    assert third.series("val/loss") == every.series("val/loss")


def test_aggregation_of_each_kind_of_metric() -> None:
    log = StepLog()
    for step, (total, rows, seconds) in enumerate([(1.0, 1, 2.0), (math.nan, 4, 3.0), (9.0, 3, 4.0)], start=1):
        metrics = Metrics({"sum": total, "rows": rows}, lambda sums: {"loss": sums["sum"] / sums["rows"]})
        report = {"train/loss": metrics["loss"], "train/lr": 0.1 * step, "timing/step_time": seconds}
        if step == 1:
            report |= {"mine/early": 7.0, "timing/rare": 5.0, "train/grad_norm": 6.0}
        log.add(Event(step=step, metrics=metrics, seconds=seconds, report=report))
    line = log.take()
    assert line is not None
    assert (line.step, line.seconds, line.metrics.sums) == (3, 9.0, {"sum": 10.0, "rows": 4})
    assert line.report == {
        "train/loss": 2.5, "train/lr": pytest.approx(0.3), "timing/step_time": 3.0, "mine/early": 7.0, "timing/rare": 5.0,
        "train/grad_norm": 6.0,
    }  # fmt: skip
    assert log.take() is None
    assert log.state_dict() == {}


def test_a_log_line_of_skipped_steps() -> None:
    run = Run(log_every_n_steps=2, max_steps=4, max_skipped_steps=9)
    run.model.spoil = lambda step: math.inf if step in (1, 2, 3) else 0.0
    run.fit()
    first, second = run.notes.series("train/loss")
    assert first == (2, math.inf)
    assert (second[0], math.isfinite(second[1])) == (4, True)
    assert run.notes.series("train/rows") == [(2, 2), (4, 2)]
    assert run.notes.series("train/skipped_steps") == [(2, 2), (4, 3)]


def test_throughput_covers_all_steps_of_a_line() -> None:
    log = StepLog()
    for tokens, seconds in ((30.0, 1.0), (10.0, 4.0)):
        sums = {"tokens": tokens, "padded_tokens": 40.0, "flops": 1.0}
        log.add(Event(step=1, metrics=Metrics(sums, lambda sums: {}), seconds=seconds, report={}))
    line = log.take()
    assert line is not None
    ThroughputCallback(world_size=1, peak_memory=lambda: 0).on_log(Run().trainer, line)
    assert (line.report["perf/tokens_per_sec"], line.report["perf/padding_fraction"]) == (8.0, 0.5)


def lines(*runs: Run) -> list[tuple[int, dict[str, float]]]:
    """Logged metrics of steps without times."""
    logged = [entry for run in runs for entry in run.notes.logged]
    return [
        (step, {name: value for name, value in values.items() if not name.startswith("timing/")})
        for step, values in logged
        if "train/loss" in values
    ]


class Counts(Callback):
    """Adds a figure at every fourth step."""

    def on_train_step_end(self, trainer: Any, event: Event) -> None:
        if event.step % 4 == 0:
            event.report["mine/step"] = event.step


@pytest.mark.parametrize("stop", [1, 3, 4, 5, 9])
def test_a_resumed_run_logs_the_same_lines(stop: int) -> None:
    settings: dict[str, Any] = {"log_every_n_steps": 3, "callbacks": [Counts()]}
    whole = Run(**settings).fit()
    first = Run(**settings)
    first.trainer.run_timer.received = lambda: 15 if len(first.model.trained_on) == stop else 0
    first.fit()
    assert (first.trainer.step, first.trainer.ended_early) == (stop, True)
    state = json.loads(json.dumps(first.notes.saved[-1][0]))  # as a checkpoint keeps it
    assert ("unlogged" in state) == (stop % 3 != 0)
    second = Run(**settings)
    with torch.no_grad():
        second.model.weight.copy_(first.model.weight)
    second.trainer.load_state_dict(state)
    second.fit()
    assert lines(first, second) == lines(whole)


def clock_of(seconds: list[float]) -> Callable[[], float]:
    """A clock that shows each of these once, and then the last."""
    return lambda: seconds.pop(0) if len(seconds) > 1 else seconds[0]


def test_spikes_are_checked_at_every_step(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(rows=80, max_skipped_steps=1, log_every_n_steps=100, callbacks=[SpikeCallback()])
    run.model.spoil = lambda step: 1e6 if step == 31 else 0.0
    with caplog.at_level(logging.WARNING):
        run.fit()
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [Message("31", "1e+06")]
