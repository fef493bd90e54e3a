"""The Loss record, and finding a loss by name or path."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
import torch
from annotated_types import Gt

from nemo_kto.errors import UserError
from nemo_kto.losses.kto import LOSSES, bco_losses, kto_losses
from nemo_kto.losses.loss import Loss, find_loss
from nemo_kto.losses.preference import aot_losses
from nemo_kto.utils.text import mixture_name
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


def test_a_loss_needs_a_reference_and_what_its_function_takes() -> None:
    loss = Loss(function=tempered)
    assert (loss.needs_reference, loss.average_log_probs, loss.needs_rewards) == (True, False, False)
    assert (loss.needs_z0, loss.needs_delta, loss.anchor) == (False, False, None)
    assert (LOSSES["kto"].needs_z0, LOSSES["bco"].needs_delta, LOSSES["bco"].anchor) == (True, True, "delta")


def test_losses_are_keys_of_caches_and_mixtures_have_names() -> None:
    assert len({Loss(function=tempered), Loss(function=tempered), LOSSES["kto"]}) == 2
    assert mixture_name({"dpo": 0.8, "bco_pair": 0.2}) == "0.8 dpo + 0.2 bco_pair"


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
            Message("kto", "apo_zero_unpaired", "nemo_kto.losses.kto.NONE", "nemo_kto.losses.kto has", "bco_losses"),
        ),
        ("nemo_kto.losses.kto.kto_losses", Message("nemo_kto.losses.loss", "nemo_kto.losses.kto.kto_losses")),
    ],
)
def test_invalid_losses(name: str, text: str) -> None:
    with pytest.raises(UserError) as raised:
        find_loss(name, LOSSES)
    assert str(raised.value) == text


def takes_both(log_ratios_N: torch.Tensor, desirable_N: torch.Tensor, *, z0: float, delta: float) -> torch.Tensor:
    raise AssertionError


def takes_one_partner(first_P: torch.Tensor, second_P: torch.Tensor, *, first_partners_P: torch.Tensor) -> torch.Tensor:
    raise AssertionError


@pytest.mark.parametrize(
    ("function", "settings", "text"),
    [
        (kto_losses, {"needs_reference": False}, Message("z0", "KL(policy")),
        (bco_losses, {"needs_reference": False}, Message("pi_ref")),
        (takes_both, {}, Message("z0", "delta")),
        (takes_one_partner, {"sorts": "answers"}, Message("first_partners_P", "second_partners_P")),
        (aot_losses, {}, Message("sorts", "first_partners_P")),
        (tempered, {"sorts": "margins"}, Message("sorts", "first_partners_P")),
    ],
)
def test_contradicting_needs(function: Any, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as raised:
        Loss(function=function, **settings)
    assert str(raised.value) == text
