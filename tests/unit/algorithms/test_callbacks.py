"""The callback protocol: order of the hooks, and logging of metrics that a callback adds."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_kto.algorithms.callbacks import (
    Callback,
    Event,
    ReferenceSync,
    SampleCallback,
    StragglerCallback,
    ThroughputCallback,
)
from nemo_kto.losses.metrics import Metrics
from nemo_kto.telemetry.evaluations import Model, Sample
from nemo_kto.telemetry.watch import RankTimes
from tests.unit.algorithms.trainer_doubles import Run


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
