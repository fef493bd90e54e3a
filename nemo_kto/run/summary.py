"""Tables at start and end of a run; ``telemetry.display`` formats their values."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from nemo_kto.algorithms.dpo import DPOTrainer
from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.lora import adapted_modules, refused_by_peft, without_experts
from nemo_kto.config.learning_rates import DEFAULT_LR
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.config.schema import GPTConfig
from nemo_kto.data.batches.splits import Splits
from nemo_kto.device import device
from nemo_kto.device.environment import MAX_CONNECTIONS
from nemo_kto.device.kernels import slow_paths
from nemo_kto.distributed import state
from nemo_kto.errors import plural
from nemo_kto.huggingface.rank_weights import Shapes, wanted_adapters, wanted_weights
from nemo_kto.layers.packing import MAX_HEAD_DIM
from nemo_kto.memory.micro_batches import packing_of
from nemo_kto.mixers import GatedDeltaNet, Mamba2
from nemo_kto.model_files.checkpoint_files import Checkpoint, find_checkpoints, is_reliable
from nemo_kto.model_files.companion_files import auto_class
from nemo_kto.models.engine.sequences import MicroBatchLimits
from nemo_kto.run.data import split_text
from nemo_kto.run.policy import Policy
from nemo_kto.run.prepare import Placement, Start
from nemo_kto.run.samples import samples_text
from nemo_kto.telemetry.display import adapter_lines, epochs, figures_of, layout_text, model_lines, short, table
from nemo_kto.telemetry.evaluations import SAMPLES_FILE
from nemo_kto.telemetry.loggers import METRICS_FILE
from nemo_kto.telemetry.watch import duration_text

_MAX_FINDINGS = 3  # in the table at the end


def print_start_table(run: ResolvedRun, policy: Policy, start: Start, placement: Placement, *, disk: str) -> dict[str, str]:
    """Print the table before training on rank 0, and return its lines; none on other ranks.

    ``disk``: text about the room that the run needs.
    """
    if not state.is_rank_zero():
        return {}
    lines = start_lines(run, policy, start, placement) | {"disk": disk}
    print(table(f"nemo-kto {run.cfg.recipe.name}", lines), flush=True)
    return lines


def start_lines(run: ResolvedRun, policy: Policy, start: Start, placement: Placement) -> dict[str, str]:
    """Return the lines of the table before training, by label."""
    cfg, model, architecture = run.cfg, run.cfg.model, policy.architecture
    data, samples, resumption = start
    unit = cfg.recipe.unit
    lines = {
        "model": (
            f"{cfg.pretrained_checkpoint.restore_from_path} ({architecture.family.name}), "
            f"{short(_count(wanted_weights(architecture)))} parameters, {_trained_text(run, architecture)}"
        ),
        **policy.weights_line,
        **run.files.output_line,
        **run.files.attention_line,
        "adapters": _adapters_text(run, architecture),
    }

    # Rows
    lines |= {name: split_text(unit, examples.counts) for name, examples in data.splits.in_use.items()}
    lines |= row_lines(data.splits)
    lines |= cfg.loss.start_lines(data.splits.train)

    # Steps
    batches = len(data.train.batch_sampler)
    steps = run.length.total_steps(batches)
    resumed = "" if resumption.resumed_step is None else f", resumed after step {resumption.resumed_step}"
    rest = data.splits.in_use["train"].counts.rows % model.global_batch_size
    omitted = f"; each epoch omits {rest:,} {unit}, different ones each time" if rest else ""
    lines |= {
        "steps": f"{steps:,} ({epochs(steps, run.length.steps_per_epoch(batches))}){resumed}",
        "lr": _lr_text(model),
        "batch": f"{model.global_batch_size:,} {unit} a step, micro-batches of {placement.limits}{omitted}",
        **_micro_batches(run, placement),
        "sequences": f"at most {cfg.seq_length:,} tokens ({run.length_reason})",
    }

    # Ranks
    lines["layout"] = layout_text(
        data=parallel_state.get_data_parallel_world_size(),
        context=model.context_parallel_size,
        tensor=model.tensor_model_parallel_size,
        pipeline=model.pipeline_model_parallel_size,
        stages=run.split.text(architecture.num_layers),
        sequence_parallel=model.sequence_parallel,
        experts="" if architecture.experts is None else str(model.expert_model_parallel_size),
        optimizer_instances=model.optim.num_distributed_optimizer_instances,
    )
    if architecture.experts is not None:
        lines |= balance_line(model.moe_aux_loss_coeff, run.files.config[0])
    lines["device"] = _device_text()
    lines["precision"] = f"{cfg.trainer.precision} ({run.precision_reason})"

    # Reference
    reference = f"{run.reference.name} ({run.reference.reason})"
    lines["reference"] = reference if run.reference_model is None else f"{reference}, {run.reference_model}"
    lines |= _reference_memory(placement)

    if samples is not None:
        lines["samples"] = samples_text(run, samples, data.splits)
    lines["run folder"] = str(run.folder)
    slow = _slow_paths(run, architecture, placement.limits)
    return lines | {f"slow path {number}": path for number, path in enumerate(slow, start=1)}


def _trained_text(run: ResolvedRun, architecture: Architecture) -> str:
    if run.adapters is None:
        return "all trained"
    return f"{short(_count(wanted_adapters(architecture, run.adapters)))} in adapters trained"


def _adapters_text(run: ResolvedRun, architecture: Architecture) -> str:
    settings, folder = run.adapters, run.files.adapter_folder
    if settings is None:
        return "none"
    modules = ", ".join(adapted_modules(architecture, settings)) + without_experts(architecture, settings)
    layers = "" if settings.layers is None else f" of layers {', '.join(map(str, settings.layers))}"
    origin = "" if folder is None else f", from {folder}"
    return f"{settings.kind} of rank {settings.rank}, {settings.scale_text}, on {modules}{layers}{origin}"


def _slow_paths(run: ResolvedRun, architecture: Architecture, limits: MicroBatchLimits) -> list[str]:
    """Return :func:`~nemo_kto.device.kernels.slow_paths` of a run."""
    kinds, size = {kind for mixer in architecture.mixers for kind in mixer.kinds}, run.architecture.largest_head
    return slow_paths(
        run.dtype,
        tensor_parallel=run.cfg.model.tensor_model_parallel_size,
        reduce_in_fp32=run.cfg.model.optim.grad_reduce_in_fp32,
        unsupported_by_te=architecture.unsupported_by_te,
        delta_nets=GatedDeltaNet.kind in kinds,
        mamba=Mamba2.kind in kinds,
        share_prompts=limits.share_prompts,
        large_heads=size if (limits.packed or limits.share_prompts) and size > MAX_HEAD_DIM else 0,
    )


def _device_text() -> str:
    if not device.on_gpu():
        return f"CPU, {device.device_name()}, {plural(torch.get_num_threads(), 'thread')} a rank"
    connections = os.environ.get(MAX_CONNECTIONS)
    return device.device_name() + (f", {MAX_CONNECTIONS}={connections}" if connections else "")


def row_lines(splits: Splits[Any]) -> dict[str, str]:
    """Return the lines about how rows are read, by label, without those that do not apply."""
    lines = {"labels": splits.labels, "prompts": splits.prompts, "left out": splits.left_out}
    return {name: text for name, text in {**lines, "special tokens": splits.special_tokens}.items() if text}


def balance_line(weight: float, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the line about the load-balancing loss of a mixture of experts, with the coefficient in its config.json."""
    unused, text = config.get("router_aux_loss_coef"), "load-balancing loss" if weight else "no load-balancing loss"
    note = f"; router_aux_loss_coef={unused:g} of config.json, for another loss, is not used" if unused else ""
    return {"experts": f"{text} (model.moe_aux_loss_coeff={weight:g}{note})"}


def _micro_batches(run: ResolvedRun, placement: Placement) -> dict[str, str]:
    """Return why micro-batches on GPUs have their size, and why they are packed or not."""
    if not device.on_gpu():
        return {}
    packing = packing_of(run)
    packed = f"{'packed' if packing.is_on else 'not packed'} ({packing.reason})"
    if not placement.micro_batch_tokens:
        return {"micro-batches": packed}
    return {"micro-batches": f"{placement.micro_batch_tokens:,} tokens ({placement.micro_batch_reason}), {packed}"}


def _reference_memory(placement: Placement) -> dict[str, str]:
    if not device.on_gpu() or not placement.reference_memory:
        return {}
    memory = {"gpu": "GPU memory", "cpu": "host memory"}[placement.reference_memory]
    return {"reference weights": f"{memory} ({placement.reference_reason})"}


def _lr_text(model: GPTConfig) -> str:
    lr, scheme = model.optim.lr, model.peft.peft_scheme
    if lr != DEFAULT_LR[scheme]:
        return f"{lr:g} (model.optim.lr)"
    return f"{lr:g} (the default of model.optim.lr {'if all weights are trained' if scheme == 'none' else 'for adapters'})"


def _count(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))


def end_table(
    run: ResolvedRun,
    policy: Policy,
    trainer: DPOTrainer,
    *,
    best: Checkpoint | None,
    report: Path | None,
    findings: Sequence[str] = (),
    seconds: float,
) -> str:
    """Return the summary of a run after training: metrics, written files and how to use them.

    ``best`` is the best of the kept checkpoints, None if none has the monitored metric; ``report`` the page about the run,
    None if there is none; ``findings`` the problems it found, the worst first; ``seconds`` the time of training.
    """
    cfg, name, metrics = run.cfg, run.cfg.recipe.name, run.folder / METRICS_FILE
    is_early = trainer.step < trainer.max_steps
    early_stopping = trainer.stopped_early if is_early else None
    outcome, next_step, lines = "finished", "train longer", dict[str, str]()
    overrides = [] if cfg.exp_manager.resume_if_exists else ["exp_manager.resume_if_exists=true"]
    if early_stopping is not None:
        outcome, lines["early stopping"] = "stopped by early stopping", early_stopping
        overrides.append("exp_manager.create_early_stopping_callback=false")
    elif is_early:
        outcome, next_step = f"stopped by trainer.max_time={cfg.trainer.max_time}", "resume"
    else:
        _, limits = run.length.what_ends(len(trainer.train_dataloader.batch_sampler))
        max_steps = -1 if "max_epochs" in limits else 2 * trainer.max_steps
        larger = {"max_epochs": run.length.max_epochs + 1, "max_steps": max_steps}
        overrides += [f"trainer.{name}.{limit}={larger[limit]}" for limit in limits]
    shown = findings[:_MAX_FINDINGS]
    lines |= {f"problem {number}": finding for number, finding in enumerate(shown, start=1)}
    board = f"; tensorboard --logdir {run.folder / 'tensorboard'}" if cfg.exp_manager.create_tensorboard_logger else ""
    if cfg.exp_manager.create_trackio_logger:
        board += f"; TRACKIO_DIR={os.environ.get('TRACKIO_DIR', run.folder / 'trackio')} trackio show"
    lines |= figures_of(metrics, validations=run.validation_titles)
    kept = find_checkpoints(run.checkpoints)
    lines |= {**_checkpoint_lines(run, kept, best), **_export_lines(run, policy, trainer, kept, best)}
    lines[next_step] = " ".join(["the same command", *(["with", *overrides] if overrides else [])])
    lines["metrics"] = f"{metrics}{board}"
    if (samples := run.folder / SAMPLES_FILE).exists():
        lines["samples"] = str(samples)
    more = f" ({plural(len(findings), 'problem')}, with reasons and remedies)" if findings else ""
    lines |= {} if report is None else {"report": f"{report}{more}"}
    done = f"step {trainer.step:,} of {trainer.max_steps:,} ({epochs(trainer.step, trainer.steps_per_epoch)})"
    but = f", with {plural(len(findings), 'problem')}" if findings else ""
    return table(f"nemo-kto {name} {outcome} after {done} in {duration_text(seconds)}{but}", lines)


def _compared(run: ResolvedRun, kept: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints with the metric that ranks them; the best of one is no best.

    A validation of few rows chooses none, unless the user wants the best one.
    """
    monitor = run.cfg.exp_manager.checkpoint_callback_params.monitor
    found = [each for each in kept if monitor.startswith("val_") and each.info["metrics"].get(monitor) is not None]
    return [each for each in found if run.cfg.export.which == "best" or is_reliable(each, monitor)]


def _checkpoint_lines(run: ResolvedRun, kept: Sequence[Checkpoint], best: Checkpoint | None) -> dict[str, str]:
    """Return the best checkpoint, if several were validated, and the last, with the command that exports it by default."""
    ranking, compared, lines = run.cfg.exp_manager.checkpoint_callback_params, _compared(run, kept), dict[str, str]()
    figures = {each.step: f"{ranking.monitor} {each.info['metrics'][ranking.monitor]:.4f}, " for each in compared}
    if best is not None and len(compared) > 1:
        extreme = "lowest" if ranking.mode == "min" else "highest"
        lines["best checkpoint"] = f"{best.folder} ({figures[best.step]}{extreme} of {len(compared)} kept checkpoints)"
    for last in kept[-1:]:
        written = f"written by nemo-kto export {run.folder} FOLDER"
        lines["last checkpoint"] = f"{last.folder} ({figures.get(last.step, '')}{written})"
    return lines


def _export_lines(
    run: ResolvedRun, policy: Policy, trainer: DPOTrainer, kept: Sequence[Checkpoint], best: Checkpoint | None
) -> dict[str, str]:
    export = run.cfg.export
    if not export.enabled:
        return {"exported model": "none (export.enabled=false)"}
    weights = f"after the last step, {trainer.step}"
    if export.which == "best" and best is not None:
        which = "best checkpoint" if len(_compared(run, kept)) > 1 else "only validated checkpoint"
        weights = f"the {which}, step {best.step}"
    path, loader = Path(export.path), auto_class(Path(export.path))
    if policy.adapters is None:
        return model_lines(path, weights, auto_class=loader) | policy.weights_line
    merged = model_lines(path, f"{weights}, adapters merged", auto_class=loader) | policy.weights_line
    if refusal := refused_by_peft(policy.architecture.family, policy.adapters):
        return {**merged, "exported adapters": f"{export.adapter_path}; {refusal}"}
    return {**merged, **adapter_lines(Path(export.adapter_path), auto_class=loader)}
