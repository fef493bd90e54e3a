"""The best validation and early stopping, by the rule of pytorch-lightning, in the training loop and after a resume."""

from __future__ import annotations

import json
import math
import random
import signal
from typing import Any

import pytest
import torch

from nemo_kto.algorithms.duration import BestValidation, EarlyStopping
from tests.helpers.messages import Message
from tests.unit.algorithms.trainer_doubles import Run


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


def resumed(first: Run, stop: EarlyStopping | None = None, **settings: Any) -> Run:
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
    second = resumed(first)
    assert (second.trainer.step, second.trainer.stopped_early) == (12, run().fit().trainer.stopped_early)


@pytest.mark.parametrize(
    ("settings", "end"), [({"patience": 3}, 14), ({"patience": 9}, 20), ({"monitor": "val_rows", "mode": "max"}, 18)]
)
def test_a_stopped_run_continues_with_other_settings(settings: dict[str, Any], end: int) -> None:
    """Another metric starts again: 14 is the best, 16 and 18 are not better."""
    assert resumed(run().fit(), stopping(**settings)).trainer.step == end


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
