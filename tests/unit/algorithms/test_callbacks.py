"""Callbacks: order of the hooks, logging of metrics that they add, and log lines over several steps, also when resumed."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nemo_kto.algorithms.callbacks import (
    Callback,
    Event,
    ReferenceSync,
    SampleCallback,
    SpikeCallback,
    StepLog,
    StragglerCallback,
    ThroughputCallback,
)
from nemo_kto.losses.metrics import Metrics
from nemo_kto.telemetry.evaluations import Model, Sample
from nemo_kto.telemetry.watch import RankTimes
from tests.helpers.messages import Message
from tests.unit.algorithms.trainer_doubles import LEARNING_RATE, Run


class Diary(Callback):
    """Writes down every call."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []

    def on_fit_start(self, trainer: Any) -> None:
        self.entries.append(("fit_start", trainer.step))

    def on_train_step_end(self, trainer: Any, event: Event) -> None:
        self.entries.append(("step", trainer.step, event.step, event.metrics["rows"]))
        event.report["mine/twice"] = 2.0 * event.step

    def on_validation_end(self, trainer: Any, event: Event) -> None:
        self.entries.append(("validation", event.step, event.metrics["loss"]))
        event.report["mine/validations"] = 1.0

    def on_save(self, trainer: Any, report: dict[str, float]) -> None:
        self.entries.append(("save", trainer.step, len(trainer.callbacks)))
        report["mine/saved"] = 1.0

    def on_fit_end(self, trainer: Any) -> None:
        self.entries.append(("fit_end", trainer.step))

    def on_exception(self, trainer: Any, error: BaseException) -> None:
        self.entries.append(("exception", type(error).__name__))


def test_stragglers_are_compared_every_few_steps() -> None:
    given: list[RankTimes] = []
    warnings: list[str] = []

    def gather(mine: RankTimes) -> list[RankTimes]:
        given.append(mine)
        return [mine, RankTimes(host="far", stage=0, step=mine.step, phases={"forward": 1000.0})]

    seconds = iter([50.0, 0.25, 0.75, 50.0, *[1.0] * 10])  # the first before the training, the fourth in a validation
    callback = StragglerCallback(
        gather=gather, forward_seconds=lambda: next(seconds), stage=0, warn=warnings.append, interval=2
    )
    run = Run(max_steps=4, val_check_interval=2, val_rows=4, callbacks=[callback]).fit()
    assert [one.phases["forward"] for one in given] == [0.5, 1.0]
    assert run.notes.series("timing/forward") == [(1, 0.25), (2, 0.75), (3, 1.0), (4, 1.0)]
    assert run.notes.series("timing/forward_max") == [(2, 1000.0), (4, 1000.0)]
    assert run.notes.series("timing/forward_max_rank") == [(2, 1), (4, 1)]
    assert len(warnings) == 1
    assert warnings[0].startswith("rank 1 of 2 on far is slower")


def sample(step: int, model: Model = "policy") -> Sample:
    return Sample(step=step, model=model, index=0, prompt="?", messages=None, answer="!", tokens=1, ended=True)


@pytest.mark.parametrize(("starts_as_policy", "steps"), [(True, [2, 4]), (False, [0, 2, 4])])
def test_samples_are_taken_at_each_validation(starts_as_policy: bool, steps: list[int]) -> None:
    recorded: list[tuple[int, list[Sample]]] = []
    callback = SampleCallback(
        answer=lambda step: [] if step == 4 else [sample(step)],  # the run must stop
        record=lambda samples, step: recorded.append((step, [*samples])),
        initial=[sample(0, "reference")],
        starts_as_policy=starts_as_policy,
    )
    run = Run(max_steps=4, val_check_interval=2, val_rows=4, val_before_training=True, callbacks=[callback]).fit()
    taken = [(step, [sample(step)]) for step in steps if step != 4]
    assert recorded == [(0, [sample(0, "reference")]), *taken]
    assert [step for step, _ in run.notes.series("timing/samples")] == steps


@pytest.mark.parametrize(("recorded", "steps"), [((), [4]), ((0, 2), [4]), ((0, 4), [])])
def test_samples_at_the_ends_are_taken_once(recorded: tuple[int, ...], steps: list[int]) -> None:
    taken: list[int] = []
    callback = SampleCallback(
        answer=lambda step: [sample(step)],
        record=lambda samples, step: taken.append(step),
        only_at_ends=True,
        recorded=recorded,
    )
    Run(max_steps=4, val_check_interval=2, val_rows=4, val_before_training=True, callbacks=[callback]).fit()
    assert taken == steps


def test_the_last_checkpoint_is_complete_if_the_last_samples_fail() -> None:
    def fail(step: int) -> list[Sample]:
        raise RuntimeError("no memory")

    run = Run(max_steps=2, callbacks=[SampleCallback(answer=fail, record=lambda samples, step: None, only_at_ends=True)])
    with pytest.raises(RuntimeError, match="no memory"):
        run.fit()
    assert (run.notes.saved_steps, run.notes.unfinished) == ([2], 0)


def test_hooks_are_called_in_order() -> None:
    diary = Diary()
    run = Run(max_steps=3, save_interval=2, val_check_interval=2, val_rows=4, callbacks=[diary]).fit()
    validation = sum(row**2 / 2 for row in range(4)) / 4
    losses = dict(run.notes.series("val/loss"))
    assert losses[2] != validation, "after steps"
    assert diary.entries == [
        ("fit_start", 0),
        ("step", 1, 1, 2),
        ("step", 2, 2, 2),
        ("validation", 2, losses[2]),
        ("save", 2, 3),
        ("step", 3, 3, 2),
        ("validation", 3, losses[3]),
        ("save", 3, 3),
        ("fit_end", 3),
    ]


def test_what_a_callback_adds_is_logged() -> None:
    run = Run(max_steps=2, callbacks=[Diary()]).fit()
    assert run.notes.series("mine/twice") == [(1, 2.0), (2, 4.0)]
    assert run.notes.series("mine/validations") == run.notes.series("mine/saved") == [(2, 1.0)]
    assert [step for step, report in run.notes.logged if "mine/saved" in report] == [2]


def test_a_checkpoint_is_logged_after_completion_under_its_step() -> None:
    notes = Run(max_steps=5, save_interval=2, val_rows=None).fit().notes
    written = {"timing/checkpoint": 3.0, "timing/checkpoint_stall": 0.25}
    order = [(step, report if "timing/checkpoint" in report else "step") for step, report in notes.logged]
    steps = [(step, "step") for step in range(1, 6)]
    # complete after the next step, and before that is logged; the last one before the end
    assert order == [*steps[:2], (2, written), *steps[2:4], (4, written), *steps[4:], (5, written)]
    assert notes.saved_steps == [2, 4, 5]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), FloatingPointError("nan")])
def test_an_error_is_passed_to_callbacks_and_raised(error: BaseException) -> None:
    class Raises(Callback):
        def on_train_step_end(self, trainer: Any, event: Event) -> None:
            raise error

    diary = Diary()
    run = Run(callbacks=[diary, Raises()])
    with pytest.raises(type(error)):
        run.fit()
    assert diary.entries == [("fit_start", 0), ("step", 1, 1, 2), ("exception", type(error).__name__)]
    assert run.notes.ended == ["failed"]
    assert run.notes.saved == []


def test_throughput_is_reported_from_the_sums_of_the_step() -> None:
    sums = {"tokens": 30.0, "kl_tokens": 6.0, "padded_tokens": 48.0, "flops": 400.0}
    event = Event(step=1, metrics=Metrics(sums, lambda sums: {}), seconds=2.0, report={})
    callback = ThroughputCallback(world_size=2, peak_memory=lambda: 3_000_000_000, peak_flops=50.0)
    callback.on_log(Run().trainer, event)
    assert event.report == {
        "perf/tokens_per_sec": 15.0,
        "perf/tokens_per_sec_per_rank": 7.5,
        "perf/kl_tokens_per_sec": 3.0,
        "perf/padding_fraction": 0.25,
        "perf/peak_memory_gb": 3.0,
        "perf/mfu": 2.0,
    }


def test_the_reference_is_synced_before_a_checkpoint_is_written() -> None:
    class Weights:
        def __init__(self) -> None:
            self.mixed: list[tuple[int, int, float]] = []

        def mix(self, mixup_alpha: float) -> None:
            self.mixed.append((run.trainer.step, len(run.notes.saved), mixup_alpha))

    weights = Weights()
    run = Run(max_steps=6, save_interval=2, callbacks=[ReferenceSync(mix=weights.mix, interval=2, mixup_alpha=0.6)])
    run.fit()
    assert weights.mixed == [(2, 0, 0.6), (4, 1, 0.6), (6, 2, 0.6)], "one more checkpoint is written after each"


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
