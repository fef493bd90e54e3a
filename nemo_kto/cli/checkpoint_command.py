"""Commands `nemo-kto checkpoint ls` and `verify`: list the checkpoints of a run, and check their files against hashes.

They do not load torch, so that they respond at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import product
from pathlib import Path

import click

from nemo_kto.cli.command import File, command
from nemo_kto.errors import UserError
from nemo_kto.model_files.checkpoint_files import (
    CHECKPOINTS,
    INFO,
    Checkpoint,
    damage,
    is_checkpoint,
    named_checkpoints,
    read_or_damage,
    size_text,
)
from nemo_kto.utils.files import WRITING
from nemo_kto.utils.text import aligned, terminal_line

DAMAGED = 1  # exit status of verify
_METRICS = ("loss", "acc", "auc", "rewards_margin")
_HEADER = ("step", "written", "size", "data x tensor x pipeline", "metrics", "state")


@command("checkpoint ls", "List step, date, size, layout, metrics and state of each checkpoint.")
@click.argument("folder", metavar="RUN", type=File(), help="a run folder")
def ls(folder: Path) -> None:
    """Run the command; UserError if the folder has no checkpoints, or a file cannot be read."""
    rows = [_HEADER, *(_row(path) for path in _paths(folder))]
    print(*map(terminal_line, aligned(rows)), sep="\n")
    for leftover in sorted((folder / CHECKPOINTS).glob(f"{WRITING}*")):
        print(f"{terminal_line(leftover.name)}: incomplete: it is being written, or its run was stopped")


def _row(path: Path) -> tuple[str, ...]:
    found = read_or_damage(path)
    if isinstance(found, str):
        return (path.name.removeprefix("step_").lstrip("0") or "0", "", "", "", "", f"damaged: {found}")
    layout = found.info.get("layout", {})
    tensor, pipeline, context = (layout.get(axis, 1) for axis in ("tensor", "pipeline", "context"))
    model_ranks = tensor * pipeline * context
    parts = (layout.get("world", model_ranks) // model_ranks, tensor, pipeline)
    return (
        str(found.step),
        datetime.fromtimestamp((path / INFO).stat().st_mtime).strftime("%Y-%m-%d %H:%M"),
        size_text(sum(record.size for record in found.files.values())),
        " x ".join(map(str, parts)) + (f", {context} context" if context > 1 else ""),
        ", ".join(_metrics(found.info.get("metrics", {}))),
        "complete",
    )


def _metrics(metrics: Mapping[str, float]) -> Iterator[str]:
    """Yield the metrics of the last validation, set by set, or those of training if there was no validation."""
    losses = (key.removesuffix("loss") for key in metrics if key.startswith("val_") and key.endswith("_loss"))
    # only a validation set has a rows metric; the prefix in val_preference_loss has none
    validated = [prefix for prefix in losses if prefix == "val_" or f"{prefix}rows" in metrics]
    for prefix, name in product(validated or ["train_"], _METRICS):
        if (value := metrics.get(f"{prefix}{name}")) is not None:
            yield f"{prefix}{name} {value:.4f}"


@command("checkpoint verify", "Compare every file with its hash. Exit status 1 if any is damaged.")
@click.argument("folder", metavar="RUN|CHECKPOINT", type=File(), help="a run folder or a checkpoint")
def verify(folder: Path) -> int:
    """Run the command, and return its exit status; UserError as for ``ls``."""
    status = 0
    for path in [folder] if is_checkpoint(folder) else _paths(folder):
        found = read_or_damage(path)
        wrong = [found] if isinstance(found, str) else damage(path, found.files)
        if wrong:
            status = DAMAGED
            print("\n  ".join(map(terminal_line, [f"{path}: damaged", *wrong])), flush=True)
        elif isinstance(found, Checkpoint):
            size = size_text(sum(record.size for record in found.files.values()))
            print(terminal_line(f"{path}: {len(found.files)} files ({size}) are as they were written"), flush=True)
    return status


def _paths(folder: Path) -> list[Path]:
    """Return the paths of the checkpoints of a run, oldest first; raise UserError if there are none."""
    if not os.path.isdir(folder):
        raise UserError(f"RUN must be an existing folder, got {folder}; correct the path")
    if paths := list(named_checkpoints(folder / CHECKPOINTS)):
        return paths
    raise UserError(f"RUN must be a run folder with checkpoints, got none in {folder / CHECKPOINTS}; correct the path")
