"""Steps with non-finite losses or gradients."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from nemo_kto.errors import UserError
from tests.helpers.messages import Message, raises
from tests.unit.algorithms.test_dpo_trainer import closed_form
from tests.unit.algorithms.test_stopping import resumed
from tests.unit.algorithms.trainer_doubles import Run


def rows(batch: list[float]) -> str:
    """As the message names them: row k holds the number k."""
    return ", ".join(f"rows.jsonl:{int(row) + 1}" for row in batch)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_loss_skips_the_step(value: float, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(save_interval=5)
    run.model.spoil = lambda step: value if step == 3 else 0.0
    with caplog.at_level(logging.WARNING):
        run.fit()
    batches = run.model.trained_on
    assert len(batches) == 10, "the data position advances"
    assert float(run.model.weight) == closed_form(batches[:2] + batches[3:])
    assert run.optimizer.calls == 9
    assert [count for _, count in run.notes.series("train/skipped_steps")] == [0, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert 3 not in run.notes.steps_with("train/grad_norm")
    assert (run.notes.saved_steps, run.notes.ended) == ([5, 10], ["success"])
    assert all(math.isfinite(metric) for _, metrics in run.notes.saved for metric in metrics.values())
    assert [record.getMessage() for record in caplog.records] == [
        Message("3", f"{value}", "0", "2", "batch", f"{rows(batches[2])}", "1", "skipped")
    ]


def test_a_non_finite_gradient_skips_the_step() -> None:
    run = Run()
    run.optimizer.skip = {2, 5}
    run.fit()
    assert run.model.steps == 8, "a skipped step does not change the model's state"
    assert [count for _, count in run.notes.series("train/skipped_steps")] == [0, 1, 1, 1, 2, 2, 2, 2, 2, 2]
    assert 2 not in run.notes.steps_with("train/grad_norm")


def test_too_many_skipped_steps_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(save_interval=4)
    run.optimizer.skip = {2, 3, 6, 7, 8}
    with caplog.at_level(logging.WARNING), pytest.raises(UserError) as ended:
        run.fit()
    batches = run.model.trained_on
    assert len(batches) == 8
    assert str(ended.value) == (
        Message(
            "8",
            "inf",
            "batch",
            f"{rows(batches[7])}",
            "3",
            "trainer.max_skipped_steps=3",
            "last",
            "checkpoint",
            "[4]",
            "model.optim.lr",
        )
    )
    assert [record.getMessage()[-8:] for record in caplog.records] == ["1 in a row"[-8:], "2 in a row"[-8:]] * 2
    assert (run.notes.saved_steps, run.notes.ended) == ([4], ["failed"])


def test_a_limit_of_one_skipped_step() -> None:
    run = Run(max_skipped_steps=1)
    run.optimizer.skip = {1}
    with raises(UserError, "1", "trainer.max_skipped_steps=1", "last"):
        run.fit()


def test_a_resumed_run_keeps_both_counts() -> None:
    first = Run(max_epochs=2, max_steps=5)
    first.optimizer.skip = {1, 4, 5}
    state, _ = first.fit().notes.saved[-1]
    assert (state["skipped_steps"], state["skipped_in_a_row"]) == (3, 2)
    second = Run(max_epochs=2)
    second.optimizer.skip = {1}
    second.trainer.load_state_dict(state)
    with raises(UserError, "6", "3"):
        second.fit()
    assert resumed(first, max_epochs=2).notes.series("train/skipped_steps")[0] == (6, 3)


def test_non_finite_weights_are_not_saved() -> None:
    run = Run(save_interval=2)

    def spoil(step: int) -> float:
        if step == 4:
            with torch.no_grad():
                run.model.weight.fill_(math.inf)
        return 0.0

    run.model.spoil = spoil
    run.optimizer.step = lambda: (True, 1.0, None)  # type: ignore[method-assign]
    with pytest.raises(UserError) as ended:
        run.fit()
    assert str(ended.value) == Message("4", "last", "checkpoint", "[2]", "model.optim.lr")
    assert run.notes.saved_steps == [2]
