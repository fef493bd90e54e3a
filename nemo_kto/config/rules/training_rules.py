"""Rules that concern several keys or the machine; all rules together. Rules for single keys are in schema.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

from nemo_kto.config.resolved import ResolvedRun, find_callback
from nemo_kto.config.rules.file_rules import file_rules
from nemo_kto.config.rules.gpu_rules import computes_here, gpu_rules
from nemo_kto.config.rules.layout_rules import rank_rules
from nemo_kto.config.rules.validation_rules import (
    best_rules,
    early_stopping_rules,
    monitor_rules,
    sample_rules,
    set_name_rules,
)
from nemo_kto.errors import ConfigError, either, error_of
from nemo_kto.processes.ranks import World, check_open_files
from nemo_kto.telemetry.loggers import installed, missing_package

Errors = Iterator[ConfigError]


def run_errors(
    run: ResolvedRun, *, world: World | None = None, sweep: bool = False, elsewhere: bool = False
) -> list[ConfigError]:
    """Find all errors in a configuration that its types do not show.

    ``world``: the ranks that were started; None if the run starts its own. With ``sweep``, keys that the loss does not use
    are accepted, because they may be for other jobs; with ``elsewhere``, this machine is not checked.
    """
    checks: list[Callable[[ResolvedRun], Errors]] = [
        *([] if elsewhere else [partial(_machine_rules, world=world)]),
        file_rules,
        set_name_rules,
        _logging_rules,
        _loss_rules,
        _recompute_rules,
        _schedule_rules,
        _reference_rules,
        _export_rules,
        early_stopping_rules,
        sample_rules,
        *([] if sweep else [unused_keys]),
        partial(gpu_rules, computes=None if elsewhere else computes_here(on_gpu=run.gpus > 0)),
        partial(rank_rules, ranks=run.world_size(world)),
    ]
    return [error for check in checks for error in check(run)]


def _machine_rules(run: ResolvedRun, *, world: World | None) -> Errors:
    """Check the ranks and devices of the run against this machine and the ranks that were started."""
    nodes, devices, gpus = run.cfg.trainer.num_nodes, run.cfg.trainer.devices, run.gpus
    if (text := check_open_files()) is not None:
        yield ConfigError("ulimit -n", text)
    if world is None and nodes > 1:
        remedy = "start the ranks with torchrun or srun, see examples/slurm"
        yield ConfigError("trainer.num_nodes", f"must be 1 if no ranks were started, got {nodes}; {remedy}")
    even = world is not None and world.local_size and world.size % world.local_size == 0
    if world is not None and world.local_size and devices == "auto" and even and nodes * world.local_size != world.size:
        found = world.size // world.local_size
        text = f"must be the number of machines on which ranks were started, {found}, got {nodes}"
        yield ConfigError("trainer.num_nodes", f"{text}; set trainer.num_nodes={found}")
    if world is not None and isinstance(devices, int) and (expected := devices * nodes) != world.size:
        product = f"trainer.num_nodes * trainer.devices = {nodes} * {devices} = {expected}"
        remedy = f"start {expected} ranks, or set trainer.num_nodes and trainer.devices to those that were started"
        text = f"must match the number of ranks that were started ({product}), got {world.size}; {remedy}"
        yield ConfigError("trainer.devices", text, ("trainer.devices", "trainer.num_nodes"))
    if run.cfg.trainer.accelerator == "gpu" and not gpus:
        yield ConfigError("trainer.accelerator", "must be cpu or auto on a machine without GPUs that torch can use, got gpu")
    # With srun --gpus-per-task=1, a rank sees only its own GPU and not those of the other ranks of the machine.
    sees_its_own = world is not None and gpus == 1 and not world.sees_same
    local = devices if isinstance(devices, int) else world.local_size if world is not None else None
    if gpus and local is not None and local > gpus and not sees_its_own:  # NCCL rejects two ranks on one GPU, much later
        number = "one GPU" if gpus == 1 else f"{gpus} GPUs"
        remedy = "use fewer ranks, or trainer.accelerator=cpu"
        yield ConfigError("trainer.devices", f"must be at most the {number} of this machine, got {local}; {remedy}")


def _logging_rules(run: ResolvedRun) -> Errors:
    """Check that callbacks can be imported, loggers are installed, and checkpoints are ranked by a metric of the loss."""
    for spec in run.cfg.trainer.callbacks:
        if (wrong := error_of(partial(find_callback, spec))) is not None:
            yield ConfigError("trainer.callbacks", wrong)
    yield from monitor_rules(run)
    for package in ("tensorboard", "trackio", "wandb", "mlflow"):
        if getattr(run.cfg.exp_manager, f"create_{package}_logger") and not installed(package):
            yield ConfigError(f"exp_manager.create_{package}_logger", f"cannot be true: {missing_package(package)}")


def _recompute_rules(run: ResolvedRun) -> Errors:
    prefix, model = "model.activations_checkpoint", run.cfg.model
    granularity, reads = model.activations_checkpoint_granularity, (f"{prefix}_granularity",)
    values = {"method": model.activations_checkpoint_method, "num_layers": model.activations_checkpoint_num_layers}
    for name, value in values.items():
        if granularity != "full" and value is not None:
            text = f"must be null unless {prefix}_granularity=full, got {value}; set one or the other"
            yield ConfigError(f"{prefix}_{name}", text, reads)
    if granularity == "full" and values["method"] == "block" and values["num_layers"] is None:
        text = f"must be given with {prefix}_method=block, got null; e.g. {prefix}_num_layers=1"
        yield ConfigError(f"{prefix}_num_layers", text, (f"{prefix}_method",))
    if model.recompute_modules is not None and granularity != "selective":
        text = f"must be null unless {prefix}_granularity=selective, got {', '.join(model.recompute_modules)}"
        yield ConfigError("model.recompute_modules", f"{text}; set one or the other", reads)


def _schedule_rules(run: ResolvedRun) -> Errors:
    """Check the learning-rate schedule; options specific to one schedule are set with that schedule and only with it."""
    prefix, schedule, highest = "model.optim.sched", run.cfg.model.optim.sched, run.cfg.model.optim.lr
    if not 0 <= schedule.min_lr <= highest:
        text = f"must be from 0 to model.optim.lr = {highest}, got {schedule.min_lr}; set both, or {prefix}.min_lr=0"
        yield ConfigError(f"{prefix}.min_lr", text, ("model.optim.lr",))
    if schedule.name == "constant" and schedule.constant_steps:
        text = f"must be 0 with a constant learning rate, which has no steps at min_lr, got {schedule.constant_steps}"
        yield ConfigError(f"{prefix}.constant_steps", text, (f"{prefix}.name",))
    if schedule.warmup_ratio is not None and schedule.warmup_steps:
        text = f"must be 0 with {prefix}.warmup_ratio={schedule.warmup_ratio}, got {schedule.warmup_steps}"
        yield ConfigError(f"{prefix}.warmup_steps", f"{text}; set one or the other", (f"{prefix}.warmup_ratio",))
    for name, owner, example in (
        ("wsd_decay_steps", "WSD", "100"),
        ("wsd_decay_style", "WSD", "cosine"),
        ("num_cycles", "CosineWithRestarts", "2"),
    ):
        value = getattr(schedule, name)
        if schedule.name == owner and value is None:
            text = f"must be given with {prefix}.name={owner}, got null; e.g. {prefix}.{name}={example}"
            yield ConfigError(f"{prefix}.{name}", text, (f"{prefix}.name",))
        if schedule.name != owner and value is not None:
            text = f"must be null unless {prefix}.name={owner}, got {value}; set one or the other"
            yield ConfigError(f"{prefix}.{name}", text, (f"{prefix}.name",))


def _loss_rules(run: ResolvedRun) -> Errors:
    cfg, section, loss = run.cfg, f"model.{run.cfg.recipe.name}", run.cfg.loss.definition
    yield from cfg.loss.rules(section)
    reads = (f"{section}.preference_loss", f"{section}.preference_losses")
    if loss.needs_z0 and cfg.model.global_batch_size == 1:
        text = f"must be at least 2 with {cfg.loss.loss_name}, whose KL examples pair the rows of a batch, got 1"
        yield ConfigError("model.global_batch_size", f"{text}; use a larger batch", reads)
    reference = cfg.model.reference
    for name, default in {"mode": "auto", "restore_from_path": None, "sync_interval": 0}.items():
        if not loss.needs_reference and (value := getattr(reference, name)) != default:
            text = f"must be left out with {cfg.loss.loss_name}, which has no reference, got {value}"
            yield ConfigError(f"model.reference.{name}", text, reads)


def unused_keys(run: ResolvedRun) -> Errors:
    """Find options of other losses and default rewards that were given and are not used.

    Values equal to the defaults of those options are accepted, because NeMo-Aligner's file contains them.
    """
    cfg, recipe, chosen = run.cfg, run.cfg.recipe, run.cfg.loss.definition
    section = f"model.{recipe.name}"
    reads = (f"{section}.preference_loss", f"{section}.preference_losses")
    for name in type(cfg.loss).model_fields.keys() - recipe.loss_section.model_fields.keys() - chosen.options.keys():
        users = [other for other, loss in recipe.losses.items() if name in loss.options]
        defaults = [loss.options[name].default for loss in recipe.losses.values() if name in loss.options]
        if (value := getattr(cfg.loss, name)) is not None and value not in defaults:
            text = f"must be left out with {cfg.loss.loss_name}, which does not take it, got {value}"
            yield ConfigError(f"{section}.{name}", f"{text}; it is for {either(users)}", reads)
    for name, default in {} if chosen.needs_rewards else recipe.data_defaults.items():
        if (value := getattr(cfg.model.data, name)) not in (None, default):
            users = [other for other, loss in recipe.losses.items() if loss.needs_rewards]
            text = f"must be left out with {cfg.loss.loss_name}, which takes no rewards, got {value}"
            yield ConfigError(f"model.data.{name}", f"{text}; it is for {either(users)}", reads)


def _reference_rules(run: ResolvedRun) -> Errors:
    settings, prefix, scheme = run.cfg.model.reference, "model.reference", "model.peft.peft_scheme"
    adapter, mode = run.files.adapter_folder, f"{prefix}.mode"
    if settings.mode == "adapter" and not run.has_adapters:
        text = f"must be auto, swap or cached without adapters, got adapter; or set {scheme}=lora"
        yield ConfigError(mode, text, (scheme,))
    if settings.mode == "adapter" and settings.sync_interval and not run.files.has_adapters:
        text = f"must be 0 with {mode}=adapter, where the reference is the model without adapters"
        yield ConfigError(f"{prefix}.sync_interval", f"{text}, got {settings.sync_interval}; use {mode}=swap", (mode,))
    if settings.mode == "adapter" and settings.restore_from_path is not None:
        text = f"must be null with {mode}=adapter, where the reference is the model itself"
        got = f"got {settings.restore_from_path}; use {mode}=cached"
        yield ConfigError(f"{prefix}.restore_from_path", f"{text}, {got}", (mode,))
    if settings.mode == "cached" and settings.sync_interval:
        text = f"must be 0 with {mode}=cached, whose log-probs are computed once, got {settings.sync_interval}"
        yield ConfigError(f"{prefix}.sync_interval", f"{text}; use {mode}=swap", (mode,))
    if adapter is not None and not run.has_adapters:
        text = f"must be null without adapters, got {adapter}; set {scheme}=lora"
        yield ConfigError("model.peft.restore_from_path", text, (scheme,))


def _export_rules(run: ResolvedRun) -> Errors:
    export = run.cfg.export
    if not export.enabled:
        return
    for name in ("path", "adapter_path"):
        if not getattr(export, name):
            yield ConfigError(f"export.{name}", "must be a folder, got nothing; name one, or set export.enabled=false")
    if export.which == "best":
        yield from best_rules(run)
    both = [os.path.abspath(path) for path in (export.path, export.adapter_path) if path]
    if run.has_adapters and len(set(both)) < len(both):
        # from a shared folder, transformers would load the base model and the adapters, and never the merged weights
        text = f"must be another folder than export.path, got {export.adapter_path} for both; merged weights go there"
        yield ConfigError("export.adapter_path", text, ("export.path", "model.peft.peft_scheme"))
