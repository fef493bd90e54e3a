"""Stopping a run by a signal or max_time, and the resumed run."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nemo_kto.algorithms.callbacks import Callback
from nemo_kto.algorithms.duration import BestValidation
from nemo_kto.telemetry.watch import StopReason
from tests.unit.algorithms.trainer_doubles import Run


def stopped(when: Callable[[Run], bool], **settings: Any) -> Run:
    """A run that gets SIGTERM as soon as ``when`` is true of it."""
    run = Run(**settings)
    run.trainer.run_timer.received = lambda: int(signal.SIGTERM) if when(run) else 0
    return run.fit()


def resumed(first: Run, **settings: Any) -> Run:
    second = Run(**settings)
    with torch.no_grad():
        second.model.weight.copy_(first.model.weight)
    if first.notes.saved:
        second.trainer.load_state_dict(first.notes.saved[-1][0])
    return second.fit()


def losses(*runs: Run) -> list[tuple[int, str, float]]:
    """Every loss that was logged, in order."""
    logged = itertools.chain(*(run.notes.logged for run in runs))
    return [(step, name, values[name]) for step, values in logged for name in ("train/loss", "val/loss") if name in values]


def test_a_signal_during_a_step() -> None:
    settings: dict[str, Any] = {"val_check_interval": 3, "save_interval": 5}
    run = stopped(lambda run: len(run.model.trained_on) == 4, **settings)
    assert (run.trainer.step, run.notes.saved_steps, run.notes.steps_with("val/loss")) == (4, [4], [3])
    assert (run.trainer.ended_early, run.trainer.stop) == (True, StopReason("SIGTERM", early=True))
    assert run.notes.ended == ["success"]
    again = resumed(run, **settings)
    assert not again.trainer.ended_early
    assert losses(run, again) == losses(Run(**settings).fit())


@pytest.mark.parametrize("batches", [0, 1, 2])
@pytest.mark.parametrize("step", [3, 10])
def test_a_signal_before_a_validation_leaves_it_to_the_resumed_run(step: int, batches: int) -> None:
    """The validation may be that of the last step, and none, some or all but one of its batches may be done."""
    settings: dict[str, Any] = {"val_check_interval": 3}
    before = 3 * (step // 3 - (step == 3))

    def when(run: Run) -> bool:
        return run.trainer.step == step and len(run.model.validated_on) >= before + batches

    run = stopped(when, **settings)
    assert (run.trainer.step, run.notes.saved_steps) == (step, [step])
    assert run.notes.saved[0][0]["validation_due"] == 1
    assert run.trainer.ended_early
    again = resumed(run, **settings)
    assert losses(run, again) == losses(Run(**settings).fit())
    assert again.notes.saved_steps == [10], "saved again, with its validation"
    assert again.notes.saved[-1][0]["validation_due"] == 0


def test_a_signal_during_the_last_batch_of_a_validation_keeps_its_result() -> None:
    """The validation is logged and need not be repeated."""
    run = stopped(lambda run: len(run.model.validated_on) == 3, val_check_interval=3, save_interval=5)
    assert run.notes.steps_with("val/loss") == run.notes.saved_steps == [3]
    assert run.notes.saved[0][0]["validation_due"] == 0


def test_a_resumed_validation_that_is_interrupted_again() -> None:
    settings: dict[str, Any] = {"val_check_interval": 3}
    run = stopped(lambda run: run.trainer.step == 3, **settings)
    again = Run(**settings)
    again.trainer.run_timer.received = lambda: int(signal.SIGUSR1)
    again.trainer.load_state_dict(run.notes.saved[-1][0])
    again.fit()
    assert (again.notes.saved, again.model.trained_on, again.trainer.validation_due) == ([], [], True)
    assert again.trainer.ended_early


def test_a_resumed_validation_that_is_interrupted_in_its_last_batch_is_saved() -> None:
    """The checkpoint says that no validation is due, though no step was trained."""
    settings: dict[str, Any] = {"val_check_interval": 3}
    run = stopped(lambda run: run.trainer.step == 3, **settings)
    again = Run(**settings)
    again.trainer.run_timer.received = lambda: int(signal.SIGUSR1) * (len(again.model.validated_on) == 3)
    again.trainer.load_state_dict(run.notes.saved[-1][0])
    again.fit()
    assert (again.notes.saved_steps, again.notes.saved[0][0]["validation_due"], again.model.trained_on) == ([3], 0, [])
    assert again.trainer.ended_early


def test_max_time_is_reached() -> None:
    run = Run(max_epochs=9, max_time="00:00:01:00")
    run.trainer.run_timer.clock = lambda: 25.0 * len(run.model.trained_on)
    run.fit()
    assert run.notes.steps_with("train/loss") == [1, 2, 3]  # 75 seconds: the step that goes over is finished
    assert run.notes.steps_with("val/loss") == run.notes.saved_steps == [3]
    assert run.notes.ended == ["success"]
    assert not run.trainer.ended_early, "the model is exported"


def test_max_time_is_reached_and_the_run_is_requeued() -> None:
    """The next job validates, so this one only saves."""
    run = Run(max_epochs=9, max_time="00:00:01:00")
    run.trainer.run_timer.clock = lambda: 25.0 * len(run.model.trained_on)
    run.trainer.run_timer.requeue = True
    run.fit()
    assert (run.notes.steps_with("val/loss"), run.notes.saved_steps) == ([], [3])
    assert run.trainer.ended_early


class Preparation(Callback):
    """A callback that prepares epochs, records the steps, and stops the run during one of them."""

    def __init__(self, stops_at: int | None = None) -> None:
        self.steps: list[int] = []
        self.stops_at = stops_at

    def on_train_epoch_start(self, trainer: Any) -> None:
        self.steps.append(trainer.step)

    @property
    def stops(self) -> bool:
        return self.steps[-1:] == [self.stops_at]


def test_each_epoch_is_prepared_before_its_first_step_and_where_the_run_resumes() -> None:
    whole, again = Preparation(), Preparation()
    first = Run(max_epochs=3, callbacks=[whole]).fit()
    assert whole.steps == [0, 10, 20]
    stopped_first = Run(max_epochs=3, max_steps=13).fit()
    second = resumed(stopped_first, max_epochs=3, callbacks=[again])
    assert again.steps == [13, 20]
    assert losses(stopped_first, second)[-2:] == losses(first)[-2:]


@pytest.mark.parametrize("interval", [0, 10])
def test_a_signal_while_an_epoch_is_prepared(interval: int) -> None:
    """The last step is saved once, whether that was due or not, and nothing else is done."""
    preparation = Preparation(stops_at=10)
    settings: dict[str, Any] = {"max_epochs": 3, "save_interval": interval}
    run = stopped(lambda run: preparation.stops, callbacks=[preparation], **settings)
    assert (run.trainer.step, run.notes.saved_steps, run.notes.steps_with("val/loss")) == (10, [10], [])
    assert (run.trainer.ended_early, run.notes.ended) == (True, ["success"])
    again = resumed(run, **settings)
    assert losses(run, again) == losses(Run(**settings).fit())


def test_a_signal_while_an_epoch_is_prepared_after_the_best_validation() -> None:
    preparation, best = Preparation(stops_at=10), BestValidation(monitor="val_loss", mode="min")
    settings: dict[str, Any] = {"max_epochs": 3, "val_check_interval": 10}
    run = stopped(lambda run: preparation.stops, callbacks=[preparation], best_validation=best, **settings)
    assert (run.notes.saved_steps, best.best_step) == ([10], 10), "once"


@pytest.mark.parametrize(("interval", "validated"), [(0, [10]), (5, [5, 10])])
def test_max_time_is_reached_while_an_epoch_is_prepared(interval: int, validated: list[int]) -> None:
    """The run ends as after any last step: it has a validation, the lines of the log that are left, and a checkpoint."""
    preparation = Preparation(stops_at=10)
    settings: dict[str, Any] = {
        "max_epochs": 3,
        "val_check_interval": interval,
        "log_every_n_steps": 4,
        "callbacks": [preparation],
    }
    run = Run(max_time="00:00:01:00", clock=lambda: 100.0 * preparation.stops, **settings).fit()
    assert run.notes.steps_with("val/loss") == validated
    assert (run.notes.steps_with("train/loss"), run.notes.saved_steps) == ([4, 8, 10], [10])
    assert not run.trainer.ended_early, "the model is exported"


def test_max_time_counts_from_the_start_and_at_least_one_step_is_taken() -> None:
    run = Run(max_time="00:00:01:00", clock=lambda: 1000.0)
    run.trainer.run_timer.started = 0.0
    run.fit()
    assert run.notes.saved_steps == [1]
