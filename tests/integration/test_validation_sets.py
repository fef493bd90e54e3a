"""A run with two validation sets: its output, log, early stopping, export and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from tests.helpers.commands import CLI, TRAINING, environment, run
from tests.helpers.messages import assert_names
from tests.helpers.tiny_models import make_rows, write_rows

STOPPING = "exp_manager.early_stopping_callback_params"
SETS = "model.data.data_prefix={train: train.jsonl, validation: {helpful: helpful.jsonl, harmless: [harmless.jsonl]}}"


def command(model: Path, *given: str) -> list[str]:
    words = [f"pretrained_checkpoint.restore_from_path={model}", SETS, "hardware=cpu", "model.data.cache_dir=cache"]
    words += [
        "model.global_batch_size=8",
        "model.data.seq_length=64",
        "model.optim.lr=1e-3",
        "trainer.kto.val_check_interval=1",
    ]
    words += ["trainer.kto.save_interval=1", "model.optim.sched.warmup_steps=0", "export.report=false"]
    return [*CLI, "kto", *words, *given]


def logged_in_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_a_run_with_two_validation_sets(tiny_llama: Path, tmp_path: Path) -> None:
    for seed, (name, rows) in enumerate({"train": 40, "helpful": 11, "harmless": 9}.items()):
        write_rows(tmp_path / f"{name}.jsonl", make_rows(rows, seed=seed))
    done = run(command(tiny_llama), cwd=tmp_path, env=environment(), preload=TRAINING, timeout=300)
    key = "exp_manager.checkpoint_callback_params.monitor"
    assert done.returncode == 2
    assert_names(done.stderr, f"{key}", "val_helpful_", "val_harmless_", "train_")
    assert "got val_loss; e.g. val_helpful_loss" in done.stderr

    given = [f"{key}=val_helpful_loss", "exp_manager.create_early_stopping_callback=true", "export.which=best"]
    given += [f"{STOPPING}={{monitor: val_harmless_loss, min_delta: 9, patience: 2}}"]
    done = run(command(tiny_llama, *given), cwd=tmp_path, env=environment(), preload=TRAINING, timeout=300)
    assert done.returncode == 0, done.stderr
    results = tmp_path / "results/gpt_kto"
    lines = [json.loads(line) for line in (results / "metrics.jsonl").read_text().splitlines()]
    validations = [line for line in lines if any(name.startswith("val/") for name in line)]
    assert [line["step"] for line in validations] == [1, 2, 3]
    names = {name for line in validations for name in line if name.startswith("val/")}
    assert {name.split("_")[0] for name in names} == {"val/helpful", "val/harmless"}
    assert {(line["val/helpful_rows"], line["val/harmless_rows"]) for line in validations} == {(11, 9)}

    board = logged_in_tensorboard(results / "tensorboard")
    for name in ("val/helpful_loss", "val/harmless_loss", "val/harmless_rewards_margin", "val/helpful_kl"):
        assert board[name] == [(line["step"], _rounded(line[name])) for line in validations]
    assert not {"val/loss", "val/rows"} & board.keys()

    assert re.search(r"^  validation\.helpful +11 rows \(.*\), \d+ tokens", done.stdout, re.MULTILINE)
    assert re.search(r"^  validation\.harmless +9 rows", done.stdout, re.MULTILINE)
    shown = re.findall(r"^step 3/5  validation (\w+): loss (\S+) ", done.stderr, re.MULTILINE)
    assert shown == [(name, f"{validations[-1][f'val/{name}_loss']:.4f}") for name in ("helpful", "harmless")]
    ends = {name: [f"{line[f'val/{name}_loss']:.4f}" for line in validations] for name in ("helpful", "harmless")}
    for name, (first, _, last) in ends.items():
        assert re.search(rf"^  validation {name} loss +{first} -> {last} \(steps 1 and 3\)$", done.stdout, re.MULTILINE)
    assert "early stopping" in done.stdout
    assert_names(done.stdout, "val_harmless_loss", "9", "last", "2")
    best = min(validations, key=lambda line: (line["val/helpful_loss"], -line["step"]))
    assert_names(done.stdout, "best", f"{best['step']}")
    assert f"(val_helpful_loss {best['val/helpful_loss']:.4f}, " in done.stdout


def _rounded(value: float) -> float:
    """As TensorBoard keeps it."""
    return float(np.float32(value))
