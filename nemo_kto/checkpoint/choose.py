"""Which checkpoint is used: rank 0 looks, all ranks share the reading of its files, and all come to the same verdict."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from nemo_kto.artifacts.checkpoint_files import (
    Checkpoint,
    DamagedCheckpoint,
    Written,
    damage,
    file_records,
    find_checkpoints,
    named_checkpoints,
    only_in,
    read_checkpoint,
    refuse_damaged,
)
from nemo_kto.distributed import state
from nemo_kto.errors import UserError

logger = logging.getLogger(__name__)


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is as it was written, every byte of it; None where there never was one. Collective.

    A damaged one is named, and the one before it is looked at.

    Args:
        folder: of the checkpoints of a run.

    Raises:
        UserError: there are checkpoints and all are damaged, or a file cannot be read; on every rank alike.
    """
    reasons = []
    for path in reversed(state.from_rank_zero(lambda: list(named_checkpoints(folder)))):
        found = state.from_rank_zero(partial(_look, path))
        if isinstance(found, Checkpoint):
            wrong = _damage_together(found.folder, file_records(found.info))
            if not wrong:
                return found
            found = wrong[0]
        if state.is_rank_zero():
            logger.warning("%s is damaged and not used: %s", path, found)
        reasons.append(f"{path.name}: {found}")
    if reasons:
        told = f"{folder} must have a checkpoint that is as it was written, but all are damaged"
        remedy = "put one back, or remove them to start again from the first step"
        raise UserError("\n  ".join([told, *reasons, remedy]))
    return None


def best_checkpoint(folder: Path, *, monitor: str, mode: str) -> Checkpoint | None:
    """The checkpoint of a run with the best metric, the newest of equals; None if none has that metric.

    Collective: rank 0 decides for all ranks.

    Args:
        folder: of the checkpoints.
        monitor: name of the metric that ranks checkpoints.
        mode: 'min' or 'max', whether small or large is good.
    """

    def find() -> Checkpoint | None:
        kept = find_checkpoints(folder)
        ranked = [checkpoint for checkpoint in kept if checkpoint.info["metrics"].get(monitor) is not None]
        return min(ranked, key=lambda each: rank_by(each, monitor, mode), default=None)

    return state.from_rank_zero(find)


def rank_by(checkpoint: Checkpoint, monitor: str, mode: str) -> tuple[float, int]:
    """The smaller, the better."""
    value, sign = checkpoint.info["metrics"].get(monitor), 1.0 if mode == "min" else -1.0
    return (math.inf if value is None else sign * value, -checkpoint.step)


def verify(folder: Path, parts: Sequence[str]) -> None:
    """Make sure that parts of a checkpoint, such as state, are as they were written; collective.

    Raises:
        UserError: they are not; names the first file that is not, on every rank alike.
    """
    found = state.from_rank_zero(lambda: _look(folder))
    if isinstance(found, str):
        refuse_damaged(folder, [found])
    else:
        refuse_damaged(folder, _damage_together(folder, only_in(file_records(found.info), parts)))


def _look(path: Path) -> Checkpoint | str:
    """A checkpoint, or what is wrong with its trainer.json or the sizes of its files."""
    try:
        return read_checkpoint(path)
    except DamagedCheckpoint as error:
        return str(error)


def _damage_together(folder: Path, records: Mapping[str, Written]) -> list[str]:
    """What is wrong with files of a checkpoint; every rank reads its share, and all know of all."""
    if state.world_size() == 1:
        return damage(folder, records)
    loads = [0] * state.world_size()
    mine: dict[str, Written] = {}
    for name in sorted(records, key=lambda name: (-records[name].size, name)):
        least = loads.index(min(loads))
        loads[least] += records[name].size + 1
        if least == state.rank():
            mine[name] = records[name]
    wrong: list[str] = []
    problem = state.attempt(lambda: wrong.extend(damage(folder, mine)))
    state.raise_together(problem, "{}")
    return sorted(found for of_rank in state.gather(wrong) for found in of_rank)
