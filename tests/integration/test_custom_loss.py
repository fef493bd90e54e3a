"""A user's loss: found by its path, with its options and their constraints on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.commands import CLI, GOOD, run, stub_training
from tests.helpers.messages import Message

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


LOSS = Loss(function=tempered)


def without_weights(log_ratios_N, desirable_N, *, z0, beta):
    raise AssertionError("the weights of the configuration would be ignored")


OTHER = Loss(function=without_weights)


def with_rewards(log_ratios_N, desirable_N, *, beta, desirable_weight, undesirable_weight, reward_delta_P):
    raise AssertionError("pairs have rewards, single answers have none")


FOREIGN = Loss(function=with_rewards)
""",
    "dpo": """
from typing import Annotated

import torch
from annotated_types import Ge

from nemo_kto.losses.loss import Loss


def margins(chosen_logratios_P, rejected_logratios_P, *, beta, tau: Annotated[float, Ge(0.25)] = 0.5):
    return torch.relu(tau - beta * (chosen_logratios_P - rejected_logratios_P))


LOSS = Loss(function=margins)


def with_z0(chosen_logratios_P, rejected_logratios_P, *, beta, z0):
    raise AssertionError("pairs have no KL examples")


FOREIGN = Loss(function=with_z0)
""",
}


def train(folder: Path, name: str, *given: str) -> tuple[int, str, str]:
    """Status, output and errors."""
    env = stub_training(folder, "print(cfg.loss.preference_loss, cfg.loss.definition.needs_z0, cfg.loss.loss_options())")
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


@pytest.mark.parametrize(
    ("name", "given", "names"),
    [
        ("kto", "+model.NAME.tau=-1", ["model.NAME.tau", "1", "-1"]),
        ("dpo", "+model.NAME.tau=-1", ["model.NAME.tau", "0.25", "-1"]),
        ("kto", "model.NAME.tau=1", ["model.NAME.tau", "model.NAME.tau=1", "--help", "all", "plus", "+model.NAME.tau=1"]),
        ("dpo", "+model.NAME.quite_other=1", ["model.NAME.quite_other", "1", "NAME", "--help", "all"]),
        ("kto", "model.NAME.preference_loss=own.NONE", ["model.NAME.preference_loss", "own.NONE", "own has", "tempered"]),
    ],
)
def test_errors_in_a_custom_loss_or_its_options(tmp_path: Path, name: str, given: str, names: list[str]) -> None:
    done = train(tmp_path, name, f"model.{name}.preference_loss=own.LOSS", given.replace("NAME", name))
    names = [part.replace("NAME", name) for part in names]
    assert done == (2, "", Message(*names))


def test_a_custom_loss_with_wrong_parameters(tmp_path: Path) -> None:
    done = train(tmp_path, "kto", "model.kto.preference_loss=own.OTHER")
    assert done == (2, "", Message("model.kto.preference_loss", "desirable_weight", "undesirable_weight", "own.OTHER"))


@pytest.mark.parametrize(("name", "need"), [("kto", "reward_delta_P"), ("dpo", "z0")])
def test_a_custom_loss_with_needs_of_another_algorithm(tmp_path: Path, name: str, need: str) -> None:
    done = train(tmp_path, name, f"model.{name}.preference_loss=own.FOREIGN")
    assert done == (2, "", Message(f"model.{name}.preference_loss", need, f"nemo-kto {name}", "own.FOREIGN"))


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("[{_target_: own.Watch, often: 3}]", ["own.Watch", "often", "3", "unexpected"]),
        ("[own.LOSS]", ["nemo_kto.algorithms.callbacks.Callback", "own.LOSS"]),
    ],
)
def test_a_path_that_is_not_a_callback(tmp_path: Path, given: str, names: list[str]) -> None:
    assert train(tmp_path, "kto", f"trainer.callbacks={given}") == (2, "", Message("trainer.callbacks", *names))
