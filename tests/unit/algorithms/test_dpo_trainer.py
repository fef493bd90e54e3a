"""The training loop with a model whose steps have a closed form, reference log-probs of KTO, and several validation sets."""

from __future__ import annotations

import itertools
import threading
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from nemo_kto.algorithms import kto
from nemo_kto.algorithms.callbacks import Callback, Event
from nemo_kto.algorithms.duration import EarlyStopping, interval_steps, limit_batches
from nemo_kto.algorithms.kto import KTOTrainer
from nemo_kto.data.batches import collate
from tests.helpers.messages import Message, assert_names, raises
from tests.unit.algorithms.test_stopping import resumed, stopped
from tests.unit.algorithms.trainer_doubles import LEARNING_RATE, Run


def closed_form(batches: list[list[float]]) -> float:
    """The weight after steps on these batches."""
    weight = 0.0
    for batch in batches:
        weight -= LEARNING_RATE * (weight - sum(batch) / len(batch))
    return weight


@pytest.mark.parametrize(
    ("interval", "steps"),
    [
        (0.1, list(range(1, 11))),
        (0.01, list(range(1, 11))),  # never less than one step
        (0.25, [2, 4, 6, 8, 10]),
        (0.29, [2, 4, 6, 8, 10]),
        (0.3, [3, 6, 9, 10]),
        (1.0, [10]),
        (1, list(range(1, 11))),
        (4, [4, 8, 10]),
        (99, [10]),
        (0, [10]),  # never, but for the end
        (0.0, [10]),
    ],
)
def test_validation_and_save_intervals_are_independent(interval: float, steps: list[int]) -> None:
    validates = Run(val_check_interval=interval).fit().notes
    assert (validates.steps_with("val/loss"), validates.saved_steps) == (steps, [10])
    saves = Run(save_interval=interval).fit().notes
    assert (saves.steps_with("val/loss"), saves.saved_steps) == ([10], steps)


def test_fractions_are_exact() -> None:
    assert interval_steps(0.29, 100) == limit_batches(100, 0.29) == 29  # int(0.29 * 100) is 28
    limits = [(100, 0.001), (100, 0.0), (100, 7), (5, 7), (5, 2.0)]
    assert [limit_batches(batches, limit) for batches, limit in limits] == [1, 0, 7, 5, 5]


@pytest.mark.parametrize(("limit", "steps"), [(1.0, 10), (0.5, 5), (0.01, 1), (3, 3), (1, 1), (99, 10)])
def test_limit_of_the_training_batches_shortens_every_epoch(limit: float, steps: int) -> None:
    run = Run(limit_train_batches=limit, max_epochs=2).fit()
    assert run.trainer.step == len(run.model.trained_on) == 2 * steps
    assert run.trainer.epoch == 2


@pytest.mark.parametrize(("limit", "batches"), [(1.0, 3), (0.5, 1), (2, 2), (99, 3), (0, 0), (0.0, 0)])
def test_limit_of_the_validation_batches(limit: float, batches: int) -> None:
    run = Run(limit_val_batches=limit).fit()
    assert len(run.model.validated_on) == batches
    assert run.notes.steps_with("val/loss") == ([10] if batches else [])


@pytest.mark.parametrize(
    ("max_epochs", "max_steps", "steps"), [(1, -1, 10), (3, -1, 30), (3, 14, 14), (1, 99, 10), (2, 1, 1)]
)
def test_training_ends_at_the_first_limit(max_epochs: int, max_steps: int, steps: int) -> None:
    run = Run(max_epochs=max_epochs, max_steps=max_steps).fit()
    assert run.notes.steps_with("train/loss") == list(range(1, steps + 1))
    assert run.notes.saved_steps == [steps]


def test_every_row_once_per_epoch_in_a_new_order() -> None:
    run = Run(max_epochs=3).fit()
    epochs = [list(itertools.chain(*run.model.trained_on[10 * epoch : 10 * epoch + 10])) for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [[float(row) for row in range(20)]] * 3
    assert epochs[0] != epochs[1] != epochs[2]


def test_steps_equal_gradient_descent() -> None:
    run = Run(max_epochs=2).fit()
    assert float(run.model.weight) == pytest.approx(closed_form(run.model.trained_on), rel=1e-12)
    first = run.model.trained_on[0]
    losses, norms = run.notes.series("train/loss"), run.notes.series("train/grad_norm")
    assert losses[0] == (1, sum(row**2 / 2 for row in first) / 2)
    assert norms[0] == (1, sum(first) / 2), "the first step of the schedule changes the weights"
    assert run.notes.series("train/lr")[0] == (1, LEARNING_RATE)
    assert run.model.zeroed == 20


@pytest.mark.parametrize(("workers", "prefetch"), [(0, False), (1, False), (0, True)])
@pytest.mark.parametrize("stop", [1, 9, 10, 11, 19])
def test_resumes_in_the_middle_of_an_epoch(stop: int, workers: int, prefetch: bool) -> None:
    whole = Run(max_epochs=2).fit()
    first = Run(max_epochs=2, max_steps=stop, workers=workers, prefetch=prefetch).fit()
    state, _ = first.notes.saved[-1]
    second = Run(max_epochs=2, workers=workers, prefetch=prefetch)
    with torch.no_grad():
        second.model.weight.copy_(first.model.weight)  # the part of the checkpoint that is not the trainer's
    second.trainer.load_state_dict(state)
    second.fit()
    assert first.model.trained_on + second.model.trained_on == whole.model.trained_on
    assert first.notes.series("train/loss") + second.notes.series("train/loss") == whole.notes.series("train/loss")
    assert float(second.model.weight) == float(whole.model.weight)
    assert second.notes.series("train/consumed_samples")[-1] == (20, 40)


def test_a_thread_collates_the_next_batch_during_a_step() -> None:
    run, collated = Run(prefetch=True), SimpleQueue[list[float]]()

    def collate(raw: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        collated.put(raw["x"].tolist())
        if 4.0 in raw["x"]:
            raise ValueError("of the third batch")
        return raw

    run.trainer.collate_fn, loader = collate, run.trainer.val_dataloader
    batches: Any = run.trainer.augment_dataloader(loader)  # type: ignore[arg-type]
    assert next(batches)["x"].tolist() == [0.0, 1.0]
    assert [collated.get(timeout=60) for _ in range(2)] == [[0.0, 1.0], [2.0, 3.0]]
    assert next(batches)["x"].tolist() == [2.0, 3.0]
    assert collated.get(timeout=60) == [4.0]
    with pytest.raises(ValueError, match="of the third batch"):
        next(batches)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_a_finished_run_takes_no_step() -> None:
    run = Run()
    run.trainer.load_state_dict({"step": 10, "epoch": 1, "consumed_samples": 20})
    run.fit()
    assert (run.model.trained_on, run.notes.saved, run.notes.logged, run.notes.ended) == ([], [], [], ["success"])


def test_state_is_integers() -> None:
    run = Run(max_epochs=2, max_steps=13).fit()
    expected = {"step": 13, "epoch": 1, "consumed_samples": 26, "steps_per_epoch": 10}
    expected |= {"skipped_steps": 0, "skipped_in_a_row": 0, "validation_due": 0}
    assert run.trainer.state_dict() == expected | {"objective": {"steps": 13}} == run.notes.saved[-1][0]
    assert all(type(value) is int for value in expected.values())
    big = 2**53 + 1  # a float would lose the last one
    run.trainer.load_state_dict({"step": big, "epoch": 0, "consumed_samples": 2 * big})
    assert run.trainer.state_dict()["consumed_samples"] == 2 * big


def test_state_of_the_loss_is_resumed() -> None:
    first, second = Run(max_epochs=2, max_steps=7).fit(), Run(max_epochs=2)
    second.trainer.load_state_dict(first.notes.saved[-1][0])
    assert second.fit().model.steps == 20
    second.trainer.load_state_dict({"step": 10, "epoch": 1, "consumed_samples": 20})  # of a version that saved none
    assert second.model.steps == 20


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"step": 5, "epoch": 0, "consumed_samples": 20}, Message("global_batch_size", "4", "2")),
        ({"step": 5, "epoch": 0, "consumed_samples": 10, "steps_per_epoch": 8}, Message("8", "10")),
    ],
)
def test_refuses_to_resume_with_repeated_or_skipped_examples(state: dict[str, int], message: Message) -> None:
    run = Run()
    with raises(ValueError, *message.parts):
        run.trainer.load_state_dict(state)
    assert run.trainer.step == 0


def test_validation_weighs_every_row_equally() -> None:
    run = Run(val_rows=5)
    loss, metrics = run.trainer.run_validation()
    assert [len(rows) for rows in run.model.validated_on] == [2, 2, 1]
    assert loss == metrics["loss"] == sum(row**2 / 2 for row in range(5)) / 5  # a mean of means would be 3.583
    assert metrics["rows"] == 5
    assert run.model.graphs_kept == 0
    assert run.model.trained_on == []


def test_without_validation_rows() -> None:
    run = Run(val_rows=None, val_check_interval=1).fit()
    assert run.notes.steps_with("val/loss") == []
    assert run.notes.saved_steps == [10]
    with raises(ValueError, "validation", "none"):
        run.trainer.run_validation()


def test_validation_before_the_first_step_is_not_repeated_on_resume() -> None:
    run = Run(val_before_training=True).fit()
    assert run.notes.series("val/loss")[0] == (0, sum(row**2 / 2 for row in range(5)) / 5)
    resumed = Run(val_before_training=True)
    resumed.trainer.load_state_dict({"step": 4, "epoch": 0, "consumed_samples": 8})
    assert resumed.fit().notes.steps_with("val/loss") == [10]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("a disk is full")])
def test_the_logger_is_finalized_after_every_error(error: BaseException) -> None:
    run = Run(save_interval=3)

    def save(*arguments: object) -> None:
        raise error

    run.notes.save = save  # type: ignore[method-assign, assignment]
    with pytest.raises(type(error)):
        run.fit()
    assert run.notes.ended == ["failed"]
    assert run.trainer.step == 3


def test_logged_metrics() -> None:
    run = Run(val_check_interval=5, save_interval=5).fit()
    by_step: dict[int, set[str]] = {}
    for step, metrics in run.notes.logged:
        by_step.setdefault(step, set()).update(metrics)
    every_step = {
        f"train/{name}" for name in ("loss", "rows", "lr", "grad_norm", "skipped_steps", "epoch", "consumed_samples")
    }
    every_step |= {"timing/data", "timing/optimizer", "timing/step_time"}
    assert by_step[1] == every_step
    assert by_step[5] == every_step | {
        "val/loss", "val/rows", "timing/validation", "timing/checkpoint", "timing/checkpoint_stall",
    }  # fmt: skip


def test_the_epoch_of_a_step_counts_from_0() -> None:
    """The epoch is right for its last step, for a resumed run, and for a line that covers steps of two epochs."""
    run = Run(max_epochs=2, limit_train_batches=2, val_check_interval=1, save_interval=1).fit()
    assert run.notes.series("train/epoch") == [(1, 0), (2, 0), (3, 1), (4, 1)]
    assert [state["epoch"] for state, _ in run.notes.saved] == [0, 1, 1, 2], "completed epochs"
    resumed = Run(max_epochs=2, limit_train_batches=2)
    resumed.trainer.load_state_dict({"step": 2, "epoch": 1, "consumed_samples": 4})
    assert resumed.fit().notes.series("train/epoch") == [(3, 1), (4, 1)]
    several = Run(max_epochs=2, limit_train_batches=2, log_every_n_steps=3).fit()
    assert several.notes.series("train/epoch") == [(3, 1), (4, 1)]


def test_a_checkpoint_is_ranked_by_a_validation_of_its_own_weights() -> None:
    run = Run(val_check_interval=4, save_interval=6).fit()
    losses = dict(run.notes.series("val/loss"))
    assert [metrics.get("val_loss") for _, metrics in run.notes.saved] == [None, losses[10]], "not that of step 4"
    assert run.notes.saved[0][1]["train_loss"] == dict(run.notes.series("train/loss"))[6]


def test_step_time_includes_the_reference_pass() -> None:
    run = Run(max_steps=1, val_rows=None)
    reference = run.model.get_ref_policy_logprobs

    def slow(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with run.trainer.timers.phase("reference"):
            torch.randn(300, 300).matmul(torch.randn(300, 300))
            return reference(batch)

    run.model.get_ref_policy_logprobs = slow  # type: ignore[method-assign]
    ((_, metrics), *_) = run.fit().notes.logged
    parts = sum(metrics[f"timing/{name}"] for name in ("data", "reference", "optimizer"))
    assert metrics["timing/reference"] > 0
    assert metrics["timing/step_time"] >= parts


def test_reference_log_probs_of_pairs() -> None:
    run = Run()
    run.trainer.collate_fn = lambda raw: {"x": raw["x"] + 100}
    loader: Any = run.trainer.val_dataloader
    batch = next(run.trainer.augment_dataloader(loader))
    assert batch["x"].tolist() == [100.0, 101.0], "collated before the reference sees it"
    assert batch["ref_policy_log_probs_chosen"].tolist() == [0.0, 1.0]
    assert batch["ref_policy_log_probs_rejected"].tolist() == [2.0, 3.0]


class Reference:
    """Gives one number a sequence: samples first, then KL examples."""

    uses_reference = True

    def get_ref_policy_logprobs(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = len(batch["preference"])
        return -torch.arange(1.0, (2 if "kl_samples" in batch else 1) * rows + 1)


def trainer(**changes: Any) -> KTOTrainer:
    run = Run()
    arguments = {
        name: getattr(run.trainer, name)
        for name in (
            "cfg", "model", "optimizer", "scheduler", "train_dataloader", "val_dataloader", "test_dataloader",
            "logger", "run_timer",
        )
    }  # fmt: skip
    return KTOTrainer(**{**arguments, "ckpt_callback": run.notes, "model": Reference(), **changes})


def test_reference_log_probs_of_examples_and_kl_examples() -> None:
    batch: Any = {"preference": torch.tensor([1, 0, 1]), "kl_samples": torch.zeros(3, 4, dtype=torch.int64)}
    (augmented,) = trainer().augment_dataloader([batch])
    assert augmented["ref_policy_log_probs_samples"].tolist() == [-1.0, -2.0, -3.0]
    assert augmented["ref_policy_log_probs_kl_samples"].tolist() == [-4.0, -5.0, -6.0]
    assert sorted(batch) == ["kl_samples", "preference"], "the loader's batch is unchanged"


def test_no_kl_examples() -> None:
    batch: Any = {"preference": torch.tensor([1, 0])}
    (augmented,) = trainer().augment_dataloader([batch])
    assert augmented["ref_policy_log_probs_samples"].tolist() == [-1.0, -2.0]
    assert "ref_policy_log_probs_kl_samples" not in augmented


def test_a_rank_without_examples_in_the_last_batch() -> None:
    batch: Any = {"preference": torch.zeros(0, dtype=torch.int64), "kl_samples": torch.zeros(0, 4, dtype=torch.int64)}
    (augmented,) = trainer().augment_dataloader([batch])
    assert augmented["ref_policy_log_probs_samples"].shape == augmented["ref_policy_log_probs_kl_samples"].shape == (0,)


def test_a_loss_without_a_reference_gets_no_log_probs() -> None:
    reference = Reference()
    reference.uses_reference = False
    batch: Any = {"preference": torch.tensor([1, 0])}
    assert list(trainer(model=reference).augment_dataloader([batch])) == [batch]


def test_rejects_collate_fn_and_positional_arguments() -> None:
    with pytest.raises(TypeError, match="collate_fn"):
        trainer(collate_fn=lambda raw: raw)
    with pytest.raises(TypeError, match="positional"):
        KTOTrainer(None)  # type: ignore[call-arg, misc, arg-type]


def test_aligners_import_path_of_the_collate_function() -> None:
    assert kto.__all__ == ["KTOTrainer", "kto_custom_collate"]
    assert kto.kto_custom_collate is collate.kto_custom_collate


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
