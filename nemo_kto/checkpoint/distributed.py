"""Checkpoints of a run: megatron-core's dist_checkpointing, and what the trainer needs to resume as if nothing had happened.

    checkpoints/step_000100/
      state/        weights, optimizer and schedule, loadable at any layout
      rng/          generators of each rank, used at the same layout
      hf/           configuration and tokenizer: the checkpoint needs no other folder
      trainer.json  where the run stands, what it is of, its metrics, the layout and the versions

A model with adapters is saved as only its adapters; trainer.json then names the base model.

A checkpoint is written under another name and gets its own by one rename, when all of it is on disk: a folder with a
checkpoint's name is complete.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import random
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import megatron.core
import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint import CheckpointException

from nemo_kto.checkpoint import model_state
from nemo_kto.checkpoint.checkpoint_files import INFO
from nemo_kto.checkpoint.optimizer import is_distributed, load_optimizer_state, optimizer_state
from nemo_kto.checkpoint.restricted import load_plain, load_state
from nemo_kto.files import REMOVING, WRITING, partial_folder, publish_folder, remove_folder, start_folder
from nemo_kto.models.reference import SwappedWeights
from nemo_kto.parallel import device, state

_NAME = re.compile(r"step_(\d+)")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")  # not copied into every checkpoint
_NOT_WRITTEN = "the checkpoint could not be written: {}; earlier checkpoints are untouched"


class _Info(TypedDict, total=False):
    """The content of a trainer.json; earlier versions lack reference and run, plain models the adapters."""

    trainer: dict[str, int]
    metrics: dict[str, float]
    dtype: str
    layout: dict[str, int]
    distributed_optimizer: bool
    files: dict[str, int]
    adapters: dict[str, object]
    moving_reference: bool
    run: dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder, and the content of its trainer.json."""

    folder: Path
    step: int
    info: _Info


def find_checkpoints(folder: Path) -> list[Checkpoint]:
    """The complete checkpoints of a run, oldest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if name := _NAME.fullmatch(path.name):
            if (info := _whole(path)) is not None:
                found.append(Checkpoint(path, int(name[1]), info))
            else:
                logging.getLogger(__name__).warning("%s is damaged and not used: files are missing or cut short", path)
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def best_checkpoint(folder: Path, *, monitor: str, mode: str) -> Checkpoint | None:
    """The checkpoint of a run with the best metric, the newest of equals; None if none has that metric.

    Collective: rank 0 decides for all ranks.

    Args:
        folder: of the checkpoints.
        monitor, mode: as of :class:`CheckpointManager`.
    """

    def find() -> Checkpoint | None:
        kept = find_checkpoints(folder)
        ranked = [checkpoint for checkpoint in kept if checkpoint.info["metrics"].get(monitor) is not None]
        return min(ranked, key=lambda each: _rank(each, monitor, mode), default=None)

    return state.from_rank_zero(find, doing="looking for the best checkpoint")


def _rank(checkpoint: Checkpoint, monitor: str, mode: str) -> tuple[float, int]:
    """The smaller, the better."""
    value, sign = checkpoint.info["metrics"].get(monitor), 1.0 if mode == "min" else -1.0
    return (math.inf if value is None else sign * value, -checkpoint.step)


def _whole(path: Path) -> _Info | None:
    """Content of a checkpoint's trainer.json; None if that, or a file it lists, is not as it was written."""
    try:
        info = json.loads((path / INFO).read_text(encoding="utf-8"))
        intact = all((path / name).stat().st_size == size for name, size in info["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    return info if intact else None


def checkpoint_dtype(path: Path) -> torch.dtype:
    """The dtype of the weights in a checkpoint."""
    info = json.loads((path / INFO).read_text(encoding="utf-8"))
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[info["dtype"]]


def saved_adapters(path: Path) -> model_state.SavedAdapters | None:
    """What a checkpoint says of its adapters; None if it holds all weights of a model."""
    return model_state.adapters_in(json.loads((path / INFO).read_text(encoding="utf-8")))


def load_weights_only(path: Path, chunks: Sequence[torch.nn.Module]) -> None:
    """Load the weights of a checkpoint, at whatever layout it was written, and nothing else.

    Of a checkpoint of adapters only these are loaded, and the base model stays as it is; of any other checkpoint all but
    the adapters.

    Raises:
        ValueError: the checkpoint holds other adapters than the model has.
        UserError: a file of it holds what could run.
    """
    saved = saved_adapters(path)
    if saved is not None:
        model_state.check_adapters(saved, chunks)
    sharded = model_state.sharded_state(chunks, adapters=saved is not None)
    model_state.load_state(chunks, load_state(sharded, path / "state"), adapters=saved is not None)


@dataclass(kw_only=True, eq=False)
class CheckpointManager:
    """Writes the checkpoints of a run, finds the newest, and removes those that are no longer wanted.

    Attributes:
        folder: where the checkpoints go.
        chunks: this rank's model chunks.
        optimizer: of these chunks.
        scheduler: of the learning rate.
        monitor: name of the metric that ranks checkpoints.
        mode: 'min' or 'max', whether small or large is good.
        save_top_k: checkpoints to keep besides the last; -1 keeps all.
        hugging_face_source: folder whose configuration and tokenizer belong to the model.
        base_model: of a model with adapters, where its other weights came from; ``hugging_face_source`` where None.
        reference_weights: the weights of a reference that is synced; None for a reference that never changes.
        run: what must stay when the run is resumed; kept in every checkpoint.
    """

    folder: Path
    chunks: Sequence[torch.nn.Module]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    monitor: str
    mode: str
    save_top_k: int
    hugging_face_source: Path
    base_model: Path | None = None
    reference_weights: SwappedWeights | None = None
    run: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._adapters = model_state.adapters_of(self.chunks)
        self._strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
        # Results of a save travel within this process. The default starts a server process for them, which costs seconds
        # and outlives a rank that is killed.
        filesystem_async._results_queue = queue.Queue()
        state.on_rank_zero(self._clear_leftovers, _NOT_WRITTEN)

    def save(self, trainer_state: Mapping[str, int], metrics: Mapping[str, float]) -> None:
        """Write a checkpoint; collective. The one before it is safe until this one is complete.

        Raises:
            RuntimeError: it could not be written; says why on every rank.
        """
        final = self.folder / f"step_{trainer_state['step']:06d}"
        partial = partial_folder(final)
        state.on_rank_zero(lambda: self._begin(final), _NOT_WRITTEN)
        try:
            sharded, folder = self._state(is_loading=False), str(partial / "state")
            dist_checkpointing.save(sharded, folder, sharded_strategy=self._strategy, validate_access_integrity=False)
            torch.save(_rng_state(), partial / "rng" / f"{state.rank():05d}.pt")
        except (Exception, CheckpointException) as error:  # torch's own is no Exception
            raise RuntimeError(_NOT_WRITTEN.format(error)) from error
        torch.distributed.barrier()
        info = {"trainer": dict(trainer_state), "metrics": dict(metrics), "dtype": model_state.dtype_name(self.chunks)}
        if self._adapters is not None:
            info["adapters"] = model_state.adapters_info(self._adapters, self.base_model or self.hugging_face_source)
        info["moving_reference"] = self.reference_weights is not None
        info["run"] = dict(self.run)
        info["versions"] = {"torch": torch.__version__, "megatron-core": megatron.core.__version__}
        info |= {"layout": _layout(), "distributed_optimizer": is_distributed(self.optimizer)}
        state.on_rank_zero(lambda: self._publish(final, info), _NOT_WRITTEN)

    def load_latest(self) -> dict[str, int] | None:
        """Put everything back as the newest checkpoint has it; collective.

        Generators are put back where the layout is the one that was saved.

        Returns:
            The trainer's state; None if there is no checkpoint.

        Raises:
            ValueError: it holds other adapters.
            UserError: a file of it holds what could run.
        """
        checkpoints = find_checkpoints(self.folder)
        if not checkpoints:
            return None
        newest = checkpoints[-1]
        model_state.check_adapters(model_state.adapters_in(newest.info), self.chunks)
        loaded = load_state(self._state(is_loading=True), newest.folder / "state")
        model_state.load_state(self.chunks, loaded, adapters=self._adapters is not None)
        if self.reference_weights is not None:
            model_state.load_reference(self.chunks, self.reference_weights, loaded)
        load_optimizer_state(self.optimizer, loaded)
        self.scheduler.load_state_dict(loaded["scheduler"])
        if newest.info["layout"] == _layout():
            _set_rng_state(load_plain(newest.folder / "rng" / f"{state.rank():05d}.pt"))
        return {name: int(value) for name, value in newest.info["trainer"].items()}

    def _state(self, *, is_loading: bool) -> ShardedStateDict:
        adapters = self._adapters is not None
        model = model_state.sharded_state(self.chunks, adapters=adapters)
        of_chunks = model if len(self.chunks) > 1 else model["model0"]
        optimizer = optimizer_state(self.optimizer, of_chunks, is_loading=is_loading)
        reference = {}
        if self.reference_weights is not None:
            reference = model_state.sharded_reference(self.chunks, self.reference_weights)
        return {**model, **reference, **optimizer, "scheduler": self.scheduler.state_dict()}

    def _begin(self, final: Path) -> None:
        partial = start_folder(final)
        for name in ("state", "rng", "hf"):
            (partial / name).mkdir()
        for file in self.hugging_face_source.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES):
                shutil.copy2(file, partial / "hf")

    def _publish(self, final: Path, info: Mapping[str, object]) -> None:
        partial = partial_folder(final)
        # the files without which the checkpoint cannot be loaded
        files = [file for part in ("state", "rng") for file in sorted((partial / part).rglob("*")) if file.is_file()]
        info = {**info, "files": {str(file.relative_to(partial)): file.stat().st_size for file in files}}
        (partial / INFO).write_text(json.dumps(info, indent=2), encoding="utf-8")
        publish_folder(final, durable=True)  # a folder of this name is damaged, or the run would have been resumed from it
        *older, _ = find_checkpoints(self.folder)
        if self.save_top_k >= 0:
            for checkpoint in sorted(older, key=lambda each: _rank(each, self.monitor, self.mode))[self.save_top_k :]:
                remove_folder(checkpoint.folder)

    def _clear_leftovers(self) -> None:
        for start in (WRITING, REMOVING):
            for leftover in self.folder.glob(f"{start}*"):
                shutil.rmtree(leftover)


def _layout() -> dict[str, int]:
    return {
        "world": state.world_size(),
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
    }


def _rng_state() -> dict[str, Any]:
    kept = np.random.get_state(legacy=False)
    assert isinstance(kept, dict)
    return {
        "torch": torch.get_rng_state(),
        "device": device.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
        "python": random.getstate(),
        "numpy": json.dumps(kept, default=np.ndarray.tolist),
    }


def _set_rng_state(kept: Mapping[str, Any]) -> None:
    torch.set_rng_state(kept["torch"])
    device.set_rng_state(kept["device"])
    get_cuda_rng_tracker().set_states(kept["tracker"])
    random.setstate(kept["python"])
    np.random.set_state(json.loads(kept["numpy"]))
