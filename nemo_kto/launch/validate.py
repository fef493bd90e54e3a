"""What a configuration must fulfil beyond its types. Everything that is wrong is found, not the first thing alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nemo_kto.data.prefix import read_data_prefix, read_splits_string
from nemo_kto.data.records import DataError
from nemo_kto.data.truncation import TRUNCATION_MODES
from nemo_kto.launch.schema import KTOConfig, LoopConfig
from nemo_kto.losses.kto import LOSSES
from nemo_kto.parallel import cpu
from nemo_kto.telemetry.loggers import installed, missing_package
from nemo_kto.telemetry.timers import parse_duration

# As in nemo_kto/models/optimizer.py, which is not imported here: it takes megatron-core along, and a test compares the two.
SCHEDULES = ("CosineAnnealing", "LinearAnnealing", "constant")
# What nemo_kto/losses/kto.py reports (a test compares) and the training step adds; val_ or train_ stands before it.
METRICS = (
    "loss", "kl", "rewards_margin", "rewards_chosen_mean", "rewards_rejected_mean", "rewards_all_mean", "rewards_all_std",
    "logps_chosen_mean", "logps_rejected_mean",
)  # fmt: skip


class Problem(NamedTuple):
    """One mistake.

    Attributes:
        key: whose value is wrong.
        text: constraint, value got, remedy.
        reads: further keys the verdict rests on; while one of those is wrong itself, the verdict means nothing.
        about_files: something is not on this machine, and might be on another one.
    """

    key: str
    text: str
    reads: tuple[str, ...] = ()
    about_files: bool = False

    def __str__(self) -> str:
        return f"{self.key} {self.text}"


Found = Iterator[Problem]


def problems(cfg: KTOConfig, *, world_size: int) -> list[str]:
    """All mistakes in a configuration, one line each.

    Args:
        cfg: of the right types; texts that were to be given and were not are empty.
        world_size: number of ranks.
    """
    return [str(problem) for problem in find_problems(cfg, world_size=world_size)]


def find_problems(cfg: KTOConfig, *, world_size: int) -> list[Problem]:
    """The same with keys apart."""
    found: list[Problem] = []
    for check in (_trainer, _exp_manager, _paths, _model, _recompute, _optim, _data, _kto, _export):
        found.extend(check(cfg))
    found.extend(_loop("trainer.kto", cfg.trainer.kto))
    found.extend(_layout(cfg, world_size))
    return found


def _at_least(key: str, value: float, least: float, remedy: str = "") -> Found:
    if not value >= least:
        yield Problem(key, f"must be at least {least}, got {value}" + (f"; {remedy}" if remedy else ""))


def _one_of(key: str, value: Any, names: Sequence[str], remedy: str = "") -> Found:
    if value not in names:
        yield Problem(key, f"must be {_either(names)}, got {value}" + (f"; {remedy}" if remedy else ""))


def _either(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _raises(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except (ValueError, DataError) as error:
        return str(error)
    return None


def _trainer(cfg: KTOConfig) -> Found:
    trainer, gpus = cfg.trainer, cpu.device_count()
    yield from _at_least("trainer.num_nodes", trainer.num_nodes, 1)
    yield from _at_least("trainer.timeout_minutes", trainer.timeout_minutes, 1)
    yield from _one_of("trainer.accelerator", trainer.accelerator, ("auto", "cpu", "gpu"))
    yield from _one_of("trainer.precision", trainer.precision, ("bf16", "32"))
    if trainer.accelerator == "gpu" and not gpus:
        text = "must be cpu or auto on a machine without GPUs that torch can use, got gpu"
        yield Problem("trainer.accelerator", text)
    if isinstance(trainer.devices, str):
        if trainer.devices != "auto":
            yield Problem("trainer.devices", f"must be a whole number or auto, got '{trainer.devices}'")
    elif trainer.devices < 1:
        yield from _at_least("trainer.devices", trainer.devices, 1, "use auto for one rank a GPU")
    elif gpus and trainer.accelerator != "cpu" and trainer.devices > gpus:
        remedy = "use fewer ranks, or trainer.accelerator=cpu"
        yield Problem("trainer.devices", f"must be at most the {gpus} GPUs of this machine, got {trainer.devices}; {remedy}")
    if trainer.max_time is not None and _raises(lambda: parse_duration(str(trainer.max_time))):
        form = "must be written DD:HH:MM:SS (days:hours:minutes:seconds)"
        yield Problem("trainer.max_time", f"{form}, got '{trainer.max_time}'; e.g. trainer.max_time=00:03:45:00")


def _loop(prefix: str, loop: LoopConfig) -> Found:
    yield from _at_least(f"{prefix}.max_epochs", loop.max_epochs, 1)
    if loop.max_steps != -1:
        yield from _at_least(f"{prefix}.max_steps", loop.max_steps, 1, "use -1 for no limit")
    yield from _at_least(f"{prefix}.gradient_clip_val", loop.gradient_clip_val, 0, "0 switches clipping off")
    for name in ("val_check_interval", "save_interval", "limit_train_batches", "limit_val_batches"):
        value = getattr(loop, name)
        if value < 0 or (isinstance(value, float) and not value <= 1.0):
            form = "must be a whole number of at least 0, or a fraction from 0.0 to 1.0"
            yield Problem(f"{prefix}.{name}", f"{form}, got {value}")
    if loop.limit_train_batches == 0:
        yield Problem(f"{prefix}.limit_train_batches", "must leave something to train on, got 0; use 1.0 for all")


def _exp_manager(cfg: KTOConfig) -> Found:
    manager = cfg.exp_manager
    checkpoints = manager.checkpoint_callback_params
    prefix = "exp_manager.checkpoint_callback_params"
    source, _, metric = checkpoints.monitor.partition("_")
    if source not in ("val", "train") or metric not in METRICS:
        text = f"must be val_ or train_ and one of {', '.join(METRICS)}, got {checkpoints.monitor}; e.g. val_loss"
        yield Problem(f"{prefix}.monitor", text)
    elif metric == "kl" and cfg.model.kto.preference_loss == "apo_zero_unpaired":
        text = f"must not be kl, which apo_zero_unpaired does not have, got {checkpoints.monitor}; e.g. val_loss"
        yield Problem(f"{prefix}.monitor", text, ("model.kto.preference_loss",))
    yield from _one_of(f"{prefix}.mode", checkpoints.mode, ("min", "max"))
    yield from _at_least(f"{prefix}.save_top_k", checkpoints.save_top_k, -1, "-1 keeps all checkpoints, 0 the last alone")
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


def _paths(cfg: KTOConfig) -> Found:
    key, folder = "pretrained_checkpoint.restore_from_path", cfg.pretrained_checkpoint.restore_from_path
    if not folder:
        yield Problem(key, "must be given, got nothing; name the folder of a Hugging Face model")
    elif not any(os.path.isfile(os.path.join(folder, name)) for name in ("config.json", "trainer.json")):
        form = "must be a Hugging Face folder (with config.json) or one of our checkpoints (with trainer.json)"
        yield Problem(key, f"{form}, got {folder}; download it or correct the path", (), True)
    key, prefix = "model.data.data_prefix", cfg.model.data.data_prefix
    if not prefix:
        yield Problem(key, "must be given, got nothing; name a jsonl file, a folder or a list of them")
        return
    missing = [path for path in _paths_in(prefix) if not os.path.exists(path)]
    for path in missing:
        yield Problem(key, f"must name files and folders that exist, got {path}; correct the path", (), True)
    wrong_form = None if missing else _raises(lambda: read_data_prefix(prefix))
    if wrong_form:
        yield Problem(key, f"cannot be read: {wrong_form.removeprefix('data_prefix ')}")


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


def _layout(cfg: KTOConfig, world_size: int) -> Found:
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
            yield from _at_least(key, degree, 1)
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


def _batch(cfg: KTOConfig, data_ranks: int, reads: tuple[str, ...]) -> Found:
    model = cfg.model
    step = model.micro_batch_size * data_ranks
    if model.global_batch_size % step:
        product = f"micro_batch_size * data-parallel ranks = {model.micro_batch_size} * {data_ranks} = {step}"
        below = model.global_batch_size // step * step
        near = f"{below} or {below + step}" if below else f"{step}"
        text = f"must be divisible by {product}, got {model.global_batch_size}; use {near}"
        yield Problem("model.global_batch_size", text, ("model.micro_batch_size", *reads))


def _model(cfg: KTOConfig) -> Found:
    model = cfg.model
    for name in ("micro_batch_size", "global_batch_size", "logprob_chunk_size"):
        yield from _at_least(f"model.{name}", getattr(model, name), 1)
    if model.global_batch_size == 1 and model.kto.preference_loss == "kto":
        text = "must be at least 2: the reference point pairs each row with the answer of another, got 1"
        yield Problem("model.global_batch_size", f"{text}; use a larger batch", ("model.kto.preference_loss",))
    if model.virtual_pipeline_model_parallel_size is not None:
        got = model.virtual_pipeline_model_parallel_size
        text = f"must be null, got {got}: virtual pipelines are not supported in this version"
        yield Problem("model.virtual_pipeline_model_parallel_size", text)
    for name, what in (("context", "context"), ("expert", "expert")):
        key = f"{name}_{'model_' if name == 'expert' else ''}parallel_size"
        if getattr(model, key) != 1:
            text = f"must be 1, got {getattr(model, key)}: {what} parallelism is not supported in this version"
            yield Problem(f"model.{key}", text)
    if model.peft.peft_scheme != "none":
        text = f"must be none, got {model.peft.peft_scheme}: adapters are not supported in this version"
        yield Problem("model.peft.peft_scheme", text)
    if model.fp8 is not None:
        text = f"must be null, got {model.fp8}: fp8 needs Transformer Engine and is not supported in this version"
        yield Problem("model.fp8", text)


def _recompute(cfg: KTOConfig) -> Found:
    prefix, model = "model.activations_checkpoint", cfg.model
    granularity, method = model.activations_checkpoint_granularity, model.activations_checkpoint_method
    layers = model.activations_checkpoint_num_layers
    if granularity is not None:
        yield from _one_of(f"{prefix}_granularity", granularity, ("null", "selective", "full"))
    if method is not None:
        yield from _one_of(f"{prefix}_method", method, ("null", "uniform", "block"))
    if layers is not None:
        yield from _at_least(f"{prefix}_num_layers", layers, 1)
    reads = (f"{prefix}_granularity",)
    for name, value, example in (("method", method, "uniform"), ("num_layers", layers, 1)):
        if granularity == "full" and value is None:
            text = f"must be given with {prefix}_granularity=full, got null; e.g. {prefix}_{name}={example}"
            yield Problem(f"{prefix}_{name}", text, reads)
        if granularity != "full" and value is not None:
            text = f"must be null unless {prefix}_granularity=full, got {value}; set one or the other"
            yield Problem(f"{prefix}_{name}", text, reads)


def _optim(cfg: KTOConfig) -> Found:
    optim, sched, prefix = cfg.model.optim, cfg.model.optim.sched, "model.optim"
    known = "distributed_fused_adam is adam with use_distributed_optimizer=true"
    yield from _one_of(f"{prefix}.name", optim.name, ("adam",), known)
    if not optim.lr > 0:
        yield Problem(f"{prefix}.lr", f"must be above 0, got {optim.lr}; e.g. {prefix}.lr=1e-5")
    if not optim.eps > 0:
        yield Problem(f"{prefix}.eps", f"must be above 0, got {optim.eps}; e.g. {prefix}.eps=1e-8")
    yield from _at_least(f"{prefix}.weight_decay", optim.weight_decay, 0)
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        text = f"must be two numbers from 0 to below 1, got {list(optim.betas)}; e.g. {prefix}.betas=[0.9,0.98]"
        yield Problem(f"{prefix}.betas", text)
    yield from _one_of(f"{prefix}.sched.name", sched.name, SCHEDULES)
    yield from _at_least(f"{prefix}.sched.warmup_steps", sched.warmup_steps, 0)
    steps = cfg.trainer.kto.max_steps
    if steps >= 1 and sched.warmup_steps >= steps:
        text = f"must be below trainer.kto.max_steps = {steps}, got {sched.warmup_steps}; shorten the warm-up"
        yield Problem(f"{prefix}.sched.warmup_steps", text, ("trainer.kto.max_steps",))
    if optim.lr > 0 and not 0 <= sched.min_lr <= optim.lr:
        text = f"must be from 0 to model.optim.lr = {optim.lr}, got {sched.min_lr}; set both, or {prefix}.sched.min_lr=0"
        yield Problem(f"{prefix}.sched.min_lr", text, (f"{prefix}.lr",))


def _data(cfg: KTOConfig) -> Found:
    data = cfg.model.data
    splits = data.splits_string
    if splits is not None and _raises(lambda: read_splits_string(splits)):
        form = 'must be up to three numbers of at least 0, the first above 0, such as "98,1,1"'
        yield Problem("model.data.splits_string", f"{form}, got '{splits}'")
    yield from _at_least("model.data.seq_length", data.seq_length, 2, "a row has a prompt and an answer")
    yield from _one_of("model.data.truncation_mode", data.truncation_mode, TRUNCATION_MODES)
    yield from _at_least("model.data.num_workers", data.num_workers, 0)


def _kto(cfg: KTOConfig) -> Found:
    kto = cfg.model.kto
    yield from _one_of("model.kto.preference_loss", kto.preference_loss, tuple(LOSSES))
    if not kto.ref_policy_kl_penalty > 0:
        text = f"must be above 0, got {kto.ref_policy_kl_penalty}; e.g. model.kto.ref_policy_kl_penalty=0.1"
        yield Problem("model.kto.ref_policy_kl_penalty", text)
    weights = (kto.desirable_loss_weight, kto.undesirable_loss_weight)
    for name, weight in zip(("desirable", "undesirable"), weights, strict=True):
        yield from _at_least(f"model.kto.{name}_loss_weight", weight, 0)
    if weights == (0, 0):
        text = "and model.kto.undesirable_loss_weight must not both be 0, got 0.0 and 0.0; nothing would be learned"
        yield Problem("model.kto.desirable_loss_weight", text, ("model.kto.undesirable_loss_weight",))
    key = "log_prob_forward_micro_batch_size"
    if cfg.model.micro_batch_size >= 1:  # its default is twice that
        yield from _at_least(f"model.kto.{key}", kto.log_prob_forward_micro_batch_size, 1)


def _export(cfg: KTOConfig) -> Found:
    if not cfg.export.max_shard_size_gb > 0:
        yield Problem("export.max_shard_size_gb", f"must be above 0, got {cfg.export.max_shard_size_gb}; e.g. 5.0")
    if cfg.export.enabled and not cfg.export.path:
        yield Problem("export.path", "must name a folder, got nothing; or set export.enabled=false")
