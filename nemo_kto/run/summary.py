"""Collect and print the summaries at start and end of a run; ``telemetry.summary`` formats the text."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from megatron.core import parallel_state

from nemo_kto.algorithms.dpo import DPOTrainer
from nemo_kto.algorithms.duration import TrainerConfig
from nemo_kto.artifacts.checkpoint_files import CHECKPOINTS, Checkpoint, find_checkpoints
from nemo_kto.config.choices import choose_mode
from nemo_kto.config.schema import RunConfig
from nemo_kto.data.batches.dataset import SplitCounts
from nemo_kto.data.rows.sources import validation_names
from nemo_kto.device import device
from nemo_kto.device.dtypes import DTYPES
from nemo_kto.device.kernels import MAX_CONNECTIONS, slow_paths
from nemo_kto.distributed import state
from nemo_kto.huggingface.mapping import Shapes, wanted_adapters, wanted_weights
from nemo_kto.losses.metrics import metric_prefix
from nemo_kto.run.data import RunData
from nemo_kto.run.policy import Policy
from nemo_kto.run.reference import find_other
from nemo_kto.run.rows import micro_batch_limits
from nemo_kto.telemetry.loggers import METRICS_FILE
from nemo_kto.telemetry.summary import RunEnd, RunStart, SplitRows, adapter_lines, figures_of, model_lines


def print_start(
    cfg: RunConfig, policy: Policy, data: RunData, length: TrainerConfig, *, why_precision: str, resumed_step: int | None
) -> None:
    """Print the summary of the run before training, on rank 0."""
    if not state.is_rank_zero():
        return
    trained, adapters = _trained(policy)
    mode, why = choose_mode(cfg)
    other = find_other(cfg, policy)
    batches = len(data.train.batch_sampler)
    start = RunStart(
        command=f"nemo-kto {cfg.recipe.name}",
        model=cfg.pretrained_checkpoint.restore_from_path,
        family=policy.architecture.family.name,
        parameters=_count(wanted_weights(policy.architecture)),
        adapters=adapters,
        trained=trained,
        splits={name: _rows(cfg.recipe.unit, examples.counts) for name, examples in data.splits.in_use.items()},
        steps=length.total_steps(batches),
        steps_per_epoch=length.steps_per_epoch(batches),
        resumed_step=resumed_step,
        global_batch=cfg.model.global_batch_size,
        micro_batch=str(micro_batch_limits(cfg)),
        data_parallel=parallel_state.get_data_parallel_world_size(),
        context_parallel=cfg.model.context_parallel_size,
        tensor_parallel=cfg.model.tensor_model_parallel_size,
        pipeline_parallel=cfg.model.pipeline_model_parallel_size,
        stages=policy.split.text(policy.architecture.num_layers),
        sequence_parallel=cfg.model.sequence_parallel,
        expert_parallel=None if policy.architecture.experts is None else cfg.model.expert_model_parallel_size,
        device=_device(),
        precision=f"{cfg.trainer.precision} ({why_precision})",
        reference=f"{mode} ({why})" + ("" if other is None or mode == "none" else f", {other}"),
        folder=cfg.exp_manager.explicit_log_dir,
        slow_paths=slow_paths(
            DTYPES[cfg.trainer.precision],
            tensor_parallel=cfg.model.tensor_model_parallel_size,
            unsupported_by_te=policy.architecture.unsupported_by_te,
        ),
    )
    print(start, flush=True)


def print_end(
    cfg: RunConfig, policy: Policy, trainer: DPOTrainer, length: TrainerConfig, *, best: Checkpoint | None, seconds: float
) -> None:
    """Print the summary of the run after training, on rank 0: metrics, written files and how to use them.

    Args:
        cfg: configuration of the run.
        policy: the trained policy.
        trainer: the trainer after its last step.
        length: configured run length.
        best: the best of the kept checkpoints; None if none has the monitored metric.
        seconds: wall-clock time of training and export.
    """
    if not state.is_rank_zero():
        return
    folder = Path(cfg.exp_manager.explicit_log_dir)
    is_early = trainer.step < trainer.max_steps
    early_stopping = trainer.stopped_early if is_early else None
    end = RunEnd(
        command=f"nemo-kto {cfg.recipe.name}",
        step=trainer.step,
        steps=trainer.max_steps,
        steps_per_epoch=trainer.steps_per_epoch,
        seconds=seconds,
        stopped_by=f"trainer.max_time={cfg.trainer.max_time}" if is_early and early_stopping is None else None,
        reached=figures_of(folder / METRICS_FILE, validations=validation_titles(cfg)),
        best=_best(cfg, folder, best),
        exports=_exports(cfg, policy, trainer, best),
        train_longer=_train_longer(cfg, trainer, length, is_early=is_early),
        metrics=_metrics(cfg, folder),
        early_stopping=early_stopping,
    )
    print(f"\n{end}", flush=True)


def validation_titles(cfg: RunConfig) -> dict[str, str]:
    """Map the title of each validation set to the prefix of its logged metrics."""
    names = validation_names(cfg.model.data.data_prefix)
    return {f"validation {name}".strip(): f"val/{metric_prefix(name)}" for name in names}


def _count(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))


def _trained(policy: Policy) -> tuple[int, str | None]:
    """Return the number of trained parameters, and a description of the adapters; None if all weights are trained."""
    settings = policy.adapters
    if settings is None:
        return _count(wanted_weights(policy.architecture)), None
    layers = "" if settings.layers is None else f" of layers {', '.join(map(str, settings.layers))}"
    text = f"{settings.kind} of rank {settings.rank}, {settings.scale_text}, on {', '.join(settings.modules)}{layers}"
    if policy.adapter_folder is not None:
        text += f", from {policy.adapter_folder}"
    return _count(wanted_adapters(policy.architecture, settings)), text


def _rows(unit: str, counts: SplitCounts) -> SplitRows:
    return SplitRows(
        unit=unit,
        rows=counts.rows,
        classes=counts.classes,
        tokens=counts.tokens,
        cut_prompts=counts.cut_prompts,
        cut_responses=counts.cut_responses,
    )


def _device() -> str:
    if device.on_gpu():
        connections = os.environ.get(MAX_CONNECTIONS)
        return f"{device.device_name()}, {MAX_CONNECTIONS}={connections}"
    threads = torch.get_num_threads()
    return f"CPU, {device.device_name()}, {threads} {'thread' if threads == 1 else 'threads'} a rank"


def _best(cfg: RunConfig, folder: Path, best: Checkpoint | None) -> str:
    ranking = cfg.exp_manager.checkpoint_callback_params
    kept = find_checkpoints(folder / CHECKPOINTS)
    if best is None:
        return f"{kept[-1].folder} (the last one, as none has {ranking.monitor})"
    value = f"{ranking.monitor} {best.info['metrics'][ranking.monitor]:.4f}"
    extreme = "lowest" if ranking.mode == "min" else "highest"
    return (
        f"{best.folder} ({value}, {f'the {extreme} of {len(kept)} that are kept' if len(kept) > 1 else 'the only one kept'})"
    )


def _exports(cfg: RunConfig, policy: Policy, trainer: DPOTrainer, best: Checkpoint | None) -> dict[str, str]:
    if not cfg.export.enabled:
        later = f"nemo-kto export {cfg.exp_manager.explicit_log_dir} FOLDER"
        return {"exported model": f"none, as export.enabled is false; later: {later}"}
    chosen = cfg.export.which == "best" and best is not None
    what = (
        f"the best checkpoint, step {best.step}" if chosen and best is not None else f"after the last step, {trainer.step}"
    )
    if policy.adapters is None:
        return model_lines(Path(cfg.export.path), what)
    merged = model_lines(Path(cfg.export.path), f"{what}, adapters merged")
    return {**merged, **adapter_lines(Path(cfg.export.adapter_path))}


def _train_longer(cfg: RunConfig, trainer: DPOTrainer, length: TrainerConfig, *, is_early: bool) -> str:
    """Return the overrides with which the same command trains for more steps."""
    needed = [] if cfg.exp_manager.resume_if_exists else ["exp_manager.resume_if_exists=true"]
    if is_early and trainer.stopped_early is not None:
        needed.append("exp_manager.create_early_stopping_callback=false")
    _, limits = length.what_ends(len(trainer.train_dataloader.batch_sampler))
    larger = {"max_epochs": length.max_epochs + 1, "max_steps": -1 if "max_epochs" in limits else 2 * trainer.max_steps}
    needed += [f"trainer.{cfg.recipe.name}.{limit}={larger[limit]}" for limit in (() if is_early else limits)]
    return " ".join(needed)


def _metrics(cfg: RunConfig, folder: Path) -> str:
    board = f"; tensorboard --logdir {folder / 'tensorboard'}" if cfg.exp_manager.create_tensorboard_logger else ""
    return f"{folder / METRICS_FILE}{board}"
