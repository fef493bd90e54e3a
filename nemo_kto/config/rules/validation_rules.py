"""Rules for features that need validation: selection of the best checkpoint, early stopping, samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nemo_kto.algorithms.recipes.recipe import LARGER_IS_BETTER, OTHER_METRICS
from nemo_kto.config.resolved import ResolvedRun
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
from nemo_kto.errors import ConfigError, UserError, either
from nemo_kto.losses.metrics import metric_prefix
from nemo_kto.model_files.tokenizer_files import has_chat_template

Errors = Iterator[ConfigError]
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
