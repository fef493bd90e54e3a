"""Rules that concern several keys, the files or the machine.

Rules for single keys are in schema.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from nemo_kto.artifacts.sources import irregular_files, is_peft_folder
from nemo_kto.config.choices import find_callback
from nemo_kto.config.rules.files import broken_files
from nemo_kto.config.rules.gpu import computes_here, gpu_rules
from nemo_kto.config.rules.validation import best_rules, early_stopping_rules, monitor_rules, set_name_rules
from nemo_kto.config.schema import RunConfig, ScheduleConfig, TrainerConfig
from nemo_kto.data.rows.reader import Fields
from nemo_kto.data.rows.sources import check_validation_names, read_data_prefix
from nemo_kto.errors import ConfigError, either, error_of
from nemo_kto.processes.ranks import World, check_open_files
from nemo_kto.telemetry.loggers import installed, missing_package

Errors = Iterator[ConfigError]
_RANKS = ("trainer.devices", "trainer.num_nodes")


def broken_rules(
    cfg: RunConfig, *, gpus: int, world: World | None = None, sweep: bool = False, here: bool = True
) -> list[ConfigError]:
    """Find all errors in a configuration that its types do not show.

    Args:
        cfg: the configuration.
        gpus: number of GPUs of this machine that the run may use.
        world: the ranks that were started; None if the run starts its own.
        sweep: whether the run is one of several jobs; keys that its loss does not use may be for the other jobs.
        here: whether the run will be on this machine.
    """
    checks: list[Callable[[RunConfig], Errors]] = [
        _callbacks,
        _files,
        _data_files,
        set_name_rules,
        broken_files,
        _checkpoints,
    ]
    checks += [
        _loss,
        _packing,
        _recompute,
        _learning_rate,
        _reference,
        _export,
        early_stopping_rules,
        *([] if sweep else [unused_keys]),
    ]
    found = [mistake for check in checks for mistake in check(cfg)]
    of_machine = _machine(cfg.trainer, gpus, world) if here else ()
    of_gpu = gpu_rules(cfg, computes_here(on_gpu=gpus > 0) if here else None)
    return [*of_machine, *found, *of_gpu, *_layout(cfg, world_size(cfg.trainer, gpus=gpus, world=world))]


def local_ranks(trainer: TrainerConfig, gpus: int) -> int:
    """Return the number of ranks per machine that the configuration requests."""
    return trainer.devices if isinstance(trainer.devices, int) else gpus or 1


def world_size(trainer: TrainerConfig, *, gpus: int, world: World | None) -> int:
    """Return the number of ranks of the run."""
    return world.size if world is not None else trainer.num_nodes * local_ranks(trainer, gpus)


def _machine(trainer: TrainerConfig, gpus: int, world: World | None) -> Errors:
    if (text := check_open_files()) is not None:
        yield ConfigError("ulimit -n", text)
    nodes, devices = trainer.num_nodes, trainer.devices
    if world is None and nodes > 1:
        remedy = "start the ranks with torchrun or srun, see examples/slurm"
        yield ConfigError("trainer.num_nodes", f"must be 1 where no ranks were started for it, got {nodes}; {remedy}")
    even = world is not None and world.local_size and world.size % world.local_size == 0
    if world is not None and devices == "auto" and world.local_size and even and nodes * world.local_size != world.size:
        found = world.size // world.local_size
        yield ConfigError("trainer.num_nodes", f"must be the number of machines that were started, {found}, got {nodes}")
    if world is not None and isinstance(devices, int) and (expected := devices * nodes) != world.size:
        product = f"trainer.num_nodes * trainer.devices = {nodes} * {devices} = {expected}"
        remedy = f"start {expected} ranks or set trainer.num_nodes and trainer.devices to what you started"
        text = f"must fit the ranks that were started ({product}), got {world.size}; {remedy}"
        yield ConfigError("trainer.devices", text, _RANKS)
    if trainer.accelerator == "gpu" and not gpus:
        yield ConfigError("trainer.accelerator", "must be cpu or auto on a machine without GPUs that torch can use, got gpu")
    # With srun --gpus-per-task=1, a rank sees only its own GPU and not those of the other ranks of the machine.
    sees_its_own = world is not None and gpus == 1 and not world.sees_same
    here = devices if isinstance(devices, int) else world.local_size if world is not None else None
    if gpus and here is not None and here > gpus and not sees_its_own:  # NCCL rejects two ranks on one GPU, much later
        number = "one GPU" if gpus == 1 else f"{gpus} GPUs"
        remedy = "use fewer ranks, or trainer.accelerator=cpu"
        yield ConfigError("trainer.devices", f"must be at most the {number} of this machine, got {here}; {remedy}")


def _callbacks(cfg: RunConfig) -> Errors:
    for spec in cfg.trainer.callbacks:
        if (wrong := error_of(partial(find_callback, spec))) is not None:
            yield ConfigError("trainer.callbacks", wrong)


def _checkpoints(cfg: RunConfig) -> Errors:
    monitor = cfg.exp_manager.checkpoint_callback_params.monitor
    yield from monitor_rules(cfg, "exp_manager.checkpoint_callback_params.monitor", monitor)
    for package in ("tensorboard", "wandb", "mlflow"):
        if getattr(cfg.exp_manager, f"create_{package}_logger") and not installed(package):
            yield ConfigError(f"exp_manager.create_{package}_logger", f"cannot be true: {missing_package(package)}")


def _files(cfg: RunConfig) -> Errors:
    key, folder = "pretrained_checkpoint.restore_from_path", cfg.pretrained_checkpoint.restore_from_path
    if is_peft_folder(Path(folder)):
        remedy = "name it in model.peft.restore_from_path, and here the model that they belong to"
        yield ConfigError(key, f"must be a model, got {folder}, which holds adapters in PEFT format; {remedy}")
    elif not any(os.path.isfile(f"{folder}/{file}") for file in ("config.json", "trainer.json")):
        form = "must be a Hugging Face folder (with config.json) or one of our checkpoints (with trainer.json)"
        got = f"{folder}{irregular_files(Path(folder))}"
        yield ConfigError(key, f"{form}, got {got}; download it or correct the path", about_files=True)
    adapter = cfg.model.peft.restore_from_path
    if adapter is not None and not os.path.isfile(os.path.join(adapter, "adapter_config.json")):
        text = f"must be a folder in PEFT format (with adapter_config.json), got {adapter}; correct the path"
        yield ConfigError("model.peft.restore_from_path", text, about_files=True)


def _data_files(cfg: RunConfig) -> Errors:
    key, prefix = "model.data.data_prefix", cfg.model.data.data_prefix
    missing = [path for path in _paths_in(prefix) if not os.path.exists(path)]
    for path in missing:
        yield ConfigError(key, f"must name files and folders that exist, got {path}; correct the path", about_files=True)
    if wrong_form := error_of(lambda: check_validation_names(prefix) if missing else read_data_prefix(prefix)):
        yield ConfigError(key, f"cannot be read: {wrong_form.removeprefix('data_prefix ')}")
    if wrong_names := error_of(lambda: Fields(cfg.model.data.fields or {})):
        yield ConfigError("model.data.fields", wrong_names)


def _paths_in(value: object) -> list[str]:
    """Return the paths in a string, a list or a mapping of splits; the weights of a blend are skipped."""
    if isinstance(value, Mapping):
        return _paths_in([*value.values()])
    if isinstance(value, list | tuple):
        return [path for part in value for path in _paths_in(part)]
    is_path = isinstance(value, str | Path) and error_of(lambda: float(str(value))) is not None
    return [str(value)] if is_path else []


def _layout(cfg: RunConfig, ranks: int) -> Errors:
    model = cfg.model
    names = ["tensor_model_parallel_size", "pipeline_model_parallel_size"]
    names += ["context_parallel_size"] * (model.context_parallel_size > 1)
    degrees, sizes = tuple(f"model.{name}" for name in names), [getattr(model, name) for name in names]
    one_model = math.prod(sizes)
    if ranks % one_model:
        product = f"{' * '.join(names[1:])} = {' * '.join(map(str, sizes))} = {one_model}"
        text = f"* {product} must divide the number of ranks, got {ranks}"
        remedy = f"use a multiple of {one_model} ranks (trainer.devices) or smaller sizes"
        yield ConfigError(degrees[0], f"{text}; {remedy}", (*degrees, *_RANKS))
    elif model.global_batch_size % (step := (model.micro_batch_size or 1) * (ranks // one_model)):
        product = f"the number of data-parallel ranks = {step}"
        if model.micro_batch_size is not None:
            product = f"micro_batch_size * data-parallel ranks = {model.micro_batch_size} * {ranks // one_model} = {step}"
        below = model.global_batch_size // step * step
        near = f"{below} or {below + step}" if below else f"{step}"
        text = f"must be divisible by {product}, got {model.global_batch_size}; use {near}"
        yield ConfigError("model.global_batch_size", text, ("model.micro_batch_size", *degrees, *_RANKS))
    yield from _expert_layout(cfg, ranks)
    if model.sequence_parallel and model.tensor_model_parallel_size == 1:
        text = "needs model.tensor_model_parallel_size above 1, got 1; raise it or set model.sequence_parallel=false"
        yield ConfigError("model.sequence_parallel", text, degrees[:1])
    if model.context_parallel_size > 1 and model.data.reset_attention_mask:
        text = "must be false with model.context_parallel_size above 1, whose ranks see a part of a row each, got true"
        reads = ("model.context_parallel_size",)
        yield ConfigError("model.data.reset_attention_mask", f"{text}; set one or the other", reads)


def _packing(cfg: RunConfig) -> Errors:
    data = cfg.model.data
    if data.packing and data.reset_attention_mask:
        text = "must be false with model.data.packing=true, whose rows of sequences take no mask, got true"
        yield ConfigError("model.data.reset_attention_mask", f"{text}; set one or the other", ("model.data.packing",))


def _expert_layout(cfg: RunConfig, ranks: int) -> Errors:
    """Check that the ranks of each pipeline stage hold complete copies of the experts in a layer."""
    model, key = cfg.model, "model.expert_model_parallel_size"
    stages, shards = model.pipeline_model_parallel_size, model.expert_tensor_parallel_size
    shards = model.tensor_model_parallel_size if shards is None else shards
    one_copy = model.expert_model_parallel_size * shards
    if ranks % (model.tensor_model_parallel_size * stages) == 0 and ranks // stages % one_copy:
        factors = f"{model.expert_model_parallel_size} * {shards} = {one_copy}"
        text = f"* expert_tensor_parallel_size = {factors} must divide the ranks of a pipeline stage, got {ranks // stages}"
        remedy = "use more ranks (trainer.devices) or smaller sizes"
        reads = ("model.expert_tensor_parallel_size", "model.tensor_model_parallel_size", *_RANKS)
        yield ConfigError(key, f"{text}; {remedy}", ("model.pipeline_model_parallel_size", *reads))


def _recompute(cfg: RunConfig) -> Errors:
    prefix, model = "model.activations_checkpoint", cfg.model
    granularity, reads = model.activations_checkpoint_granularity, (f"{prefix}_granularity",)
    values = {"method": model.activations_checkpoint_method, "num_layers": model.activations_checkpoint_num_layers}
    for (name, value), example in zip(values.items(), ("uniform", "1"), strict=True):
        if granularity == "full" and value is None:
            text = f"must be given with {prefix}_granularity=full, got null; e.g. {prefix}_{name}={example}"
            yield ConfigError(f"{prefix}_{name}", text, reads)
        if granularity != "full" and value is not None:
            text = f"must be null unless {prefix}_granularity=full, got {value}; set one or the other"
            yield ConfigError(f"{prefix}_{name}", text, reads)
    if model.recompute_modules is not None and granularity != "selective":
        text = f"must be null unless {prefix}_granularity=selective, got {', '.join(model.recompute_modules)}"
        yield ConfigError("model.recompute_modules", f"{text}; set one or the other", reads)


def _learning_rate(cfg: RunConfig) -> Errors:
    key, highest, lowest = "model.optim.sched.min_lr", cfg.model.optim.lr, cfg.model.optim.sched.min_lr
    if not 0 <= lowest <= highest:
        text = f"must be from 0 to model.optim.lr = {highest}, got {lowest}; set both, or {key}=0"
        yield ConfigError(key, text, ("model.optim.lr",))
    schedule = cfg.model.optim.sched
    if schedule.name == "constant" and schedule.constant_steps:
        text = f"must be 0 with a constant learning rate, which has no steps at min_lr, got {schedule.constant_steps}"
        yield ConfigError("model.optim.sched.constant_steps", text, ("model.optim.sched.name",))
    if schedule.warmup_ratio is not None and schedule.warmup_steps:
        text = (
            f"must be 0 where model.optim.sched.warmup_ratio={schedule.warmup_ratio} is given, got {schedule.warmup_steps}"
        )
        yield ConfigError(
            "model.optim.sched.warmup_steps", f"{text}; set one or the other", ("model.optim.sched.warmup_ratio",)
        )
    yield from _shape(schedule)


def _shape(schedule: ScheduleConfig) -> Errors:
    """Check that the options specific to one schedule are set with that schedule and only with it."""
    prefix = "model.optim.sched"
    for name, (owner, example) in {
        "wsd_decay_steps": ("WSD", "100"),
        "wsd_decay_style": ("WSD", "cosine"),
        "num_cycles": ("CosineWithRestarts", "2"),
    }.items():
        value = getattr(schedule, name)
        if schedule.name == owner and value is None:
            text = f"must be given with {prefix}.name={owner}, got null; e.g. {prefix}.{name}={example}"
            yield ConfigError(f"{prefix}.{name}", text, (f"{prefix}.name",))
        if schedule.name != owner and value is not None:
            text = f"must be null unless {prefix}.name={owner}, got {value}; set one or the other"
            yield ConfigError(f"{prefix}.{name}", text, (f"{prefix}.name",))


def _loss(cfg: RunConfig) -> Errors:
    section, loss, held = f"model.{cfg.recipe.name}", cfg.loss.record, cfg.model.reference
    yield from cfg.loss.rules(section)
    reads = (f"{section}.preference_loss",)
    if loss.needs_z0 and cfg.model.global_batch_size == 1:
        text = "must be at least 2: the reference point pairs each row with the answer of another, got 1"
        yield ConfigError("model.global_batch_size", f"{text}; use a larger batch", reads)
    given = {"mode": held.mode != "auto", "restore_from_path": held.restore_from_path, "sync_interval": held.sync_interval}
    for name in (name for name, value in given.items() if value and not loss.needs_reference):
        text = f"must be left out with {cfg.loss.preference_loss}, which has no reference, got {getattr(held, name)}"
        yield ConfigError(f"model.reference.{name}", text, reads)


def unused_keys(cfg: RunConfig) -> Errors:
    """Find keys that were given and that the loss does not use: options of other losses, and default rewards.

    Values equal to the defaults of those options are accepted, because NeMo-Aligner's file contains them.
    """
    recipe, chosen = cfg.recipe, cfg.loss.record
    section, reads = f"model.{recipe.name}", (f"model.{recipe.name}.preference_loss",)
    for name in type(cfg.loss).model_fields.keys() - recipe.loss_section.model_fields.keys() - chosen.options.keys():
        takers = [other for other, loss in recipe.losses.items() if name in loss.options]
        defaults = [loss.options[name].default for loss in recipe.losses.values() if name in loss.options]
        if (value := getattr(cfg.loss, name)) is not None and value not in defaults:
            text = f"must be left out with {cfg.loss.preference_loss}, which does not take it, got {value}"
            yield ConfigError(f"{section}.{name}", f"{text}; it is for {either(takers)}", reads)
    for name, default in {} if chosen.needs_rewards else recipe.data_defaults.items():
        if (value := getattr(cfg.model.data, name)) not in (None, default):
            takers = [other for other, loss in recipe.losses.items() if loss.needs_rewards]
            text = f"must be left out with {cfg.loss.preference_loss}, which takes no rewards, got {value}"
            yield ConfigError(f"model.data.{name}", f"{text}; it is for {either(takers)}", reads)


def _reference(cfg: RunConfig) -> Errors:
    held, peft, prefix = cfg.model.reference, cfg.model.peft, "model.reference"
    adapted, moves = peft.peft_scheme != "none", held.sync_interval > 0
    scheme, sync, path = "model.peft.peft_scheme", f"{prefix}.sync_interval", f"{prefix}.restore_from_path"
    if held.mode == "adapter" and not adapted:
        text = f"must be auto, swap or cached without adapters, got adapter; or set {scheme}=lora"
        yield ConfigError(f"{prefix}.mode", text, (scheme,))
    if held.mode == "adapter" and moves and peft.restore_from_path is None:
        text = f"must be 0 with mode adapter, where the reference is the model without adapters, got {held.sync_interval}"
        yield ConfigError(sync, f"{text}; use {prefix}.mode=swap", (f"{prefix}.mode",))
    if held.mode == "adapter" and held.restore_from_path is not None:
        text = f"must be null with mode adapter, where the reference is the model itself, got {held.restore_from_path}"
        yield ConfigError(path, f"{text}; use {prefix}.mode=cached", (f"{prefix}.mode",))
    if held.mode == "cached" and moves:
        text = f"must be 0 with mode cached, whose log-probs are computed once, got {held.sync_interval}"
        yield ConfigError(sync, f"{text}; use {prefix}.mode=swap", (f"{prefix}.mode",))
    if peft.restore_from_path is not None and not adapted:
        text = f"must be null without adapters, got {peft.restore_from_path}; set {scheme}=lora"
        yield ConfigError("model.peft.restore_from_path", text, (scheme,))


def _export(cfg: RunConfig) -> Errors:
    paths = {name: getattr(cfg.export, name) for name in ("path", "adapter_path")}
    for name, path in paths.items():
        if cfg.export.enabled and not path:
            yield ConfigError(f"export.{name}", "must name a folder, got nothing; or set export.enabled=false")
    if cfg.export.enabled and cfg.export.which == "best":
        yield from best_rules(cfg)
    both = [os.path.abspath(path) for path in paths.values() if path]
    if cfg.export.enabled and cfg.model.peft.peft_scheme != "none" and len(set(both)) < len(both):
        # from a shared folder, transformers would load the base model and the adapters, and never the merged weights
        text = f"must be another folder than export.path, got {cfg.export.adapter_path} for both; merged weights go there"
        yield ConfigError("export.adapter_path", text, ("export.path", "model.peft.peft_scheme"))
