"""A loss in a file of the user's own: the command line finds it by its path and knows its options and their constraints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.commands import CLI, GOOD, pretend, run

FILES = {
    "kto": """
from typing import Annotated

import torch
from annotated_types import Gt, Le

from nemo_kto.algorithms.callbacks import Callback
from nemo_kto.losses.loss import Loss


def tempered(log_ratios_N, desirable_N, *, z0, beta, desirable_weight, undesirable_weight,
             tau: Annotated[float, Gt(0), Le(1)] = 0.5):
    weights_N = torch.where(desirable_N.bool(), -desirable_weight, undesirable_weight)
    return weights_N * torch.tanh(beta * (log_ratios_N - z0) / tau)


class Watch(Callback):
    def __init__(self, *, every=1):
        self.every = every


LOSS = Loss(function=tempered, needs_z0=True)
OTHER = Loss(function=tempered)


def with_rewards(log_ratios_N, desirable_N, *, beta, desirable_weight, undesirable_weight, reward_delta_P):
    raise AssertionError("pairs have rewards, single answers have none")


FOREIGN = Loss(function=with_rewards, needs_rewards=True)
""",
    "dpo": """
from typing import Annotated

import torch
from annotated_types import Ge

from nemo_kto.losses.loss import Loss


def margins(chosen_logratios_P, rejected_logratios_P, *, beta, tau: Annotated[float, Ge(0.25)] = 0.5):
    return torch.relu(tau - beta * (chosen_logratios_P - rejected_logratios_P))


LOSS = Loss(function=margins)
OTHER = Loss(function=margins, needs_rewards=True)


def with_z0(chosen_logratios_P, rejected_logratios_P, *, beta, z0):
    raise AssertionError("pairs have no KL examples")


FOREIGN = Loss(function=with_z0, needs_z0=True)
""",
}
NAMES = {
    "kto": "kto, apo_zero_unpaired or bco",
    "dpo": "dpo, ipo, hinge, robust, exo_pair, nca_pair, bco_pair, sppo_hard, "
    "apo_zero, apo_down, discopop, aot, aot_unpaired, rpo_sq, rpo_bwd_kl, rpo_fwd_kl, simpo or orpo",
}
CONSTRAINTS = {"kto": "above 0 and at most 1", "dpo": "at least 0.25"}


def train(folder: Path, name: str, *given: str) -> tuple[int, str, str]:
    """Status, output and what was said of the mistakes."""
    env = pretend(folder, "print(cfg.loss.preference_loss, cfg.loss.record.needs_z0, cfg.loss.loss_options())")
    (folder / "own.py").write_text(FILES[name])
    done = run([*CLI, name, *GOOD, *given], cwd=folder, env=env)
    return done.returncode, done.stdout, done.stderr.partition("nothing was started\n")[2] or done.stderr


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("given", "options"), [([], "{}"), (["+model.NAME.tau=1"], "{'tau': 1.0}")], ids=["none", "tau"])
def test_a_loss_is_found_by_its_path(tmp_path: Path, name: str, given: list[str], options: str) -> None:
    given = [text.replace("NAME", name) for text in given]
    done = train(tmp_path, name, f"model.{name}.preference_loss=own.LOSS", *given)
    assert done == (0, f"own.LOSS {name == 'kto'} {options}\n", "")
    saved = (tmp_path / f"results/gpt_{name}/config.yaml").read_text()
    assert ("tau: 1.0" in saved) is bool(given)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("+model.NAME.tau=-1", "model.NAME.tau must be CONSTRAINT, got -1"),
        ("+model.NAME.tau=much", "model.NAME.tau must be a float or null, got 'much'"),
        (
            "model.NAME.tau=1",
            "model.NAME.tau is not a key of the configuration, got model.NAME.tau=1; `nemo-kto NAME --help` lists all keys "
            "(options of a loss of your own begin with a plus: +model.NAME.tau=1)",
        ),
        (
            "+model.NAME.quite_other=1",
            "model.NAME.quite_other is not a key of the configuration, got 1; `nemo-kto NAME --help` lists all keys",
        ),
        (
            "model.NAME.preference_loss=own.NONE",
            "model.NAME.preference_loss must be NAMES, or the path of a Loss that can be imported, got own.NONE; "
            "AttributeError: module 'own' has no attribute 'NONE'",
        ),
    ],
)
def test_what_is_wrong_with_a_loss_or_its_options(tmp_path: Path, name: str, given: str, text: str) -> None:
    done = train(tmp_path, name, f"model.{name}.preference_loss=own.LOSS", given.replace("NAME", name))
    text = text.replace("NAMES", NAMES[name]).replace("NAME", name).replace("CONSTRAINT", CONSTRAINTS[name])
    assert done == (2, "", f"  {text}\n")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "kto",
            "takes beta, desirable_weight, undesirable_weight by keyword, got own.OTHER, "
            "which takes beta, desirable_weight, undesirable_weight, z0",
        ),
        ("dpo", "takes beta, reward_delta_P by keyword, got own.OTHER, which takes beta"),
    ],
)
def test_a_loss_whose_function_does_not_take_what_it_would_be_given(tmp_path: Path, name: str, text: str) -> None:
    done = train(tmp_path, name, f"model.{name}.preference_loss=own.OTHER")
    assert done == (2, "", f"  model.{name}.preference_loss must name a loss whose function {text}\n")


@pytest.mark.parametrize(("name", "need"), [("kto", "needs_rewards"), ("dpo", "needs_z0")])
def test_a_loss_that_needs_what_the_algorithm_does_not_have(tmp_path: Path, name: str, need: str) -> None:
    text = f"must name a loss without {need}, which `nemo-kto {name}` cannot give, got own.FOREIGN"
    done = train(tmp_path, name, f"model.{name}.preference_loss=own.FOREIGN")
    assert done == (2, "", f"  model.{name}.preference_loss {text}\n")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            "[{_target_: own.Watch, often: 3}]",
            "must have the arguments that own.Watch takes, got {'often': 3}: got an unexpected keyword argument 'often'",
        ),
        (
            "[nowhere.Watch]",
            "must be a path that can be imported, got nowhere.Watch; ModuleNotFoundError: No module named 'nowhere'",
        ),
        ("[own.LOSS]", "must name subclasses of nemo_kto.algorithms.callbacks.Callback, got own.LOSS"),
        ("[{every: 10}]", "must be a path that can be imported, got None; ValueError: Empty module name"),
    ],
)
def test_a_callback_that_is_none(tmp_path: Path, given: str, text: str) -> None:
    assert train(tmp_path, "kto", f"trainer.callbacks={given}") == (2, "", f"  trainer.callbacks {text}\n")
