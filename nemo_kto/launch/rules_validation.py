"""The rules of what needs validations: the choice of the best checkpoint, and early stopping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nemo_kto.data.prefix import AUTO, SPLITS, WHOLE, read_data_prefix, read_splits_string
from nemo_kto.errors import ConfigError, either
from nemo_kto.launch.schema import RunConfig

Errors = Iterator[ConfigError]
Wanted = Mapping[str, tuple[object, bool, str]]  # key -> its value, whether that fits, and what it must be
_CHECKPOINTS, _STOPPING = "exp_manager.checkpoint_callback_params", "exp_manager.early_stopping_callback_params"


def monitor_rules(cfg: RunConfig, key: str, monitor: str) -> Errors:
    """Whether ``monitor``, the value of ``key``, names a metric of the loss."""
    loss = cfg.loss.record
    metrics = (*cfg.recipe.metrics, *(cfg.recipe.z0_metrics if loss.needs_z0 else ()))
    source, _, metric = monitor.partition("_")
    if source not in ("val", "train") or metric not in metrics:
        text = f"must be val_ or train_ and one of {', '.join(metrics)}, got {monitor}; e.g. val_loss"
        reads = (f"model.{cfg.recipe.name}.preference_loss",) if metric in cfg.recipe.z0_metrics else ()
        yield ConfigError(key, text, reads)


def best_rules(cfg: RunConfig) -> Errors:
    """Whether the run will have checkpoints to choose from, and a metric to choose by."""
    kept, loop, section = cfg.exp_manager.checkpoint_callback_params, cfg.loop, f"trainer.{cfg.recipe.name}"
    wanted: Wanted = {
        f"{_CHECKPOINTS}.save_top_k": (kept.save_top_k, kept.save_top_k != 0, "not be 0"),
        f"{_CHECKPOINTS}.monitor": (kept.monitor, kept.monitor.startswith("val_"), "start with val_"),
        f"{section}.save_interval": (loop.save_interval, loop.save_interval > 0, "be above 0"),
        f"{section}.limit_val_batches": (loop.limit_val_batches, loop.limit_val_batches > 0, "be above 0"),
    }
    yield from _validations(cfg, wanted, key="export.which", value="best", instead="last")


def early_stopping_rules(cfg: RunConfig) -> Errors:
    """Whether the run will have validations, and the metric that is looked at."""
    if not cfg.exp_manager.create_early_stopping_callback:
        return
    monitor, loop = cfg.exp_manager.early_stopping_callback_params.monitor, cfg.loop
    if monitor != cfg.exp_manager.checkpoint_callback_params.monitor:  # of which it is said already
        yield from monitor_rules(cfg, f"{_STOPPING}.monitor", monitor)
    section = f"trainer.{cfg.recipe.name}"
    wanted: Wanted = {
        f"{_STOPPING}.monitor": (monitor, monitor.startswith("val_"), "start with val_"),
        f"{section}.val_check_interval": (loop.val_check_interval, loop.val_check_interval > 0, "be above 0"),
        f"{section}.limit_val_batches": (loop.limit_val_batches, loop.limit_val_batches > 0, "be above 0"),
    }
    yield from _validations(cfg, wanted, key="exp_manager.create_early_stopping_callback", value="true", instead="false")


def _validations(cfg: RunConfig, wanted: Wanted, *, key: str, value: str, instead: str) -> Errors:
    """Whether there will be validations as ``key`` needs them where it has that value; it can be set to ``instead``."""
    setting, without = f"{key}={value}", f"or set {key}={instead}"
    for name, (got, fits, constraint) in wanted.items():
        if not fits:
            yield ConfigError(name, f"must {constraint} with {setting}, got {got}; change it, {without}", (key,))
    data, reads = "model.data.data_prefix", ("model.data.data_prefix", key)
    try:
        sources = read_data_prefix(cfg.model.data.data_prefix)
    except ValueError:  # said of the files
        return
    given = cfg.model.data.splits_string
    if WHOLE not in sources and "validation" not in sources:
        text = f"must name rows for validation with {setting}, got those for {either([*sources])}; add them, {without}"
        yield ConfigError(data, text, reads[1:])
    shares = None if given is None else read_splits_string(given)  # None for auto too
    if WHOLE in sources and given != AUTO and (shares is None or not shares[SPLITS.index("validation")]):
        text = f"must leave rows for validation with {setting}, got {'null' if given is None else given}"
        yield ConfigError("model.data.splits_string", f'{text}; e.g. "90,10", {without}', reads)
