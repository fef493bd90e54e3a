"""Several validation sets: each has the metrics of a separate run."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_kto.algorithms.callbacks import Callback, Event
from nemo_kto.algorithms.duration import EarlyStopping
from tests.helpers.messages import assert_names
from tests.unit.algorithms.test_stopping import resumed, stopped
from tests.unit.algorithms.trainer_doubles import Run

SETS = {"small": 3, "large": 5}  # of two and of three batches


def figures(run: Run, prefix: str = "") -> list[tuple[int, float, float]]:
    """Step, loss and rows of each validation."""
    logged = [(step, values) for step, values in run.notes.logged if f"val/{prefix}loss" in values]
    return [(step, values[f"val/{prefix}loss"], values[f"val/{prefix}rows"]) for step, values in logged]


def test_each_set_has_the_metrics_of_a_separate_run() -> None:
    settings: dict[str, Any] = {"val_check_interval": 4, "val_before_training": True}
    run = Run(val_rows=SETS, **settings).fit()
    for name, rows in SETS.items():
        assert figures(run, f"{name}_") == figures(Run(val_rows=rows, **settings).fit())
        assert [step for step, _, _ in figures(run, f"{name}_")] == [0, 4, 8, 10]
        assert {count for _, _, count in figures(run, f"{name}_")} == {rows}
    assert figures(run, "small_") != figures(run, "large_")
    names = {name for _, values in run.notes.logged for name in values if name.startswith("val/")}
    assert names == {"val/small_loss", "val/small_rows", "val/large_loss", "val/large_rows"}, "no metrics over all sets"


@pytest.mark.parametrize(("limit", "batches"), [(1.0, 5), (2, 4), (1, 2), (0.5, 2), (0, 0)])
def test_the_limit_applies_to_each_set(limit: float, batches: int) -> None:
    run = Run(val_rows=SETS, limit_val_batches=limit).fit()
    assert len(run.model.validated_on) == batches


def test_the_validation_loss_covers_the_examples_of_all_sets() -> None:
    run = Run(val_rows=SETS)
    loss, metrics = run.trainer.run_validation()
    # the weight is 0, so that row x has the loss x^2 / 2
    small, large = sum(x**2 / 2 for x in range(3)), sum(x**2 / 2 for x in range(5))
    assert metrics == {"small_loss": small / 3, "small_rows": 3, "large_loss": large / 5, "large_rows": 5}
    assert loss == (small + large) / 8


def test_arguments_of_validation_callbacks() -> None:
    events: list[Event] = []

    class Notes(Callback):
        def on_validation_end(self, trainer: Any, event: Event) -> None:
            events.append(event)

    Run(val_rows=5, callbacks=[Notes()]).fit()
    assert events.pop().metrics.sums.keys() == {"loss", "rows"}, "metrics of one set have no prefix"
    run = Run(val_rows=SETS, callbacks=[Notes()]).fit()
    (event,) = events
    assert event.metrics["large_loss"] == figures(run, "large_")[0][1]
    assert event.metrics.sums["large/rows"] == 5
    twice = event.metrics + event.metrics
    assert (twice["large_rows"], twice["large_loss"]) == (10, event.metrics["large_loss"])


@pytest.mark.parametrize("batches", [0, 1, 2, 4])
@pytest.mark.parametrize("step", [3, 10])
def test_a_signal_within_or_between_sets_leaves_the_whole_validation_to_the_resumed_run(step: int, batches: int) -> None:
    settings: dict[str, Any] = {"val_check_interval": 3, "val_rows": SETS}
    before = 5 * (step // 3 - (step == 3))

    def when(run: Run) -> bool:
        return run.trainer.step == step and len(run.model.validated_on) >= before + batches

    run = stopped(when, **settings)
    assert (run.trainer.step, run.notes.saved_steps, run.notes.saved[0][0]["validation_due"]) == (step, [step], 1)
    assert len(run.model.validated_on) == before + batches
    again, whole = resumed(run, **settings), Run(**settings).fit()
    for name in SETS:
        assert figures(run, f"{name}_") + figures(again, f"{name}_") == figures(whole, f"{name}_")


def test_early_stopping_monitors_one_set() -> None:
    """The weight comes from 0 to about 9.5: the loss of small rows rises at once, that of large ones falls."""
    ends = {}
    for monitor in ("val_low_loss", "val_high_loss"):
        stopping = EarlyStopping(monitor=monitor, mode="min", min_delta=0.0, patience=2)
        run = Run(val_rows={"low": 2, "high": 30}, val_check_interval=1, early_stopping=stopping).fit()
        ends[monitor] = run.trainer.step, run.trainer.stopped_early
    step, why = ends["val_low_loss"]
    assert step == 3
    assert why is not None
    assert_names(why, "val_low_loss", "2", "step 1")
    assert ends["val_high_loss"][0] > 3
