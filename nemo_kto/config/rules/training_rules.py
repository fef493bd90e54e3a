"""Rules that concern several keys or the machine; all rules together. Rules for single keys are in schema.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from nemo_kto.algorithms.recipes.recipe import LARGER_IS_BETTER, OTHER_METRICS
from nemo_kto.config.resolved import ResolvedRun, find_callback
from nemo_kto.config.rules.file_rules import file_rules
from nemo_kto.config.rules.layout_rules import computes_here, gpu_rules, rank_rules
from nemo_kto.data.rows.data_sources import (
    AUTO,
    SPLITS,
    UNNAMED,
    WHOLE,
    read_data_prefix,
    read_splits_string,
    validation_names,
    validation_split,
)
from nemo_kto.data.rows.reader import read_prompts
from nemo_kto.data.rows.records import DataError
from nemo_kto.errors import ConfigError, UserError, either, error_of
from nemo_kto.losses.metrics import metric_prefix
from nemo_kto.model_files.tokenizer_files import has_chat_template
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


Wanted = Mapping[str, tuple[object, bool, str]]  # key -> value, whether it is valid, and the constraint
_DATA = "model.data.data_prefix"
_SAMPLES, _MODEL = "exp_manager.samples", "pretrained_checkpoint.restore_from_path"
_CHECKPOINTS, _STOPPING = "exp_manager.checkpoint_callback_params", "exp_manager.early_stopping_callback_params"


def monitor_rules(run: ResolvedRun) -> Errors:
    """Check that the monitor of checkpoints and of early stopping is a metric of the loss.

    With named validation sets, it must be that of one set, not a mean, because only the user knows which sets count.
    """
    recipe, sets, loss = run.cfg.recipe, validation_names(run.cfg.model.data.data_prefix), run.cfg.loss.definition
    settings = run.cfg.exp_manager.checkpoint_callback_params
    monitor = settings.monitor
    metrics = (*recipe.metrics, *(metric for name, metric in recipe.anchors.items() if name == loss.anchor))
    metrics += loss.part_metrics
    of_validations = [f"val_{metric_prefix(name)}" for name in sets]
    prefixes = [*of_validations, "train_"]
    only_val = [f"{prefix}{metric}" for prefix in of_validations for metric in recipe.val_metrics]
    if monitor in {f"{prefix}{metric}" for prefix in prefixes for metric in metrics} | {*only_val}:
        yield from _mode_rules(monitor=monitor, mode=settings.mode)
        return
    named = ", or ".join([", ".join(metrics), *only_val])
    text = f"must be {either(prefixes)} and one of {named}, got {monitor}; e.g. {prefixes[0]}loss"
    reads = []
    if monitor.endswith(tuple(f"_{metric}" for metric in recipe.anchors.values())):
        reads.append(f"model.{recipe.name}.preference_loss")
    if sets == (UNNAMED,) and monitor.startswith("val_") and monitor.endswith(tuple(f"_{metric}" for metric in metrics)):
        reads.append(_DATA)  # data_prefix may be invalid itself, so that the names of its sets are not known
    yield ConfigError(f"{_CHECKPOINTS}.monitor", text, tuple(reads))


def _mode_rules(*, monitor: str, mode: str) -> Errors:
    """Check that checkpoints and early stopping do not look for the worst value of a metric."""
    better = None
    if monitor.endswith(tuple(f"_{metric}" for metric in LARGER_IS_BETTER)):
        better = "max"
    elif monitor.endswith("_loss"):
        better = "min"
    if better is not None and mode != better:
        reason = f"because {'larger' if better == 'max' else 'smaller'} values of {monitor} are better"
        yield ConfigError(f"{_CHECKPOINTS}.mode", f"must be {better}, {reason}, got {mode}", (f"{_CHECKPOINTS}.monitor",))


def set_name_rules(run: ResolvedRun) -> Errors:
    """Check that the metrics of each validation set have names that no other set and no other metric uses."""
    recipe, parts = run.cfg.recipe, run.cfg.loss.definition.part_metrics
    reported = (*recipe.metrics, *parts, *recipe.val_metrics, *recipe.anchors.values(), *OTHER_METRICS)
    taken = dict.fromkeys(reported, UNNAMED)  # name of a metric or a set -> the set that uses it
    for name in validation_names(run.cfg.model.data.data_prefix):
        own = [name, *(f"{metric_prefix(name)}{metric}" for metric in reported)] if name else []
        if shared := next((metric for metric in own if metric in taken), None):
            both = f"{taken[shared]} and {name}" if taken[shared] else name
            text = f"must name validation sets so that no metric has two meanings, got {both} (val_{shared}); rename "
            yield ConfigError(_DATA, text + ("one of them" if taken[shared] else "it"))
        taken |= dict.fromkeys(own, name)


def best_rules(run: ResolvedRun) -> Errors:
    """Check that the run will have checkpoints to select from, and a metric to select by."""
    cfg = run.cfg
    kept, loop, section = cfg.exp_manager.checkpoint_callback_params, cfg.loop, f"trainer.{cfg.recipe.name}"
    wanted: Wanted = {
        f"{_CHECKPOINTS}.save_top_k": (kept.save_top_k, kept.save_top_k != 0, "not be 0"),
        f"{_CHECKPOINTS}.monitor": (kept.monitor, kept.monitor.startswith("val_"), "start with val_"),
        f"{section}.save_interval": (loop.save_interval, loop.save_interval > 0, "be above 0"),
        f"{section}.limit_val_batches": (loop.limit_val_batches, loop.limit_val_batches > 0, "be above 0"),
    }
    yield from _needs_validation(run, wanted, key="export.which", value="best", instead="last")


def early_stopping_rules(run: ResolvedRun) -> Errors:
    """Check that the run will have validations, and that early stopping monitors the metric that ranks the checkpoints."""
    cfg = run.cfg
    if not cfg.exp_manager.create_early_stopping_callback:
        return
    stopping, kept, loop = (
        cfg.exp_manager.early_stopping_callback_params,
        cfg.exp_manager.checkpoint_callback_params,
        cfg.loop,
    )
    for name in ("monitor", "mode"):
        if (own := getattr(stopping, name)) != (shared := getattr(kept, name)):
            text = f"must be that of the checkpoints, {_CHECKPOINTS}.{name}={shared}, got {own}; leave it out"
            yield ConfigError(f"{_STOPPING}.{name}", f"{text}, and set {_CHECKPOINTS}.{name}", (f"{_CHECKPOINTS}.{name}",))
    section = f"trainer.{cfg.recipe.name}"
    wanted: Wanted = {
        f"{_CHECKPOINTS}.monitor": (kept.monitor, kept.monitor.startswith("val_"), "start with val_"),
        f"{section}.val_check_interval": (loop.val_check_interval, loop.val_check_interval > 0, "be above 0"),
        f"{section}.limit_val_batches": (loop.limit_val_batches, loop.limit_val_batches > 0, "be above 0"),
    }
    yield from _needs_validation(
        run, wanted, key="exp_manager.create_early_stopping_callback", value="true", instead="false"
    )


def sample_rules(run: ResolvedRun) -> Errors:
    """Check the settings of the samples, the file of their prompts, and that the run will have validations."""
    samples, length = run.cfg.exp_manager.samples, run.cfg.seq_length
    if not samples.enabled or samples.only_at_ends:
        return
    if samples.max_new_tokens >= length:
        text = f"must leave room for a prompt in model.data.seq_length={length}, got {samples.max_new_tokens}; lower it"
        yield ConfigError(f"{_SAMPLES}.max_new_tokens", text, ("model.data.seq_length", _MODEL))
    for name, given, everything in (("top_p", samples.top_p, 1.0), ("top_k", samples.top_k, 0)):
        if samples.temperature == 0 and given != everything:
            text = f"must be {everything} with temperature=0.0, which does not draw, got {given}"
            yield ConfigError(f"{_SAMPLES}.{name}", f"{text}; set {_SAMPLES}.temperature=1.0", (f"{_SAMPLES}.temperature",))
    if samples.prompts is not None:
        yield from _prompt_rules(run, samples.prompts)
    loop, section = run.cfg.loop, f"trainer.{run.cfg.recipe.name}"
    wanted = {
        f"{section}.val_check_interval": (loop.val_check_interval, loop.val_check_interval > 0, "be above 0"),
        f"{section}.limit_val_batches": (loop.limit_val_batches, loop.limit_val_batches > 0, "be above 0"),
    }
    key, value, instead = "count", str(samples.count), "0"
    if samples.prompts is not None:
        key, value, instead = "prompts", samples.prompts, "null"
    yield from _needs_validation(run, wanted, key=f"{_SAMPLES}.{key}", value=value, instead=instead)


def _prompt_rules(run: ResolvedRun, file: str) -> Errors:
    """Check that the prompts of a file can be read, and that the tokenizer can render those that are messages."""
    key, folder = f"{_SAMPLES}.prompts", run.files.hf_folder
    try:
        records = read_prompts(file, run.cfg.model.data.json_columns)
        if any(isinstance(record.prompt, list) for record in records) and not has_chat_template(folder):
            text = f"must contain plain strings for a tokenizer without a chat template, got messages in {file}"
            remedy = f"add chat_template.jinja to {folder}, or write the prompts as strings"
            yield ConfigError(key, f"{text}; {remedy}", (_MODEL,), about_files=True)
    except DataError as error:
        yield ConfigError(key, f"cannot be used: {error}", about_files=True)
    except UserError:
        return  # reported by the check of the tokenizer


def _needs_validation(run: ResolvedRun, wanted: Wanted, *, key: str, value: str, instead: str) -> Errors:
    """Check the values that ``key=value`` requires, and that there will be validations; ``key=instead`` needs none."""
    setting, without = f"{key}={value}", f"or set {key}={instead}"
    for name, (got, fits, constraint) in wanted.items():
        if not fits:
            yield ConfigError(name, f"must {constraint} with {setting}, got {got}; change it, {without}", (key,))
    prefix, given = run.cfg.model.data.data_prefix, run.cfg.model.data.splits_string
    try:
        sources = read_data_prefix(prefix)
    except ValueError:  # reported by the rules for files
        return
    if WHOLE not in sources and sources.keys().isdisjoint(map(validation_split, validation_names(prefix))):
        text = f"must name rows for validation with {setting}, got those for {either([*sources])}; add them, {without}"
        yield ConfigError(_DATA, text, (key,))
    shares = None if given is None else read_splits_string(given)  # also None for auto
    if WHOLE in sources and given != AUTO and (shares is None or not shares[SPLITS.index("validation")]):
        text = f"must leave rows for validation with {setting}, got {'null' if given is None else given}"
        yield ConfigError("model.data.splits_string", f'{text}; e.g. "90,10", {without}', (_DATA, key))
