"""Complete training runs on the ranks of a test, without the command line's start."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.config import compose

# What must agree between two runs, as they log it: losses, reference point, rewards, log-probs, gradient norms, experts;
# of a validation set too, where it has one of these names.
_FIGURES = re.compile(
    r"(train|val)/(first_|second_)?(loss|kl$|delta|acc|auc|rewards|logps|grad_norm|preference_loss|sft_loss|moe)"
)
_NEAR_TIES = 0.02  # of an AUC: a few pairs of nearly equal rewards may change their order
_ROUNDING = 2.0**-24  # relative error of a value rounded to fp32


def trajectory(folder: Path) -> list[dict[str, float]]:
    """Logged metrics of a run, one dict per step (training and validation lines together)."""
    steps: dict[int, dict[str, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        figures = {name: value for name, value in row.items() if _FIGURES.match(name)}
        steps.setdefault(row["step"], {}).update(figures)
    return [steps[number] for number in sorted(steps)]


def shards(folder: Path, *, step: int) -> dict[str, Any]:
    """Sizes and hashes of the files with a checkpoint's tensors."""
    info = json.loads((folder / f"checkpoints/step_{step:06d}/trainer.json").read_text())
    return {name: kept for name, kept in info["files"].items() if name.endswith(".distcp")}


def difference(ours: dict[str, float], theirs: dict[str, float]) -> float:
    """Largest difference, relative to the value or, for values near nothing, to 0.1.

    A log-ratio is a difference of two log-probs: a difference of at most the rounding error of one in fp32 counts as none,
    for a reward a tenth of it (beta is 0.1), for a margin, the difference of two rewards, twice as much.
    """
    return largest_difference(ours, theirs)[0]


def largest_difference(ours: dict[str, float], theirs: dict[str, float]) -> tuple[float, str]:
    """The same, with the name of the figure; an AUC must only be near."""
    assert ours.keys() == theirs.keys()
    aucs = [name for name in ours if name.endswith("auc")]
    assert all(abs(ours[name] - theirs[name]) < _NEAR_TIES for name in aucs), [(ours[name], theirs[name]) for name in aucs]
    rounding = max((abs(value) for name, value in theirs.items() if "logps" in name), default=0.0) * _ROUNDING
    parts = {"kl": rounding, "delta": rounding / 10, "margin": rounding / 5, "rewards": rounding / 10}
    amounts = list[tuple[float, str]]()
    for name, value in theirs.items():
        if name not in aucs:
            last_place = next((error for part, error in parts.items() if part in name), 0.0)
            absolute = abs(ours[name] - value)
            amounts.append((0.0 if absolute <= last_place else absolute / max(abs(value), 0.1), name))
    return max(amounts)


def assert_same(
    ours: list[dict[str, float]], theirs: list[dict[str, float]], *, steps: int = 5, first: float = 1e-5, later: float = 1e-4
) -> None:
    """Two runs agree as docs/internals/numerics.md demands: to ``first`` at the first step, to ``later`` over all."""
    assert len(ours) == len(theirs) == steps
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        amount, name = largest_difference(mine, other)
        assert amount < (first if step == 1 else later), f"step {step}: {name} is {mine[name]}, expected {other[name]}"


PEAK = 1e12  # FLOPs per second of the device of train_with_known_peak


def train_with_known_peak(*arguments: Any) -> None:
    """``train`` on a device whose peak is in the table, so that the utilisation is logged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nemo_kto.run.build_trainer.device_peak_flops", lambda device, dtype, name: PEAK)
        train(*arguments)


def tour(model: Path, rows: Path, folder: Path, world_size: int, overrides: list[str], algorithm: str) -> None:
    """``train_with_known_peak`` with two validation sets, a checkpoint of every second step, and an export."""
    others = rows.with_name("others.jsonl")  # which the fixture ``jobs`` writes
    given = [
        f"model.data.data_prefix={{train: {rows}, validation: {{first: {rows}, second: {others}}}}}",
        "exp_manager.checkpoint_callback_params.monitor=val_second_loss",
        "exp_manager.checkpoint_callback_params.save_top_k=-1",
        f"trainer.{algorithm}.save_interval=2",
        "export.enabled=true",
    ]
    train_with_known_peak(model, rows, folder, world_size, [*given, *overrides], algorithm)


def flops(folder: Path, world_size: int) -> list[float]:
    """FLOPs of each step of a run of ``train_with_known_peak``, computed from the utilisation that it logged.

    Those that shared prompts save are included.
    """
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        row["perf/mfu"] / (1 - row.get("perf/shared_fraction", 0.0)) * row["timing/step_time"] * PEAK * world_size
        for row in rows
        if "perf/mfu" in row
    ]


def long(algorithm: str = "kto") -> str:
    """The override for ten steps, well into a second epoch, with a validation after every fifth."""
    return f"trainer.{algorithm}.max_steps=10"


def length(algorithm: str, steps: int) -> list[str]:
    """Overrides for a number of steps; validations take two batches, so that their figures are sums over several."""
    return [
        f"trainer.{algorithm}.max_steps={steps}",
        f"trainer.{algorithm}.val_check_interval={min(steps, 5)}",
        f"trainer.{algorithm}.limit_val_batches=2",
    ]


def train(model: Path, rows: Path, folder: Path, world_size: int, overrides: list[str], algorithm: str = "kto") -> None:
    """Five steps in fp32 and a validation of one batch after the fifth, logged to ``folder``/metrics.jsonl.

    The 96 rows are six steps of an epoch; a job whose length is the point is given more with ``long``.
    """
    from nemo_kto.cli.job import write_report
    from nemo_kto.run import train as job

    job.train(resolved(model, rows, folder, world_size, overrides, algorithm), write_report=write_report)


def resolved(model: Path, rows: Path, folder: Path, world_size: int, overrides: list[str], algorithm: str = "kto") -> Any:
    """The configuration of ``train`` with the same arguments."""
    from nemo_kto.config.resolved import ResolvedRun

    defaults = [
        f"pretrained_checkpoint.restore_from_path={model}",
        f"model.data.data_prefix={{train: {rows}, validation: {rows}}}",
        f"model.data.cache_dir={rows.parent / 'cache'}",
        f"exp_manager.explicit_log_dir={folder}",
        f"trainer.devices={world_size}",
        "trainer.accelerator=cpu",
        "trainer.precision=32",
        f"trainer.{algorithm}.max_epochs=2",
        f"trainer.{algorithm}.max_steps=5",
        f"trainer.{algorithm}.val_check_interval=5",
        f"trainer.{algorithm}.limit_val_batches=1",
        f"trainer.{algorithm}.save_interval=0",
        "model.global_batch_size=16",
        f"model.micro_batch_size={8 if world_size == 1 else 4}",  # two micro-batches at one rank
        "model.data.seq_length=64",
        "model.reference.mode=swap",  # each run evaluates its reference
        "model.optim.lr=5e-4",
        "model.optim.sched.name=constant",
        "model.optim.sched.warmup_steps=2",
        "exp_manager.create_tensorboard_logger=false",
        "export.report=false",
        "exp_manager.samples.count=0",
        "export.enabled=false",
    ]
    given = compose.load([*defaults, *overrides], source=compose.our_source(RECIPES[algorithm]))
    cfg, problems = compose.to_config(given)
    assert cfg is not None, problems
    return ResolvedRun.of(cfg)
