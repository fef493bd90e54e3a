"""What a loss says of itself, and how one is found by its name or its path."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
import torch
from annotated_types import Gt

from nemo_kto.errors import UserError
from nemo_kto.losses.kto import LOSSES
from nemo_kto.losses.loss import Loss, find_loss
from tests.helpers.messages import Message


def tempered(  # type: ignore[no-untyped-def]
    chosen_logratios_P: torch.Tensor,
    rejected_logratios_P: torch.Tensor,
    *,
    beta: float,
    tau: Annotated[float, Gt(0)] = 0.5,
    steps=3,
) -> torch.Tensor:
    return beta * (chosen_logratios_P - rejected_logratios_P) / tau + steps


def test_options_have_defaults_and_inputs_have_none() -> None:
    loss = Loss(function=tempered)
    assert {name: option.default for name, option in loss.options.items()} == {"tau": 0.5, "steps": 3}
    assert get_args(loss.options["tau"].annotation) == (float, Gt(0))
    assert loss.options["steps"].annotation is int  # not annotated: the type of its default
    assert loss.inputs == {"beta"}
    assert LOSSES["kto"].inputs == {"z0", "beta", "desirable_weight", "undesirable_weight"}


def test_by_default_a_loss_needs_only_a_reference() -> None:
    loss = Loss(function=tempered)
    assert (loss.needs_reference, loss.average_log_probs, loss.needs_rewards) == (True, False, False)
    assert (loss.needs_z0, loss.needs_delta, loss.anchor) == (False, False, None)


def test_a_loss_by_name_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
            Message(
                "kto", "apo_zero_unpaired", "no_such_module_at_all.LOSS", "ModuleNotFoundError", "no_such_module_at_all"
            ),
        ),
        (
            "nemo_kto.losses.kto.NONE",
            Message("kto", "apo_zero_unpaired", "nemo_kto.losses.kto.NONE", "AttributeError", "nemo_kto.losses.kto", "NONE"),
        ),
        (
            "nemo_kto.losses.kto.kto_losses",
            Message("nemo_kto.losses.loss", "nemo_kto.losses.kto.kto_losses"),
        ),
    ],
)
def test_invalid_losses(name: str, text: str) -> None:
    with pytest.raises(UserError) as raised:
        find_loss(name, LOSSES)
    assert str(raised.value) == text


@pytest.mark.parametrize(
    ("needs", "text"),
    [
        (
            {"needs_z0": True, "needs_reference": False},
            Message("z0", "KL(policy"),
        ),
        (
            {"needs_delta": True, "needs_reference": False},
            Message("pi_ref"),
        ),
        (
            {"needs_z0": True, "needs_delta": True},
            Message("z0", "delta"),
        ),
    ],
)
def test_contradicting_needs(needs: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as raised:
        Loss(function=tempered, **needs)
    assert str(raised.value) == text
