"""A user's losses and callback: found by their paths, with their options and constraints, and their numbers in training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import CLI, GOOD, REPOSITORY, TRAINING, environment, run, stub_training
from tests.helpers.messages import Message, assert_names
from tests.helpers.tiny_models import make_pairs, make_rows, write_rows

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


# Records its calls, and adds a metric.
CALLBACK = """
from pathlib import Path

from nemo_kto.algorithms.callbacks import Callback


class Notes(Callback):
    def __init__(self, *, factor=1.0):
        self.factor = factor

    def note(self, text):
        with Path("notes.txt").open("a") as file:
            file.write(text + "\\n")

    def on_fit_start(self, trainer):
        self.note(f"start {trainer.step} of {trainer.max_steps}")

    def on_train_step_end(self, trainer, event):
        self.note(f"step {event.step}")
        event.report["mine/loss"] = self.factor * event.metrics["loss"]

    def on_validation_end(self, trainer, event):
        self.note(f"validation after {event.step}")

    def on_save(self, trainer, report):
        self.note(f"save {trainer.step}")

    def on_fit_end(self, trainer):
        self.note("end")
"""


REFERENCE_FREE = """
import torch

from nemo_kto.losses.loss import Loss


def likelihood(logps_N, desirable_N, *, beta, desirable_weight, undesirable_weight):
    sign_N = torch.where(desirable_N.bool(), desirable_weight, -undesirable_weight)
    return torch.sigmoid(-beta * sign_N * logps_N)


LOSS = Loss(function=likelihood, needs_reference=False)
"""


def train_on_rows(folder: Path, model: Path, name: str, *given: str) -> tuple[list[dict[str, Any]], str]:
    """Metrics of two steps, and the output."""
    rows = write_rows(folder / "rows.jsonl", make_rows(16) if name == "kto" else make_pairs(16))
    words = [
        f"pretrained_checkpoint.restore_from_path={model}",
        f"model.data.data_prefix={{train: {rows}, validation: {rows}}}",
        f"model.data.cache_dir={folder / 'cache'}",
        "hardware=cpu",
        f"trainer.{name}.max_steps=2",
        "model.global_batch_size=8",
        "model.micro_batch_size=4",
        "model.data.seq_length=64",
        "model.optim.lr=1e-3",
        "exp_manager.create_tensorboard_logger=false",
        "export.report=false",
        "export.enabled=false",
        *given,
    ]
    done = run([*CLI, name, *words], cwd=folder, env=environment(), preload=TRAINING, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = (folder / f"results/gpt_{name}/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if "train/loss" in line], done.stdout + done.stderr


@pytest.fixture(scope="module")
def grad_norm_of_kto(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Norm of the gradient of the first step with KTO's own loss."""
    return train_on_rows(tmp_path_factory.mktemp("kto"), tiny_llama, "kto")[0][0]["train/grad_norm"]


def test_the_loss_of_the_documentation(tiny_llama: Path, tmp_path: Path, grad_norm_of_kto: float) -> None:
    text = (REPOSITORY / "docs/tutorials/custom-loss.md").read_text(encoding="utf-8").split("```python\n# my_losses.py\n")[1]
    (tmp_path / "my_losses.py").write_text(text.partition("```")[0])
    loss = ("model.kto.preference_loss=my_losses.SQUARE", "+model.kto.tau=0.25")
    first, _ = train_on_rows(tmp_path, tiny_llama, "kto", *loss)[0]
    assert first["train/loss"] == pytest.approx(0.25**2, abs=1e-7), "tau squared, where there is no log-ratio yet"
    assert "train/kl" not in first, "no z0, and no KL examples"
    assert first["train/grad_norm"] / grad_norm_of_kto == pytest.approx(8 * 0.25, rel=1e-4)  # 2 beta tau, beta / 4
    # Means over tokens are not taken from the cache of sums that this run has filled.
    with (tmp_path / "my_losses.py").open("a") as file:
        file.write("\nMEANS = Loss(function=square_losses, average_log_probs=True)\n")
    (tmp_path / "results").rename(tmp_path / "kto")
    first, _ = train_on_rows(tmp_path, tiny_llama, "kto", "model.kto.preference_loss=my_losses.MEANS")[0]
    assert first["train/loss"] == pytest.approx(0.5**2, abs=1e-7)


def test_a_loss_of_unpaired_feedback_without_a_reference(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(REFERENCE_FREE)
    (first, _), output = train_on_rows(tmp_path, tiny_llama, "kto", "model.kto.preference_loss=own.LOSS")
    assert_names(output, "none", "own.LOSS")
    for kind in ("chosen", "rejected"):  # what takes the place of a log-ratio, times beta
        assert first[f"train/rewards_{kind}_mean"] == pytest.approx(0.2 * first[f"train/logps_{kind}_mean"], rel=1e-6)


def test_a_callback(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "watch.py").write_text(CALLBACK)
    callbacks = "trainer.callbacks=[{_target_: watch.Notes, factor: 2.0}]"
    steps, _ = train_on_rows(tmp_path, tiny_llama, "kto", callbacks)
    assert [step["mine/loss"] for step in steps] == [2 * step["train/loss"] for step in steps]
    notes = (tmp_path / "notes.txt").read_text().splitlines()
    validated = [
        "validation after 1",
        "save 1",
        "step 2",
        "validation after 2",
        "save 2",
    ]  # the first one is the best so far
    assert notes == ["start 0 of 2", "step 1", *validated, "end"]
