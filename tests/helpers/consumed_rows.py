"""A callback that records the rows of each step, and functions that read its records."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from nemo_kto.algorithms.callbacks import Callback, Event
from nemo_kto.algorithms.protocols import Trainer
from tests.helpers.training_jobs import train

# Keys of a batch: tokens, and their number without padding.
_SEQUENCES = (("samples", "sample_lengths"), ("chosen", "chosen_lengths"))


class RecordRows(Callback):
    """Appends a line for each step to FOLDER/RANK.jsonl: the examples that this rank trained on, in their order.

    The batch given to the model is recorded, so that any loss of rows between the files and the loss is visible.
    """

    def __init__(self, *, folder: str) -> None:
        self.folder = Path(folder)
        self.rows: list[str] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        model: Any = trainer.model  # type: ignore[attr-defined]
        given = model.get_loss_and_metrics

        @functools.wraps(given)
        def noting(batch: Mapping[str, torch.Tensor], forward_only: bool) -> Any:
            if not forward_only:
                self.rows = _names(batch)
            return given(batch, forward_only=forward_only)

        model.get_loss_and_metrics = noting

    def on_train_step_end(self, trainer: Trainer, event: Event) -> None:
        size = parallel_state.get_data_parallel_world_size()
        note = {"step": event.step, "share": parallel_state.get_data_parallel_rank(), "shares": size, "rows": self.rows}
        file = os.open(self.folder / f"{torch.distributed.get_rank()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, (json.dumps(note) + "\n").encode())  # one call: whole, whenever the process is killed
        os.close(file)


def _names(batch: Mapping[str, torch.Tensor]) -> list[str]:
    """A short name of each example, by its tokens."""
    ((tokens, lengths),) = [(batch[of], batch[length]) for of, length in _SEQUENCES if of in batch]
    return [
        hashlib.sha256(bytes(str(sequence[:length].tolist()), "ascii")).hexdigest()[:12]
        for sequence, length in zip(tokens, lengths.tolist(), strict=True)
    ]


def train_and_record(
    model: Path, rows: Path, folder: Path, world_size: int, overrides: list[str], algorithm: str = "kto"
) -> None:
    """Train with a record in ``folder``/rows."""
    callback = f"trainer.callbacks=[{{_target_: tests.helpers.consumed_rows.RecordRows, folder: {folder / 'rows'}}}]"
    train(model, rows, folder, world_size, [*overrides, callback], algorithm)


def recorded_rows(folder: Path) -> dict[int, list[str]]:
    """Step -> the rows of its global batch, one data-parallel rank after the other; the layout decides who has which.

    A step that was taken again, after a crash, must have had the same rows; so must ranks that share their examples.

    Raises:
        ValueError: they had others.
    """
    shares: dict[int, dict[tuple[int, int], list[str]]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for note in map(json.loads, file.read_text().splitlines()):
            kept = shares.setdefault(note["step"], {}).setdefault((note["share"], note["shares"]), note["rows"])
            if kept != note["rows"]:
                raise ValueError(f"step {note['step']} had other rows when it was taken again")
    return {step: _all_rows(of_step) for step, of_step in sorted(shares.items())}


def _all_rows(of_step: Mapping[tuple[int, int], list[str]]) -> list[str]:
    (count,) = {shares for _, shares in of_step}
    assert len(of_step) == count, "each data-parallel rank recorded its share"
    return [row for _, rows in sorted(of_step.items()) for row in rows]
