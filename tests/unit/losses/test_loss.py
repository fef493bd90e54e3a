"""What a loss says of itself, and how one is found by its name or its path."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, get_args

import pytest
import torch
from annotated_types import Gt

from nemo_kto.errors import UserError
from nemo_kto.losses.kto import LOSSES
from nemo_kto.losses.loss import Loss, find_loss


def tempered(
    chosen_logratios_P: torch.Tensor,
    rejected_logratios_P: torch.Tensor,
    *,
    beta: float,
    tau: Annotated[float, Gt(0)] = 0.5,
    steps=3,  # type: ignore[no-untyped-def]
) -> torch.Tensor:
    return beta * (chosen_logratios_P - rejected_logratios_P) / tau + steps


def test_options_are_keywords_with_a_default_and_inputs_those_without() -> None:
    loss = Loss(function=tempered)
    assert {name: option.default for name, option in loss.options.items()} == {"tau": 0.5, "steps": 3}
    assert get_args(loss.options["tau"].annotation) == (float, Gt(0))
    assert loss.options["steps"].annotation is int  # not annotated: the type of its default
    assert loss.inputs == {"beta"}
    assert LOSSES["kto"].inputs == {"z0", "beta", "desirable_weight", "undesirable_weight"}


def test_a_loss_needs_a_reference_and_nothing_else_unless_it_says_so() -> None:
    loss = Loss(function=tempered)
    assert (loss.needs_reference, loss.average_log_probs, loss.needs_rewards) == (True, False, False)
    assert (loss.needs_z0, loss.needs_delta, loss.anchor) == (False, False, None)


def test_a_name_and_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_loss("kto", LOSSES) is LOSSES["kto"]
    (tmp_path / "own_losses_of_a_test.py").write_text(
        "from nemo_kto.losses.kto import LOSSES\n\nOWN = LOSSES['kto']\nNO = 1\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", ".")])
    assert find_loss("own_losses_of_a_test.OWN", LOSSES) is LOSSES["kto"]


NAMES = "kto, apo_zero_unpaired or bco"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dpo", f"must be {NAMES}, got dpo"),
        ("", f"must be {NAMES}, got "),
        (
            "no_such_module_at_all.LOSS",
            f"must be {NAMES}, or the path of a Loss that can be imported, got no_such_module_at_all.LOSS; "
            "ModuleNotFoundError: No module named 'no_such_module_at_all'",
        ),
        (
            "nemo_kto.losses.kto.NONE",
            f"must be {NAMES}, or the path of a Loss that can be imported, got nemo_kto.losses.kto.NONE; "
            "AttributeError: module 'nemo_kto.losses.kto' has no attribute 'NONE'",
        ),
        (
            "nemo_kto.losses.kto.kto_losses",
            "must name a Loss (nemo_kto.losses.loss), got nemo_kto.losses.kto.kto_losses, which is a function",
        ),
    ],
)
def test_what_is_no_loss(name: str, text: str) -> None:
    with pytest.raises(UserError) as raised:
        find_loss(name, LOSSES)
    assert str(raised.value) == text


@pytest.mark.parametrize(
    ("needs", "text"),
    [
        (
            {"needs_z0": True, "needs_reference": False},
            "a loss with z0, which is an estimate of KL(policy || reference), must need a reference",
        ),
        (
            {"needs_delta": True, "needs_reference": False},
            "a loss with delta, which is a mean of beta (log pi - log pi_ref), must need a reference",
        ),
        (
            {"needs_z0": True, "needs_delta": True},
            "a loss must not need both z0 and delta: its rewards are measured against one of them",
        ),
    ],
)
def test_needs_that_contradict_each_other(needs: dict[str, bool], text: str) -> None:
    with pytest.raises(ValueError) as raised:
        Loss(function=tempered, **needs)
    assert str(raised.value) == text
