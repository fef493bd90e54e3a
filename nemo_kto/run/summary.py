"""Summaries at start and end of a run: collects the values; ``telemetry.summary`` formats the text."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from megatron.core import parallel_state

from nemo_kto.algorithms.dpo import DPOTrainer
from nemo_kto.artifacts.checkpoint_files import Checkpoint, find_checkpoints
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.config.schema import RunConfig
from nemo_kto.data.batches.dataset import SplitCounts
from nemo_kto.data.rows.sources import validation_names
from nemo_kto.device import device
from nemo_kto.device.kernels import MAX_CONNECTIONS, slow_paths
from nemo_kto.distributed import state
from nemo_kto.huggingface.mapping import Shapes, wanted_adapters, wanted_weights
from nemo_kto.losses.metrics import metric_prefix
from nemo_kto.run.data import RunData
from nemo_kto.run.policy import Policy
from nemo_kto.telemetry.loggers import METRICS_FILE
from nemo_kto.telemetry.summary import RunEnd, RunStart, SplitRows, adapter_lines, figures_of, model_lines


def print_start(run: ResolvedRun, policy: Policy, data: RunData, *, resumed_step: int | None) -> None:
    """Print the summary of the run before training, on rank 0."""
    if not state.is_rank_zero():
        return
    cfg, model, architecture, settings = run.cfg, run.cfg.model, policy.architecture, run.adapters
    batches, other = len(data.train.batch_sampler), run.reference_model
    parameters = trained = _count(wanted_weights(architecture))
    adapters = None
    if settings is not None:
        trained = _count(wanted_adapters(architecture, settings))
        layers = "" if settings.layers is None else f" of layers {', '.join(map(str, settings.layers))}"
        adapters = (
            f"{settings.kind} of rank {settings.rank}, {settings.scale_text}, on {', '.join(settings.modules)}{layers}"
        )
        if run.files.adapter_folder is not None:
            adapters += f", from {run.files.adapter_folder}"
    device_text = f"{device.device_name()}, {MAX_CONNECTIONS}={os.environ.get(MAX_CONNECTIONS)}"
    if not device.on_gpu():
        threads = torch.get_num_threads()
        device_text = f"CPU, {device.device_name()}, {threads} {'thread' if threads == 1 else 'threads'} a rank"
    start = RunStart(
        command=f"nemo-kto {cfg.recipe.name}",
        model=cfg.pretrained_checkpoint.restore_from_path,
        family=architecture.family.name,
        parameters=parameters,
        adapters=adapters,
        trained=trained,
        splits={name: _split_rows(cfg.recipe.unit, examples.counts) for name, examples in data.splits.in_use.items()},
        labels=data.splits.labels,
        steps=run.length.total_steps(batches),
        steps_per_epoch=run.length.steps_per_epoch(batches),
        resumed_step=resumed_step,
        global_batch=model.global_batch_size,
        micro_batch=str(data.limits),
        data_parallel=parallel_state.get_data_parallel_world_size(),
        context_parallel=model.context_parallel_size,
        tensor_parallel=model.tensor_model_parallel_size,
        pipeline_parallel=model.pipeline_model_parallel_size,
        stages=run.split.text(architecture.num_layers),
        sequence_parallel=model.sequence_parallel,
        expert_parallel=None if architecture.experts is None else model.expert_model_parallel_size,
        device=device_text,
        precision=f"{cfg.trainer.precision} ({run.precision_reason})",
        reference=f"{run.reference.name} ({run.reference.reason}){'' if other is None else f', {other}'}",
        folder=str(run.folder),
        slow_paths=slow_paths(
            run.dtype, tensor_parallel=model.tensor_model_parallel_size, unsupported_by_te=architecture.unsupported_by_te
        ),
    )
    print(start, flush=True)


def _count(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))


def _split_rows(unit: str, counts: SplitCounts) -> SplitRows:
    return SplitRows(
        unit=unit,
        rows=counts.rows,
        classes=counts.classes,
        tokens=counts.tokens,
        cut_prompts=counts.cut_prompts,
        cut_responses=counts.cut_responses,
    )


def print_end(run: ResolvedRun, policy: Policy, trainer: DPOTrainer, *, best: Checkpoint | None, seconds: float) -> None:
    """Print the summary of the run after training, on rank 0: metrics, written files and how to use them.

    ``best`` is the best of the kept checkpoints, None if none has the monitored metric; ``seconds`` the time of training.
    """
    if not state.is_rank_zero():
        return
    is_early = trainer.step < trainer.max_steps
    early_stopping = trainer.stopped_early if is_early else None
    needed = [] if run.cfg.exp_manager.resume_if_exists else ["exp_manager.resume_if_exists=true"]
    if early_stopping is not None:
        needed.append("exp_manager.create_early_stopping_callback=false")
    if not is_early:
        _, limits = run.length.what_ends(len(trainer.train_dataloader.batch_sampler))
        larger = {
            "max_epochs": run.length.max_epochs + 1,
            "max_steps": -1 if "max_epochs" in limits else 2 * trainer.max_steps,
        }
        needed += [f"trainer.{run.cfg.recipe.name}.{limit}={larger[limit]}" for limit in limits]
    metrics = run.folder / METRICS_FILE
    board = f"; tensorboard --logdir {run.folder / 'tensorboard'}" if run.cfg.exp_manager.create_tensorboard_logger else ""
    end = RunEnd(
        command=f"nemo-kto {run.cfg.recipe.name}",
        step=trainer.step,
        steps=trainer.max_steps,
        steps_per_epoch=trainer.steps_per_epoch,
        seconds=seconds,
        stopped_by=f"trainer.max_time={run.cfg.trainer.max_time}" if is_early and early_stopping is None else None,
        reached=figures_of(metrics, validations=validation_titles(run.cfg)),
        best=_best_text(run, best),
        exports=_export_lines(run, policy, trainer, best),
        train_longer=" ".join(needed),
        metrics=f"{metrics}{board}",
        early_stopping=early_stopping,
    )
    print(f"\n{end}", flush=True)


def validation_titles(cfg: RunConfig) -> dict[str, str]:
    """Map the title of each validation set to the prefix of its logged metrics."""
    names = validation_names(cfg.model.data.data_prefix)
    return {f"validation {name}".strip(): f"val/{metric_prefix(name)}" for name in names}


def _best_text(run: ResolvedRun, best: Checkpoint | None) -> str:
    ranking, kept = run.cfg.exp_manager.checkpoint_callback_params, find_checkpoints(run.checkpoints)
    if best is None:
        return f"{kept[-1].folder} (last; {ranking.monitor} was never logged)"
    extreme = "lowest" if ranking.mode == "min" else "highest"
    count = f"{extreme} of {len(kept)} kept checkpoints" if len(kept) > 1 else "the only one kept"
    return f"{best.folder} ({ranking.monitor} {best.info['metrics'][ranking.monitor]:.4f}, {count})"


def _export_lines(run: ResolvedRun, policy: Policy, trainer: DPOTrainer, best: Checkpoint | None) -> dict[str, str]:
    export = run.cfg.export
    if not export.enabled:
        return {"exported model": f"none (export.enabled=false); later: nemo-kto export {run.folder} FOLDER"}
    weights = f"after the last step, {trainer.step}"
    if export.which == "best" and best is not None:
        weights = f"the best checkpoint, step {best.step}"
    if policy.adapters is None:
        return model_lines(Path(export.path), weights)
    return {**model_lines(Path(export.path), f"{weights}, adapters merged"), **adapter_lines(Path(export.adapter_path))}
