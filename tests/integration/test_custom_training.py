"""Training with a user's losses and callback; the numbers are checked against manual values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import CLI, REPOSITORY, TRAINING, environment, run
from tests.helpers.messages import assert_names
from tests.helpers.tiny_models import make_pairs, make_rows, write_rows

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


def train(folder: Path, model: Path, name: str, *given: str) -> tuple[list[dict[str, Any]], str]:
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
    return train(tmp_path_factory.mktemp("kto"), tiny_llama, "kto")[0][0]["train/grad_norm"]


def test_the_loss_of_the_documentation(tiny_llama: Path, tmp_path: Path, grad_norm_of_kto: float) -> None:
    text = (REPOSITORY / "docs/tutorials/custom-loss.md").read_text(encoding="utf-8").split("```python\n# my_losses.py\n")[1]
    (tmp_path / "my_losses.py").write_text(text.partition("```")[0])
    loss = ("model.kto.preference_loss=my_losses.SQUARE", "+model.kto.tau=0.25")
    first, _ = train(tmp_path, tiny_llama, "kto", *loss)[0]
    assert first["train/loss"] == pytest.approx(0.25**2, abs=1e-7), "tau squared, where there is no log-ratio yet"
    assert "train/kl" not in first, "no z0, and no KL examples"
    assert first["train/grad_norm"] / grad_norm_of_kto == pytest.approx(8 * 0.25, rel=1e-4)  # 2 beta tau, beta / 4
    # Means over tokens are not taken from the cache of sums that this run has filled.
    with (tmp_path / "my_losses.py").open("a") as file:
        file.write("\nMEANS = Loss(function=square_losses, average_log_probs=True)\n")
    (tmp_path / "results").rename(tmp_path / "kto")
    first, _ = train(tmp_path, tiny_llama, "kto", "model.kto.preference_loss=my_losses.MEANS")[0]
    assert first["train/loss"] == pytest.approx(0.5**2, abs=1e-7)


def test_a_loss_of_unpaired_feedback_without_a_reference(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(REFERENCE_FREE)
    (first, _), output = train(tmp_path, tiny_llama, "kto", "model.kto.preference_loss=own.LOSS")
    assert_names(output, "none", "own.LOSS")
    for kind in ("chosen", "rejected"):  # what takes the place of a log-ratio, times beta
        assert first[f"train/rewards_{kind}_mean"] == pytest.approx(0.2 * first[f"train/logps_{kind}_mean"], rel=1e-6)


def test_a_callback(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "watch.py").write_text(CALLBACK)
    callbacks = "trainer.callbacks=[{_target_: watch.Notes, factor: 2.0}]"
    steps, _ = train(tmp_path, tiny_llama, "kto", callbacks)
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
