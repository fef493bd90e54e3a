"""Discovery and verification of checkpoints: rank 0 lists them, the ranks share the hashing, and all get the same result."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from nemo_kto.distributed import state
from nemo_kto.errors import UserError
from nemo_kto.model_files.checkpoint_files import (
    Checkpoint,
    Written,
    damage,
    named_checkpoints,
    read_or_damage,
    refuse_damaged,
)

logger = logging.getLogger(__name__)


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest intact checkpoint in a folder, every byte of which is verified; None if there is none. Collective.

    A damaged checkpoint is reported in a warning, and the one before it is tried. Raises UserError on every rank if all
    checkpoints are damaged, or a file cannot be read.
    """
    reasons = []
    for path in reversed(state.from_rank_zero(lambda: list(named_checkpoints(folder)))):
        found = state.from_rank_zero(partial(read_or_damage, path))
        if isinstance(found, Checkpoint):
            problems = _find_damage(found.folder, found.files)
            if not problems:
                return found
            found = problems[0]
        if state.is_rank_zero():
            logger.warning("%s is damaged and is not used: %s", path, found)
        reasons.append(f"{path.name}: {found}")
    if reasons:
        message = f"{folder} must contain an intact checkpoint, but all are damaged"
        raise UserError("\n  ".join([message, *reasons, "restore one, or remove all of them to start from the first step"]))
    return None


def verify(folder: Path, parts: Sequence[str]) -> None:
    """Verify parts of a checkpoint, such as state; collective. UserError on every rank names the first damage."""
    found = state.from_rank_zero(lambda: read_or_damage(folder))
    refuse_damaged(folder, [found] if isinstance(found, str) else _find_damage(folder, found.files_in(*parts)))


def _find_damage(folder: Path, records: Mapping[str, Written]) -> list[str]:
    """Return the damage to files: each rank reads a part of the bytes, and every rank gets all results."""
    if state.world_size() == 1:
        return damage(folder, records)
    loads = [0] * state.world_size()  # bytes to read by rank
    own: dict[str, Written] = {}
    for name in sorted(records, key=lambda name: (-records[name].size, name)):
        reader = loads.index(min(loads))
        loads[reader] += records[name].size + 1
        if reader == state.rank():
            own[name] = records[name]
    found: list[str] = []
    problem = state.attempt(lambda: found.extend(damage(folder, own)))
    state.raise_together(problem, "{}")
    return sorted(text for of_rank in state.gather(found) for text in of_rank)
