"""Stopping a run by a signal, max_time or early stopping (by the rule of pytorch-lightning), and the resumed run."""

from __future__ import annotations

import itertools
import json
import math
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nemo_kto.algorithms.callbacks import Callback
from nemo_kto.algorithms.duration import BestValidation, EarlyStopping
from nemo_kto.telemetry.watch import StopReason
from tests.helpers.messages import Message
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


def stopping(**settings: Any) -> EarlyStopping:
    defaults: dict[str, Any] = {"monitor": "val_loss", "mode": "min", "min_delta": 0.0, "patience": 2}
    return EarlyStopping(**defaults | settings)


def steps_until_it_stops(values: list[float], **settings: Any) -> int:
    """After how many validations; 0 for never."""
    early = stopping(**settings)
    for step, value in enumerate(values, start=1):
        early.update({"loss": value}, step=step)
        if early.reason is not None:
            return step
    return 0


def of_lightning(values: list[float], **settings: Any) -> int:
    from pytorch_lightning.callbacks import EarlyStopping as Theirs

    early = Theirs(monitor="val_loss", **settings)
    for step, value in enumerate(values, start=1):
        if early._evaluate_stopping_criteria(torch.tensor(value, dtype=torch.float64))[0]:
            return step
    return 0


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("min_delta", [0.0, 0.1])
def test_early_stopping_equals_lightning(mode: str, min_delta: float) -> None:
    draw = random.Random(3)
    found = []
    for patience in (1, 2, 3, 5):
        for _ in range(20):
            values = [draw.choice([0.1, 0.2, 0.3, 0.35, 0.8]) + 0.01 * draw.random() for _ in range(12)]
            if draw.random() < 0.2:
                values[draw.randrange(12)] = draw.choice([math.nan, math.inf])
            settings = {"mode": mode, "min_delta": min_delta, "patience": patience}
            found.append(steps_until_it_stops(values, **settings))
            assert found[-1] == of_lightning(values, **settings)
    assert len(set(found)) > 6, "the cases differ"


def test_an_improvement_by_min_delta_does_not_count() -> None:
    assert steps_until_it_stops([1.0, 0.75, 0.5], min_delta=0.25, patience=2) == 0  # 0.5 is better than 1.0 by more
    assert steps_until_it_stops([1.0, 0.75, 0.75], min_delta=0.25, patience=2) == 3


def test_the_reason_to_stop() -> None:
    early = stopping(min_delta=0.01)
    for step, value in ((10, 0.5), (20, 0.495), (30, 0.6)):
        assert early.reason is None
        early.update({"loss": value}, step=step)
    assert early.reason == Message("val_loss", "0.01", "last", "2", "0.5000", "10")
    early = stopping(patience=1)
    for step, value in ((1, 0.5), (2, 0.5)):
        early.update({"loss": value}, step=step)
    assert early.reason == Message("val_loss", "last", "validation", "0.5000", "1")
    early.update({"loss": math.nan}, step=3)
    assert early.reason == Message("val_loss")


def test_ranks_decide_together() -> None:
    """One sees a last digit that is better, the other does not."""
    first, second = stopping(patience=1), stopping(patience=1)
    for early, value in ((first, 1.0), (second, 1.0)):
        early.update({"loss": value}, step=1)
    for early, value in ((first, 1.0 - 1e-9), (second, 1.0)):
        early.reduce_max = lambda answer: max(answer, 1)
        early.update({"loss": value}, step=2)
    assert first.reason == second.reason == Message("val_loss", "last", "validation", "1.0000", "1")


def run(stop: EarlyStopping | None = None, **settings: Any) -> Run:
    """Validates at every second of twenty steps; the loss is constant from the fourth validation on."""
    made = Run(max_epochs=2, val_check_interval=2, save_interval=6, **settings)
    made.trainer.early_stopping = stopping() if stop is None else stop
    validate = made.trainer.model.get_loss_and_metrics

    def flat(batch: Any, forward_only: bool) -> Any:
        loss, metrics = validate(batch, forward_only)
        if forward_only:
            metrics = metrics.of({"rows": 1, "loss": float(max(10 - made.trainer.step, 2))})
        return metrics["loss"] if forward_only else loss, metrics

    made.trainer.model.get_loss_and_metrics = flat  # type: ignore[method-assign]
    return made


def test_early_stopping_ends_the_run_as_its_last_step() -> None:
    made = run().fit()
    assert made.notes.steps_with("val/loss") == [2, 4, 6, 8, 10, 12], "8 is the best, 10 and 12 are not better"
    assert (made.trainer.step, made.notes.saved_steps) == (12, [6, 12])
    assert made.trainer.stopped_early == Message("val_loss", "last", "2", "2.0000", "8")
    assert (made.trainer.ended_early, made.trainer.stop, made.notes.ended) == (False, None, ["success"])
    assert made.notes.steps_with("train/loss") == list(range(1, 13))
    longer = run(stopping(patience=7)).fit()
    assert (longer.trainer.step, longer.trainer.stopped_early) == (20, None)


def resumed_with(first: Run, stop: EarlyStopping | None = None, **settings: Any) -> Run:
    second = run(stop, **settings)
    with torch.no_grad():
        second.model.weight.copy_(first.model.weight)
    second.trainer.load_state_dict(json.loads(json.dumps(first.notes.saved[-1][0])))
    return second.fit()


@pytest.mark.parametrize("step", [1, 2, 8, 9, 10, 11])
def test_a_resumed_run_stops_at_the_same_step(step: int) -> None:
    first = run()
    first.trainer.run_timer.received = lambda: int(signal.SIGTERM) if len(first.model.trained_on) == step else 0
    first.fit()
    assert (first.trainer.step, first.trainer.ended_early) == (step, True)
    second = resumed_with(first)
    assert (second.trainer.step, second.trainer.stopped_early) == (12, run().fit().trainer.stopped_early)


@pytest.mark.parametrize(
    ("settings", "end"), [({"patience": 3}, 14), ({"patience": 9}, 20), ({"monitor": "val_rows", "mode": "max"}, 18)]
)
def test_a_stopped_run_continues_with_other_settings(settings: dict[str, Any], end: int) -> None:
    """Another metric starts again: 14 is the best, 16 and 18 are not better."""
    assert resumed_with(run().fit(), stopping(**settings)).trainer.step == end


def test_the_validation_before_the_first_step_does_not_count() -> None:
    made = run(val_before_training=True)
    made.fit()
    assert made.notes.steps_with("val/loss")[0] == 0
    assert made.trainer.early_stopping is not None
    assert made.trainer.early_stopping.best_step == 8


def keeping_best(**settings: Any) -> Run:
    """``run`` with checkpoints of its best validations, and without early stopping."""
    made = run(best_validation=BestValidation(monitor="val_loss", mode="min"), **settings)
    made.trainer.early_stopping = None
    return made


def test_a_checkpoint_is_saved_whenever_the_validation_improves() -> None:
    made, plain = keeping_best().fit(), run(stopping(patience=99)).fit()
    assert made.notes.saved_steps == [2, 4, 6, 8, 12, 18, 20], "6, 12 and 18 by the interval, 20 at the end"
    assert plain.notes.saved_steps == [6, 12, 18, 20]
    assert [metrics.get("val_loss") for _, metrics in made.notes.saved] == [8.0, 6.0, 4.0, 2.0, 2.0, 2.0, 2.0]
    for name in ("train/loss", "val/loss", "train/grad_norm"):
        assert made.notes.series(name) == plain.notes.series(name), "a checkpoint changes no figure"


def test_ranks_save_together() -> None:
    """If one rank sees no improvement, none saves; a validation without the metric is none."""
    made = keeping_best(val_before_training=True)
    best = made.trainer.best_validation
    assert best is not None
    best.reduce_max = lambda answer: max(answer, int(made.trainer.step == 4))
    assert made.fit().notes.saved_steps == [2, 6, 8, 12, 18, 20]
    lacking = keeping_best()
    lacking.trainer.best_validation = BestValidation(monitor="val_auc", mode="max")
    assert lacking.fit().notes.saved_steps == [6, 12, 18, 20]


@pytest.mark.parametrize("step", [1, 2, 5, 8, 10])
def test_a_resumed_run_saves_the_same_best(step: int) -> None:
    """The signal arrives before the validation of the step, which the resumed run makes and saves if it is the best."""
    first, second = keeping_best(), keeping_best()
    first.trainer.run_timer.received = lambda: int(signal.SIGTERM) if len(first.model.trained_on) == step else 0
    first.fit()
    second.trainer.load_state_dict(json.loads(json.dumps(first.notes.saved[-1][0])))
    second.fit()
    assert first.notes.saved_steps == [each for each in (2, 4, 6, 8) if each < step] + [step]
    assert second.notes.saved_steps == [each for each in (2, 4, 6, 8, 12, 18, 20) if each >= step], "with its validation"
    last: Any = second.notes.saved[-1][0]
    assert last["best_validation"]["best_step"] == 8
