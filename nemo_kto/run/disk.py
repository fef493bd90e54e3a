"""Room on the disk for the checkpoints and the export of a run, and the run folder that all machines must share."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
import uuid
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from nemo_kto.algorithms.duration import interval_steps
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.device.precision import dtype_of
from nemo_kto.distributed import state
from nemo_kto.errors import UserError, plural
from nemo_kto.huggingface.hf_weights import export_bytes
from nemo_kto.huggingface.rank_weights import wanted_adapters, wanted_weights
from nemo_kto.model_files.checkpoint_files import find_checkpoints, size_text
from nemo_kto.run.prepare import Start
from nemo_kto.utils.files import REMOVING, WRITING

_KEPT = "exp_manager.checkpoint_callback_params.save_top_k"
_FP32 = 4
_PATIENCE = 30.0  # seconds until a new file must be visible on all machines; network file systems cache folders


@dataclass(frozen=True, kw_only=True)
class DiskNeed:
    """Bytes that a run will surely write to the file system of its checkpoints, and the free bytes of it."""

    checkpoint: int
    copies: int  # checkpoints that will be there at once, in addition to those that exist
    export: int  # 0 if it is written to another file system
    free: int  # with those of incomplete checkpoints of a killed run, which are removed before the first save

    @property
    def total(self) -> int:
        return self.copies * self.checkpoint + self.export

    def text(self) -> str:
        """Describe the need and the free space."""
        checkpoints = f"{plural(self.copies, 'checkpoint')} of {size_text(self.checkpoint)}"
        export = f" and an export of {size_text(self.export)}" if self.export else ""
        return f"{checkpoints}{export}, {size_text(self.free)} free"


def disk_need(run: ResolvedRun, batches: int, *, resumed_step: int | None) -> DiskNeed:
    """Return the need of a run for its remaining steps; ``batches``: steps of an epoch that its rows allow."""
    cfg, done, total = run.cfg, resumed_step or 0, run.length.total_steps(batches)
    interval = interval_steps(cfg.loop.save_interval, run.length.steps_per_epoch(batches)) or total
    saves = total // interval - done // interval + bool(total % interval) if total > done else 0
    kept, existing = cfg.exp_manager.checkpoint_callback_params.save_top_k, len(find_checkpoints(run.checkpoints))
    copies = saves
    if kept >= 0:  # the last one besides the best, and a new one until an older one is removed
        copies = max(min(saves, 1), min(saves, kept + 2 - existing))
    place, out = _nearest(run.checkpoints), _nearest(Path(cfg.export.path))
    exports = cfg.export.enabled and out.stat().st_dev == place.stat().st_dev
    return DiskNeed(
        checkpoint=checkpoint_bytes(run),
        copies=copies,
        export=export_bytes(run.architecture, run.dtype, run.files.original) if exports else 0,
        free=shutil.disk_usage(place).free + _bytes_of_leftovers(run.checkpoints),
    )


def find_disk_need(run: ResolvedRun, start: Start) -> DiskNeed:
    """Return the need of a run, the same on all ranks; all raise UserError if there is too little room. Collective."""

    def find() -> DiskNeed:
        batches, done = len(start.data.train.batch_sampler), start.resumption.resumed_step
        need = disk_need(run, batches, resumed_step=done)
        check_room(need, run)
        return need

    return state.from_rank_zero(find, doing="comparing the free disk space with the checkpoints")


def checkpoint_bytes(run: ResolvedRun) -> int:
    """Return the size of the tensors of a checkpoint: trained weights, two moments, and values in fp32."""
    shapes = wanted_weights(run.architecture) if run.adapters is None else wanted_adapters(run.architecture, run.adapters)
    optim, weight = run.cfg.model.optim, run.dtype.itemsize
    main = _FP32 if optim.use_distributed_optimizer or weight < _FP32 else 0
    return sum(map(math.prod, shapes.values())) * (weight + main + 2 * dtype_of(optim.moments_dtype).itemsize)


def check_room(need: DiskNeed, run: ResolvedRun) -> None:
    """Raise UserError if the disk of the run folder has too little room for what the run will surely write."""
    if need.total <= need.free:
        return
    section = f"trainer.{run.cfg.recipe.name}"
    ways = [f"lower {_KEPT}={run.cfg.exp_manager.checkpoint_callback_params.save_top_k}"] * (need.copies > 1)
    ways += [f"raise {section}.save_interval={run.cfg.loop.save_interval}"] * (need.copies > 1)
    ways += ["set export.enabled=false, or export.path on another disk"] * (need.export > 0)
    ways += ["choose another disk with exp_manager.explicit_log_dir"]
    text = f"{run.folder} must have room for {need.text()}: {size_text(need.total)} are needed"
    raise UserError(f"{text}; free some space, {', '.join(ways)}")


def _bytes_of_leftovers(folder: Path) -> int:
    leftovers = chain.from_iterable(folder.glob(f"{start}*/**/*") for start in (WRITING, REMOVING))
    return sum(path.stat().st_size for path in leftovers if path.is_file())


def _nearest(path: Path) -> Path:
    """Return the first existing folder of a path and its parents."""
    path = Path(os.path.realpath(path))
    return next(place for place in (path, *path.parents) if place.is_dir())


def check_shared_folder(folder: Path, *, patience: float = _PATIENCE) -> None:
    """Raise UserError on all ranks if a machine does not see a file that rank 0 writes into the run folder; collective.

    Each rank writes its part of a checkpoint into the folder, so that all machines must share it. Nothing is done if
    LOCAL_WORLD_SIZE shows that one machine has all ranks; srun does not set it.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE") or 1) >= state.world_size():
        return
    token = folder / f".shared-{state.from_rank_zero(lambda: uuid.uuid4().hex, doing='checking the run folder')}"
    state.on_rank_zero(token.touch, "the run folder cannot be written: {}")
    try:
        state.raise_together(state.attempt(lambda: _must_see(token, patience)), "{}")
    finally:
        if state.is_rank_zero():
            token.unlink(missing_ok=True)


def _must_see(token: Path, patience: float) -> None:
    end = time.monotonic() + patience
    while not token.exists():
        for folder in reversed(token.parents):
            with contextlib.suppress(OSError):  # NFS caches a folder for up to a minute, unless it is opened
                os.close(os.open(folder, os.O_RDONLY))
        if time.monotonic() > end:
            host = os.uname().nodename
            text = f"the run folder must be on a file system that all machines share, but {host} does not see that of rank 0"
            raise UserError(f"{text}, {token.parent}; set exp_manager.explicit_log_dir to a shared folder")
        time.sleep(0.2)
