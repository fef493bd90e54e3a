"""Checkpoints of a run: megatron-core's dist_checkpointing and the trainer state that an exact resume needs.

    checkpoints/step_000100/
      state/        weights, optimizer state and learning rate schedule, loadable at any layout
      rng/          random generators of each rank, restored only at the same layout
      hf/           configuration and tokenizer: the checkpoint needs no other folder
      trainer.json  trainer state, values a resumed run must match, metrics, layout, versions, and the hashes of all files

A checkpoint of a model with adapters holds only the adapters; its trainer.json then names the base model.

A checkpoint is written under a temporary name, by a thread of each rank while training continues. It is renamed once, when
the parts of all ranks are on disk: a folder with a checkpoint's name is complete.
"""

from __future__ import annotations

import inspect
import io
import json
import logging
import queue
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import megatron.core
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint import CheckpointException

from nemo_kto.architecture.config_file import CONFIG
from nemo_kto.checkpoint.safe_loading import load_plain, load_sharded, read_errors
from nemo_kto.checkpoint.sharded_state import (
    SavedAdapters,
    adapters_in,
    adapters_of,
    check_adapters,
    dtype_name,
    get_rng_state,
    is_distributed,
    load_optimizer_state,
    load_reference,
    load_schedule,
    load_weights,
    optimizer_state,
    set_rng_state,
    sharded_reference,
    sharded_weights,
)
from nemo_kto.checkpoint.writer import FileWriter, PlannedSave, Write, bytes_to_write, start_removal, write_bytes, write_file
from nemo_kto.distributed import state
from nemo_kto.errors import UserError
from nemo_kto.model_files.checkpoint_files import (
    INFO,
    Checkpoint,
    Written,
    checkpoint_folder,
    damage,
    find_checkpoints,
    hash_file,
    info_text,
    named_checkpoints,
    rank_by,
    read_or_damage,
    refuse_damaged,
    size_text,
)
from nemo_kto.model_files.companion_files import model_config, read_companions
from nemo_kto.models.engine.reference import SwappedWeights
from nemo_kto.utils.files import NO_ROOM, REMOVING, WRITING, partial_folder, publish_folder, read_bytes, start_folder

logger = logging.getLogger(__name__)

_NOT_WRITTEN = "the checkpoint could not be written: {}; earlier checkpoints are untouched"
_MORE_ROOM = "free some space, or keep fewer checkpoints with exp_manager.checkpoint_callback_params.save_top_k"
# megatron-core 0.19 has several strategies for an asynchronous save
_SAVE_OPTIONS = (
    {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters else {}
)


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


def checkpoint_dtype(path: Path) -> torch.dtype:
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[_read_info(path)["dtype"]]


def saved_adapters(path: Path) -> SavedAdapters | None:
    """Return the adapter entry of a checkpoint's trainer.json; None if the checkpoint holds all weights of a model."""
    return adapters_in(_read_info(path))


def _read_info(path: Path) -> dict[str, Any]:
    return dict(json.loads(read_bytes(path / INFO)))


def load_weights_only(path: Path, chunks: Sequence[torch.nn.Module]) -> None:
    """Load only the weights of a checkpoint, written at any layout; collective.

    From a checkpoint of adapters only the adapters are loaded, and the base model keeps its weights; from any other
    checkpoint everything but the adapters is loaded. Raises UserError if it holds other adapters than the model has, is
    damaged, or one of its files could run code when loaded.
    """
    verify(path, ("state", "hf"))
    if (saved := saved_adapters(path)) is not None:
        check_adapters(saved, chunks)
    sharded = sharded_weights(chunks, adapters=saved is not None)
    with read_errors(path / "state"):
        load_weights(chunks, load_sharded(sharded, path / "state"), adapters=saved is not None)


@dataclass(frozen=True, kw_only=True)
class WrittenCheckpoint:
    """A complete checkpoint."""

    step: int
    seconds: float  # from the request until the checkpoint was complete
    stall_seconds: float  # the part of them during which training waited


@dataclass(kw_only=True, eq=False)
class _PendingSave:
    final: Path
    step: int
    info: dict[str, Any]
    need: int  # bytes to write, over all ranks
    started: float
    stall_seconds: float = 0.0
    thread: FileWriter | None = None
    results: list[Any] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class CheckpointManager:
    """Writer and loader of a run's checkpoints, which also removes those that are no longer kept.

    Raises UserError if a file to be copied into every checkpoint is a link out of its folder.
    """

    folder: Path
    chunks: Sequence[torch.nn.Module]  # this rank's model chunks
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    monitor: str  # name of the metric that ranks checkpoints
    mode: str  # 'min' or 'max': whether small or large values are better
    save_top_k: int  # checkpoints to keep besides the last; -1 keeps all
    async_save: bool  # whether training continues while a checkpoint is written
    hugging_face_source: Path  # folder with the configuration and the tokenizer of the model
    base_model: Path | None = None  # for a model with adapters, the source of its base weights; None: hugging_face_source
    original: Path | None = None  # folder with the weights of the model that are not trained; None if none is needed
    reference_weights: SwappedWeights | None = None  # of a reference that is synced; None if it never changes
    run: Mapping[str, Any] = field(default_factory=dict)  # values that a resumed run must share with this one

    def __post_init__(self) -> None:
        self._adapters = adapters_of(self.chunks)
        self._planned = PlannedSave()
        # Values replicated over data-parallel ranks are divided among them once: the structure never changes.
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._strategy = FullyParallelSaveStrategyWrapper(self._planned, group, do_cache_distribution=True)
        # megatron-core would start a server process for the results of a save, which costs seconds and outlives a rank that
        # is killed. Results do not pass through that queue here, so a plain queue takes its place.
        filesystem_async._results_queue = queue.Queue()
        self._save: _PendingSave | None = None
        self._removal = start_removal([])
        self._companions: dict[str, bytes] = {}
        state.on_rank_zero(self._prepare, "{}")

    def save(self, trainer_state: Mapping[str, Any], metrics: Mapping[str, float]) -> WrittenCheckpoint | None:
        """Start a checkpoint of the current state; collective. A pending checkpoint is finished first.

        Without ``async_save`` the new checkpoint is returned; with it the earlier one that had to be finished first, if any.
        Raises UserError if there is not enough free space, and RuntimeError if the checkpoint could not be written.
        """
        started = time.monotonic()
        earlier = self._complete(wait=True)
        sharded = self._sharded_state(is_loading=False)
        need = state.sum_over_ranks(bytes_to_write(sharded)) + sum(map(len, self._companions.values()))
        final = checkpoint_folder(self.folder, trainer_state["step"])
        info = self._info(trainer_state, metrics)
        self._save = save = _PendingSave(final=final, step=trainer_state["step"], info=info, need=need, started=started)
        self._on_rank_zero(lambda: self._begin(save))
        self._planned.copies_to_host = self.async_save
        try:
            dist_checkpointing.save(  # writes the common state, and plans what each rank writes
                sharded,
                str(partial_folder(final) / "state"),
                sharded_strategy=self._strategy,
                validate_access_integrity=False,
                async_sharded_save=True,
                **_SAVE_OPTIONS,
            )
            files, save.results = self._planned.take_files()
        except (Exception, CheckpointException) as error:  # CheckpointException is no subclass of Exception
            raise RuntimeError(_NOT_WRITTEN.format(error)) from error
        rng_state = io.BytesIO()
        torch.save(get_rng_state(), rng_state)
        parts: dict[str, Write] = {f"state/{name}": write for name, write in files.items()}
        parts[f"rng/{state.rank():05d}.pt"] = write_bytes(rng_state.getvalue())
        save.thread = FileWriter(folder=partial_folder(final), files=parts)
        save.thread.start()
        save.stall_seconds = time.monotonic() - started
        return earlier if self.async_save else self.finish()

    def poll(self) -> WrittenCheckpoint | None:
        """Publish the pending checkpoint once the parts of all ranks are on disk, and return it; else None. Collective.

        Raises UserError if the disk is full, and RuntimeError if a rank could not write its part.
        """
        return self._complete(wait=False)

    def finish(self) -> WrittenCheckpoint | None:
        """Wait for the pending checkpoint, if there is one, and return it; collective. Raises like :meth:`poll`."""
        written = self._complete(wait=True)
        self._removal.join()
        return written

    def load(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Restore the state of a checkpoint and return the trainer's state; collective.

        The random generators are restored only if the layout equals the saved one. Raises UserError if the checkpoint holds
        other adapters, or one of its files is not as this program writes it.
        """
        check_adapters(adapters_in(checkpoint.info), self.chunks)
        folder, trainer = checkpoint.folder, dict(checkpoint.info["trainer"])
        loaded = load_sharded(self._sharded_state(is_loading=True), folder / "state")
        with read_errors(folder / "state"):
            load_weights(self.chunks, loaded, adapters=self._adapters is not None)
            if self.reference_weights is not None:
                load_reference(self.chunks, self.reference_weights, loaded)
            load_optimizer_state(self.optimizer, loaded)
            load_schedule(self.scheduler, loaded["scheduler"], step=trainer["step"])
        if checkpoint.info["layout"] == _layout():
            with read_errors(rng_file := folder / "rng" / f"{state.rank():05d}.pt"):
                set_rng_state(load_plain(rng_file))
        return trainer

    def _sharded_state(self, *, is_loading: bool) -> ShardedStateDict:
        model = sharded_weights(self.chunks, adapters=self._adapters is not None)
        of_chunks = model if len(self.chunks) > 1 else model["model0"]
        optimizer = optimizer_state(self.optimizer, of_chunks, is_loading=is_loading)
        reference = {}
        if self.reference_weights is not None:
            reference = sharded_reference(self.chunks, self.reference_weights)
        return {**model, **reference, **optimizer, "scheduler": self.scheduler.state_dict()}

    def _info(self, trainer_state: Mapping[str, Any], metrics: Mapping[str, float]) -> dict[str, Any]:
        info: dict[str, Any] = {"trainer": dict(trainer_state), "metrics": dict(metrics)}
        info["dtype"] = dtype_name(self.chunks)
        if self._adapters is not None:
            base_model = self.base_model or self.hugging_face_source
            info["adapters"] = {"base_model": str(base_model.absolute()), "settings": asdict(self._adapters)}
            if (base_format := unwrap_model(self.chunks[0]).base_format) is not None:
                info["adapters"]["base_format"] = base_format
        if self.original is not None:
            info["original"] = str(self.original.absolute())
        info["moving_reference"] = self.reference_weights is not None
        info["run"] = dict(self.run)
        info["versions"] = {"torch": torch.__version__, "megatron-core": megatron.core.__version__}
        return info | {"layout": _layout(), "distributed_optimizer": is_distributed(self.optimizer)}

    def _prepare(self) -> None:
        self._companions = read_companions(self.hugging_face_source, into="the checkpoints")
        if CONFIG in self._companions and not unwrap_model(self.chunks[0]).share_embeddings_and_output_weights:
            config = model_config(self.hugging_face_source, tied=False)
            self._companions[CONFIG] = f"{json.dumps(config, indent=2)}\n".encode()
        for start in (WRITING, REMOVING):
            for leftover in self.folder.glob(f"{start}*"):
                shutil.rmtree(leftover)

    def _begin(self, save: _PendingSave) -> None:
        """Create the partial folder with the model's companion files, if the disk has room for the whole checkpoint."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if save.need > shutil.disk_usage(self.folder).free:
            self._removal.join()  # a pending removal frees space
        if save.need > shutil.disk_usage(self.folder).free:
            raise self._no_room(save)
        folder = start_folder(save.final)
        save.info["files"] = {}
        for name in ("state", "rng", "hf"):
            (folder / name).mkdir()
        for name, content in self._companions.items():
            file = folder / "hf" / name
            file.parent.mkdir(exist_ok=True)
            save.info["files"][f"hf/{name}"] = write_file(file, write_bytes(content))

    def _complete(self, *, wait: bool) -> WrittenCheckpoint | None:
        """Publish the pending checkpoint if the parts of all ranks are on disk; with ``wait``, wait for them."""
        if (save := self._save) is None or save.thread is None:
            return None
        began = time.monotonic()
        if wait:
            save.thread.join()
        is_busy, has_failed = state.any_rank(save.thread.is_alive(), save.thread.problem is not None)
        if has_failed:
            self._raise_together(save.thread.problem)
        if is_busy:
            return None
        of_ranks: list[Any] = [None] * state.world_size()
        own_part = (save.results, save.thread.written)
        torch.distributed.gather_object(own_part, of_ranks if state.is_rank_zero() else None, dst=0)
        self._on_rank_zero(lambda: self._publish(save, of_ranks))
        self._save, now = None, time.monotonic()
        return WrittenCheckpoint(step=save.step, seconds=now - save.started, stall_seconds=save.stall_seconds + now - began)

    def _publish(self, save: _PendingSave, of_ranks: Sequence[tuple[list[Any], dict[str, Written]]]) -> None:
        folder = partial_folder(save.final)
        self._planned.write_index([results for results, _ in of_ranks])
        files = save.info["files"] | {name: written for _, of_rank in of_ranks for name, written in of_rank.items()}
        others = (file for file in (folder / "state").iterdir() if f"state/{file.name}" not in files)
        files |= {f"state/{file.name}": hash_file(file) for file in others}  # small files written by megatron-core
        info = {**save.info, "files": {name: files[name]._asdict() for name in sorted(files)}}
        (folder / INFO).write_text(info_text(info), encoding="utf-8")
        publish_folder(save.final)  # an existing folder of this name is damaged: else the run would have resumed from it
        if self.save_top_k >= 0:
            older = [each for each in find_checkpoints(self.folder) if each.step < save.step]
            ranked = sorted(older, key=lambda each: rank_by(each, self.monitor, self.mode))
            self._removal.join()
            self._removal = start_removal([checkpoint.folder for checkpoint in ranked[self.save_top_k :]])

    def _on_rank_zero(self, action: Callable[[], object]) -> None:
        """Run a part of the current save on rank 0; either all ranks succeed, or all fail and its files are removed."""
        error = None
        try:
            if state.is_rank_zero():
                action()
        except Exception as caught:
            error = caught
        if state.any_rank(error is not None)[0]:
            self._raise_together(error)

    def _raise_together(self, error: Exception | None) -> None:
        """Abort the current save because of an error on some rank, remove its files, and raise; collective."""
        save = self._save
        assert save is not None
        self._save = None
        if save.thread is not None:
            save.thread.stop()
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            error = self._no_room(save, error)
        problem = None if error is None else state.Problem.of(error)
        torch.distributed.barrier()  # every rank's writer has stopped
        if state.is_rank_zero():
            shutil.rmtree(partial_folder(save.final), ignore_errors=True)
        state.raise_together(problem, _NOT_WRITTEN)

    def _no_room(self, save: _PendingSave, error: OSError | None = None) -> UserError:
        free = shutil.disk_usage(self.folder).free
        reason = "" if error is None else f" ({error.strerror})"
        message = f"{save.final} needs {size_text(save.need)}, but only {size_text(free)} is free{reason}"
        return UserError(f"{message}; {_MORE_ROOM}")


def _layout() -> dict[str, int]:
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    return {
        "world": state.world_size(),
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        **({} if virtual is None else {"virtual": virtual}),
    }
