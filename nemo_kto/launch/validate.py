"""What a configuration must fulfil beyond its types. Everything that is wrong is found, not the first thing alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_kto.data.prefix import read_data_prefix, read_splits_string
from nemo_kto.data.truncation import TRUNCATION_MODES
from nemo_kto.launch.problem import Found, Problem, at_least, one_of, raises
from nemo_kto.launch.schema import LoopConfig, RunConfig
from nemo_kto.launch.validate_model import MODEL_CHECKS
from nemo_kto.parallel import device
from nemo_kto.parallel.precision import PRECISIONS
from nemo_kto.telemetry.loggers import installed, missing_package
from nemo_kto.telemetry.timers import parse_duration

# What the losses report (a test compares); val_ or train_ stands before it.
_SHARED_METRICS = (
    "loss", "preference_loss", "sft_loss", "rewards_margin", "rewards_chosen_mean", "rewards_rejected_mean",
    "rewards_all_mean", "rewards_all_std", "logps_chosen_mean", "logps_rejected_mean",
)  # fmt: skip
METRICS = {"kto": (*_SHARED_METRICS, "kl"), "dpo": (*_SHARED_METRICS, "acc", "rewards_margin_std")}


def problems(cfg: RunConfig, *, world_size: int) -> list[str]:
    """All mistakes in a configuration, one line each.

    Args:
        cfg: of the right types; texts that were to be given and were not are empty.
        world_size: number of ranks.
    """
    return [str(problem) for problem in find_problems(cfg, world_size=world_size)]


def find_problems(cfg: RunConfig, *, world_size: int) -> list[Problem]:
    """The same with keys apart."""
    found: list[Problem] = []
    for check in (_trainer, _exp_manager, _paths, *MODEL_CHECKS, _data, _export):
        found.extend(check(cfg))
    found.extend(_loop(f"trainer.{cfg.algorithm.name}", cfg.loop))
    found.extend(_layout(cfg, world_size))
    return found


def _trainer(cfg: RunConfig) -> Found:
    trainer, gpus = cfg.trainer, device.device_count()
    yield from at_least("trainer.num_nodes", trainer.num_nodes, 1)
    yield from at_least("trainer.timeout_minutes", trainer.timeout_minutes, 1)
    yield from one_of("trainer.accelerator", trainer.accelerator, ("auto", "cpu", "gpu"))
    yield from one_of("trainer.precision", trainer.precision, tuple(PRECISIONS), "fp16 and fp64 are not supported")
    if trainer.accelerator == "gpu" and not gpus:
        text = "must be cpu or auto on a machine without GPUs that torch can use, got gpu"
        yield Problem("trainer.accelerator", text)
    if isinstance(trainer.devices, str):
        if trainer.devices != "auto":
            yield Problem("trainer.devices", f"must be a whole number or auto, got '{trainer.devices}'")
    elif trainer.devices < 1:
        yield from at_least("trainer.devices", trainer.devices, 1, "use auto for one rank a GPU")
    elif gpus and trainer.accelerator != "cpu" and trainer.devices > gpus:
        remedy = "use fewer ranks, or trainer.accelerator=cpu"
        yield Problem("trainer.devices", f"must be at most the {gpus} GPUs of this machine, got {trainer.devices}; {remedy}")
    if trainer.max_time is not None and raises(lambda: parse_duration(str(trainer.max_time))):
        form = "must be written DD:HH:MM:SS (days:hours:minutes:seconds)"
        yield Problem("trainer.max_time", f"{form}, got '{trainer.max_time}'; e.g. trainer.max_time=00:03:45:00")


def _loop(prefix: str, loop: LoopConfig) -> Found:
    yield from at_least(f"{prefix}.max_epochs", loop.max_epochs, 1)
    if loop.max_steps != -1:
        yield from at_least(f"{prefix}.max_steps", loop.max_steps, 1, "use -1 for no limit")
    yield from at_least(f"{prefix}.gradient_clip_val", loop.gradient_clip_val, 0, "0 switches clipping off")
    for name in ("val_check_interval", "save_interval", "limit_train_batches", "limit_val_batches"):
        value = getattr(loop, name)
        if value < 0 or (isinstance(value, float) and not value <= 1.0):
            form = "must be a whole number of at least 0, or a fraction from 0.0 to 1.0"
            yield Problem(f"{prefix}.{name}", f"{form}, got {value}")
    if loop.limit_train_batches == 0:
        yield Problem(f"{prefix}.limit_train_batches", "must leave something to train on, got 0; use 1.0 for all")


def _exp_manager(cfg: RunConfig) -> Found:
    manager = cfg.exp_manager
    checkpoints = manager.checkpoint_callback_params
    prefix = "exp_manager.checkpoint_callback_params"
    source, _, metric = checkpoints.monitor.partition("_")
    metrics = METRICS[cfg.algorithm.name]
    if source not in ("val", "train") or metric not in metrics:
        text = f"must be val_ or train_ and one of {', '.join(metrics)}, got {checkpoints.monitor}; e.g. val_loss"
        yield Problem(f"{prefix}.monitor", text)
    elif metric == "kl" and cfg.loss.preference_loss == "apo_zero_unpaired":
        text = f"must not be kl, which apo_zero_unpaired does not have, got {checkpoints.monitor}; e.g. val_loss"
        yield Problem(f"{prefix}.monitor", text, ("model.kto.preference_loss",))
    yield from one_of(f"{prefix}.mode", checkpoints.mode, ("min", "max"))
    yield from at_least(f"{prefix}.save_top_k", checkpoints.save_top_k, -1, "-1 keeps all checkpoints, 0 the last alone")
    if not manager.explicit_log_dir:
        yield Problem("exp_manager.explicit_log_dir", "must name a folder, got nothing")
    switches = {
        "tensorboard": manager.create_tensorboard_logger,
        "wandb": manager.create_wandb_logger,
        "mlflow": manager.create_mlflow_logger,
    }
    for package, wanted in switches.items():
        if wanted and not installed(package):
            yield Problem(f"exp_manager.create_{package}_logger", f"cannot be true: {missing_package(package)}")


def _paths(cfg: RunConfig) -> Found:
    key, folder = "pretrained_checkpoint.restore_from_path", cfg.pretrained_checkpoint.restore_from_path
    if not folder:
        yield Problem(key, "must be given, got nothing; name the folder of a Hugging Face model")
    else:
        yield from _is_model(key, folder)
    if (other := cfg.model.reference.restore_from_path) is not None:
        yield from _is_model("model.reference.restore_from_path", other)
    adapter = cfg.model.peft.restore_from_path
    if adapter is not None and not os.path.isfile(os.path.join(adapter, "adapter_config.json")):
        text = f"must be a folder in PEFT format (with adapter_config.json), got {adapter}; correct the path"
        yield Problem("model.peft.restore_from_path", text, (), True)
    key, prefix = "model.data.data_prefix", cfg.model.data.data_prefix
    if not prefix:
        yield Problem(key, "must be given, got nothing; name a jsonl file, a folder or a list of them")
        return
    missing = [path for path in _paths_in(prefix) if not os.path.exists(path)]
    for path in missing:
        yield Problem(key, f"must name files and folders that exist, got {path}; correct the path", (), True)
    wrong_form = None if missing else raises(lambda: read_data_prefix(prefix))
    if wrong_form:
        yield Problem(key, f"cannot be read: {wrong_form.removeprefix('data_prefix ')}")


def _is_model(key: str, folder: str) -> Found:
    if not any(os.path.isfile(os.path.join(folder, name)) for name in ("config.json", "trainer.json")):
        form = "must be a Hugging Face folder (with config.json) or one of our checkpoints (with trainer.json)"
        yield Problem(key, f"{form}, got {folder}; download it or correct the path", (), True)


def _paths_in(value: Any) -> list[str]:
    """Texts in a text, a list or a mapping of splits; weights of a blend are no paths."""
    if isinstance(value, Mapping):
        return [path for part in value.values() for path in _paths_in(part)]
    if isinstance(value, list | tuple):
        return [path for part in value for path in _paths_in(part)]
    if not isinstance(value, str | Path):
        return []
    try:
        float(str(value))
    except ValueError:
        return [str(value)]
    return []


def _layout(cfg: RunConfig, world_size: int) -> Found:
    model, trainer = cfg.model, cfg.trainer
    degrees = {
        f"model.{name}_model_parallel_size": getattr(model, f"{name}_model_parallel_size") for name in ("tensor", "pipeline")
    }
    ranks = ("trainer.devices", "trainer.num_nodes")
    if isinstance(trainer.devices, int) and min(trainer.devices, trainer.num_nodes) >= 1:
        expected = trainer.devices * trainer.num_nodes
        if expected != world_size:
            product = f"trainer.num_nodes * trainer.devices = {trainer.num_nodes} * {trainer.devices} = {expected}"
            remedy = f"start {expected} ranks or set trainer.num_nodes and trainer.devices to what you started"
            yield Problem(
                "trainer.devices", f"must fit the ranks that were started ({product}), got {world_size}; {remedy}", ranks
            )
    if any(degree < 1 for degree in degrees.values()):
        for key, degree in degrees.items():
            yield from at_least(key, degree, 1)
        return
    one_model = model.tensor_model_parallel_size * model.pipeline_model_parallel_size
    factors = f"{model.tensor_model_parallel_size} * {model.pipeline_model_parallel_size}"
    if world_size % one_model:
        text = f"* pipeline_model_parallel_size = {factors} = {one_model} must divide the number of ranks, got {world_size}"
        remedy = f"use a multiple of {one_model} ranks (trainer.devices) or smaller sizes"
        yield Problem("model.tensor_model_parallel_size", f"{text}; {remedy}", (*degrees, *ranks))
    elif model.micro_batch_size >= 1 and model.global_batch_size >= 1:
        yield from _batch(cfg, world_size // one_model, (*degrees, *ranks))
    if model.sequence_parallel and model.tensor_model_parallel_size == 1:
        text = "needs model.tensor_model_parallel_size above 1, got 1; raise it or set model.sequence_parallel=false"
        yield Problem("model.sequence_parallel", text, ("model.tensor_model_parallel_size",))


def _batch(cfg: RunConfig, data_ranks: int, reads: tuple[str, ...]) -> Found:
    model = cfg.model
    step = model.micro_batch_size * data_ranks
    if model.global_batch_size % step:
        product = f"micro_batch_size * data-parallel ranks = {model.micro_batch_size} * {data_ranks} = {step}"
        below = model.global_batch_size // step * step
        near = f"{below} or {below + step}" if below else f"{step}"
        text = f"must be divisible by {product}, got {model.global_batch_size}; use {near}"
        yield Problem("model.global_batch_size", text, ("model.micro_batch_size", *reads))


def _data(cfg: RunConfig) -> Found:
    data = cfg.model.data
    splits = data.splits_string
    if splits is not None and raises(lambda: read_splits_string(splits)):
        form = 'must be up to three numbers of at least 0, the first above 0, such as "98,1,1"'
        yield Problem("model.data.splits_string", f"{form}, got '{splits}'")
    yield from at_least("model.data.seq_length", data.seq_length, 2, "a row has a prompt and an answer")
    yield from one_of("model.data.truncation_mode", data.truncation_mode, TRUNCATION_MODES)
    yield from at_least("model.data.num_workers", data.num_workers, 0)


def _export(cfg: RunConfig) -> Found:
    if not cfg.export.max_shard_size_gb > 0:
        yield Problem("export.max_shard_size_gb", f"must be above 0, got {cfg.export.max_shard_size_gb}; e.g. 5.0")
    for name in ("path", "adapter_path"):
        if cfg.export.enabled and not getattr(cfg.export, name):
            yield Problem(f"export.{name}", "must name a folder, got nothing; or set export.enabled=false")
    both = [os.path.abspath(path) for path in (cfg.export.path, cfg.export.adapter_path) if path]
    if cfg.export.enabled and cfg.model.peft.peft_scheme != "none" and len(set(both)) < len(both):
        # transformers would load the base model and the adapters from there, and never the merged weights
        text = f"must be another folder than export.path, got {cfg.export.adapter_path} for both; merged weights go there"
        yield Problem("export.adapter_path", text, ("export.path", "model.peft.peft_scheme"))
