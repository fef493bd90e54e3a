"""Types and constraints of the configuration. Default values and descriptions are only in conf/."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from operator import or_
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BaseModel, create_model

from nemo_kto.algorithms.recipes.recipe import LossConfig, Recipe
from nemo_kto.architecture.lora import MAX_ALPHA, TARGET_MODULES
from nemo_kto.data.rows.sources import read_splits_string
from nemo_kto.data.tokens.truncation import TRUNCATION_MODES
from nemo_kto.device.precision import PRECISIONS
from nemo_kto.errors import error_of
from nemo_kto.losses.loss import Loss
from nemo_kto.processes import signals
from nemo_kto.telemetry.timers import parse_duration
from nemo_kto.utils.fields import FilePath, Name, Remedy, Section, check, one_of

Base = TypeVar("Base", bound=BaseModel)


def reads(parse: Callable[[str], object]) -> Callable[[str], bool]:
    """Return a predicate that is true for strings that ``parse`` accepts, i.e. without a ValueError."""
    return lambda text: error_of(lambda: parse(text)) is None


def _is_part(part: float) -> bool:
    return part >= 0 and (isinstance(part, int) or part <= 1.0)


def _two_decays(betas: list[float]) -> bool:
    return len(betas) == 2 and all(0 <= beta < 1 for beta in betas)


Count = Annotated[int, Ge(1)]
Unsupported = "not supported in this version"
Part = Annotated[int | float, check(_is_part, "be an integer of at least 0, or a fraction from 0.0 to 1.0")]
Duration = Annotated[
    Name, check(reads(parse_duration), "be written DD:HH:MM:SS (days:hours:minutes:seconds)", "e.g. {key}=00:03:45:00")
]
Splits = Annotated[
    Name,
    check(reads(read_splits_string), 'be auto, or up to three numbers, the first above 0, such as "98,2"'),
]
RecomputeModules = Annotated[
    list[Annotated[str, one_of(("mlp", "core_attn"))]], check(bool, "not be empty", "null recomputes the MLP")
]
LoRALayer = Annotated[int, Ge(1), Remedy("layers are counted from 1")]


class LoopConfig(Section):
    """Section trainer.NAME: the training loop."""

    max_epochs: Count
    max_steps: Annotated[int, check(lambda steps: steps == -1 or steps >= 1, "be at least 1", "use -1 for no limit")]
    val_check_interval: Part
    val_before_training: bool
    save_interval: Part
    log_every_n_steps: Count
    limit_train_batches: Annotated[Part, check(bool, "be above 0", "use 1.0 for all")]
    limit_val_batches: Part
    gradient_clip_val: Annotated[float, Ge(0), Remedy("0 switches clipping off")]

    def duration(self) -> dict[str, Any]:
        """Return the keyword arguments of :class:`nemo_kto.algorithms.duration.TrainerConfig`."""
        return self.model_dump(exclude={"gradient_clip_val"})


class TrainerConfig(Section):
    """Section trainer, without trainer.NAME."""

    num_nodes: Count
    devices: Annotated[Count | Literal["auto"], Remedy("use auto for one rank a GPU")]
    accelerator: Literal["auto", "cpu", "gpu"]
    precision: Annotated[Name, one_of(tuple(PRECISIONS)), Remedy("fp16 and fp64 are not supported")]
    max_time: Duration | None
    stop_signals: list[Annotated[str, one_of(signals.NAMES)]]
    requeue: bool
    max_skipped_steps: Annotated[int, Ge(1), Remedy("1 ends the run at the first one")]
    timeout_minutes: Annotated[Count, check(lambda minutes: minutes <= 525_600, "be at most 525600, which is a year")]
    callbacks: list[str | dict[str, object]]


class WandbConfig(Section):
    """Section exp_manager.wandb_logger_kwargs: arguments of Lightning's WandbLogger."""

    project: Name
    name: Name
    entity: Name | None
    group: Name | None
    offline: bool


class MLflowConfig(Section):
    """Section exp_manager.mlflow_logger_kwargs: arguments of Lightning's MLFlowLogger."""

    experiment_name: Name
    run_name: Name
    tracking_uri: Name | None


class CheckpointConfig(Section):
    """Section exp_manager.checkpoint_callback_params: how checkpoints are saved and which are kept."""

    monitor: Name
    mode: Literal["min", "max"]
    save_top_k: Annotated[int, Ge(-1), Remedy("-1 keeps all checkpoints, 0 only the last")]
    async_save: bool


class EarlyStoppingConfig(Section):
    """Section exp_manager.early_stopping_callback_params: the criterion for early stopping."""

    monitor: Name
    mode: Literal["min", "max"]
    min_delta: Annotated[float, Ge(0), Remedy("0: every improvement counts")]
    patience: Count


class ExpManagerConfig(Section):
    """Section exp_manager: the run folder, checkpoints and loggers."""

    exp_dir: FilePath
    name: Name
    explicit_log_dir: Annotated[FilePath, check(bool, "not be empty")]
    resume_if_exists: bool
    create_tensorboard_logger: bool
    create_wandb_logger: bool
    wandb_logger_kwargs: WandbConfig
    create_mlflow_logger: bool
    mlflow_logger_kwargs: MLflowConfig
    checkpoint_callback_params: CheckpointConfig
    create_early_stopping_callback: bool
    early_stopping_callback_params: EarlyStoppingConfig


class PretrainedConfig(Section):
    """Section pretrained_checkpoint: the model to train."""

    restore_from_path: Annotated[FilePath, check(bool, "be given", "name the folder of a Hugging Face model")]


class LoRATuningConfig(Section):
    """Section model.peft.lora_tuning: settings of the LoRA adapters."""

    target_modules: Annotated[
        list[Annotated[str, one_of(TARGET_MODULES)]], check(bool, "not be empty", "e.g. [attention_qkv]")
    ]
    adapter_dim: Count
    alpha: Annotated[float, Gt(0), Le(MAX_ALPHA), Remedy("e.g. {key}=32")]
    rslora: bool
    dora: bool
    adapter_dropout: Annotated[float, Ge(0), Lt(1), Remedy("e.g. 0.05")]
    layer_selection: Annotated[list[LoRALayer], check(bool, "not be empty", "null adapts all")] | None


class PeftConfig(Section):
    """Section model.peft: adapters."""

    peft_scheme: Literal["none", "lora"]
    restore_from_path: FilePath | None
    lora_tuning: LoRATuningConfig


class ReferenceConfig(Section):
    """Section model.reference: mode, weights and synchronization of the reference."""

    mode: Literal["auto", "swap", "adapter", "cached"]
    restore_from_path: FilePath | None
    sync_interval: Annotated[int, Ge(0), Remedy("0: the reference stays")]
    sync_alpha: Annotated[float, Gt(0), Le(1), Remedy("e.g. 0.6")]


class ScheduleConfig(Section):
    """Section model.optim.sched: the learning rate schedule."""

    name: Literal["CosineAnnealing", "CosineWithRestarts", "LinearAnnealing", "WSD", "constant"]
    warmup_steps: Annotated[int, Ge(0)]
    warmup_ratio: Annotated[float, Ge(0), Lt(1), Remedy("e.g. 0.1")] | None
    constant_steps: Annotated[int, Ge(0)]
    min_lr: float
    wsd_decay_steps: Count | None
    wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] | None
    num_cycles: Count | None


# NeMo's names; all mean the same optimizer, and use_distributed_optimizer decides whether its state is sharded.
Adam = Literal["adam", "adamw", "fused_adam", "distributed_fused_adam", "mcore_distributed_optim"]


class OptimConfig(Section):
    """Section model.optim: the optimizer."""

    name: Annotated[Adam, AfterValidator(lambda name: "adam")]
    lr: Annotated[float, Gt(0), Remedy("e.g. {key}=1e-5")]
    weight_decay: Annotated[float, Ge(0)]
    betas: Annotated[list[float], check(_two_decays, "be two numbers from 0 to below 1", "e.g. {key}=[0.9,0.98]")]
    eps: Annotated[float, Gt(0), Remedy("e.g. {key}=1e-8")]
    use_distributed_optimizer: bool
    overlap: bool | None
    moments_dtype: Literal["fp32", "bf16"]
    offload_fraction: Annotated[float, Ge(0), Le(1), Remedy("0.0 offloads nothing")]
    sched: ScheduleConfig


def _expand(value: object) -> object:
    """Return a path, list or mapping with ~ expanded in all its paths."""
    if isinstance(value, Mapping):
        return {name: _expand(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_expand(part) for part in value]
    return os.path.expanduser(value) if isinstance(value, str) else value


class DataConfig(Section):
    """Section model.data, without algorithm-specific keys."""

    data_prefix: Annotated[
        str | list[object] | dict[str, object],
        AfterValidator(_expand),
        check(bool, "be given", "name a jsonl file, a folder or a list of them"),
    ]
    splits_string: Splits | None
    fields: dict[str, Name] | None
    seq_length: Annotated[int, Ge(2), Remedy("a row has a prompt and an answer")]
    truncation_mode: Annotated[str, one_of(TRUNCATION_MODES)]
    packing: bool
    num_workers: Annotated[int, Ge(0)]
    preprocess_workers: Count | None
    cache_dir: FilePath
    cache_shared: bool
    reset_attention_mask: bool
    eod_mask_loss: bool


class GPTConfig(Section):
    """Section model, without the algorithm-specific section."""

    micro_batch_size: Count | None
    micro_batch_tokens: Count | None
    global_batch_size: Count
    tensor_model_parallel_size: Count
    pipeline_model_parallel_size: Count
    virtual_pipeline_model_parallel_size: Annotated[int, Ge(2), Remedy("null: no virtual pipeline")] | None
    num_layers_in_first_pipeline_stage: Count | None
    num_layers_in_last_pipeline_stage: Count | None
    account_for_embedding_in_pipeline_split: bool
    account_for_loss_in_pipeline_split: bool
    context_parallel_size: Count
    expert_model_parallel_size: Count
    expert_tensor_parallel_size: Count | None
    moe_aux_loss_coeff: Annotated[float, Ge(0), Remedy("0.0: no such loss")]
    sequence_parallel: bool
    seed: Annotated[int, Ge(0), Le(2**32 - 1), Remedy("e.g. {key}=1234")]
    fp8: Literal["hybrid", "e4m3"] | None
    activations_checkpoint_granularity: Literal["selective", "full"] | None
    activations_checkpoint_method: Literal["uniform", "block"] | None
    activations_checkpoint_num_layers: Count | None
    recompute_modules: RecomputeModules | None
    logprob_chunk_size: Count
    reference: ReferenceConfig
    peft: PeftConfig
    optim: OptimConfig
    data: DataConfig


class ExportConfig(Section):
    """Section export: the aligned model in Hugging Face format."""

    enabled: bool
    which: Literal["last", "best"]
    path: FilePath
    adapter_path: FilePath
    max_shard_size_gb: Annotated[float, Gt(0), check(lambda size: size <= 1e6, "be at most 1000000"), Remedy("e.g. 5.0")]


class RunConfig(Section):
    """The whole configuration; :func:`config_type` adds the sections of an algorithm."""

    recipe: ClassVar[Recipe]

    algorithm: str
    trainer: TrainerConfig
    exp_manager: ExpManagerConfig
    pretrained_checkpoint: PretrainedConfig
    model: GPTConfig
    export: ExportConfig

    @property
    def loop(self) -> LoopConfig:
        """The section trainer.NAME."""
        return getattr(self.trainer, self.recipe.name)

    @property
    def loss(self) -> LossConfig:
        """The section model.NAME."""
        return getattr(self.model, self.recipe.name)

    def data_options(self) -> dict[str, float]:
        """Return the algorithm-specific keys of model.data, with defaults for those not given."""
        given = {name: getattr(self.model.data, name) for name in self.recipe.data_defaults}
        return {name: default if given[name] is None else given[name] for name, default in self.recipe.data_defaults.items()}


def _extended(base: type[Base], fields: Mapping[str, tuple[object, object]]) -> type[Base]:
    """Derive a section with additional keys: name -> (type, default); the default ... marks a required key."""
    return create_model(base.__name__, __base__=base, **dict[str, Any](fields))


@cache
def config_type(recipe: Recipe, loss: Loss | None = None) -> type[RunConfig]:
    """Build the configuration type of an algorithm.

    The options of all its losses, and of ``loss`` if given, are keys of model.NAME.

    Args:
        recipe: the algorithm.
        loss: the loss in use, which may be user-defined.
    """
    options = {name: option.annotation for known in recipe.losses.values() for name, option in known.options.items()}
    options |= {name: option.annotation for name, option in loss.options.items()} if loss is not None else {}
    section = _extended(recipe.loss_section, {name: (or_(kind, None), None) for name, kind in options.items()})
    if loss is not None:
        section.record = loss
    data = _extended(DataConfig, dict.fromkeys(recipe.data_defaults, (float | None, ...)))
    fields: dict[str, tuple[object, object]] = {
        "algorithm": (Literal[recipe.name], ...),
        "trainer": (_extended(TrainerConfig, {recipe.name: (LoopConfig, ...)}), ...),
        "model": (_extended(GPTConfig, {"data": (data, ...), recipe.name: (section, ...)}), ...),
    }
    config = _extended(RunConfig, fields)
    config.recipe = recipe
    return config
