"""Types and constraints of the configuration. Default values and descriptions are only in conf/."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from operator import or_
from typing import Annotated, Any, ClassVar, Literal, TypeVar
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BaseModel, BeforeValidator, create_model

from nemo_kto.algorithms.recipes.recipe import LossConfig, Recipe
from nemo_kto.architecture.lora import MAX_ALPHA, TARGET_MODULES
from nemo_kto.data.rows.data_sources import read_splits_string
from nemo_kto.data.rows.reader import MAX_PROMPTS
from nemo_kto.data.rows.records import DROPS
from nemo_kto.data.tokens.truncation import TRUNCATION_MODES
from nemo_kto.device.precision import PRECISIONS
from nemo_kto.errors import error_of
from nemo_kto.layers.layer_settings import FORMATS
from nemo_kto.losses.loss import Loss
from nemo_kto.processes import signals
from nemo_kto.telemetry.watch import parse_duration
from nemo_kto.utils.fields import FilePath, MayChange, MustStay, Name, Remedy, Section, check, one_of

Base = TypeVar("Base", bound=BaseModel)


def _accepts(parse: Callable[[str], object]) -> Callable[[str], bool]:
    return lambda text: error_of(lambda: parse(text)) is None


def _is_part(part: float) -> bool:
    return part >= 0 and (isinstance(part, int) or part <= 1.0)


def _can_notify(target: str | None) -> bool:
    try:
        if target is None or not target.startswith("https://"):
            return target is None or shutil.which(shlex.split(target)[0]) is not None
        url = urlsplit(target)
        return re.fullmatch(r"[!-~]+", target) is not None and bool(url.hostname) and url.port != 0
    except (ValueError, IndexError):  # an open quote, no word, or a port that is no number
        return False


def _two_decays(betas: list[float]) -> bool:
    return len(betas) == 2 and all(0 <= beta < 1 for beta in betas)


# What a change of a key means in a resumed run. Each key, or a section that it is in, has one of these markers.
SAME = MustStay()
LOSS = MustStay("the loss, its weights and options; `null` is the same as the default of the loss", verbatim=False)
REWARD = MustStay(verbatim=False)  # null is the same as the default
ADAPTERS = "the settings of the adapters, in any notation"
ROWS = MustStay(
    "tokens, labels, weights and order of the training and the validation rows, by content; names of validation sets",
    verbatim=False,
)
LAYOUT = MayChange("the layout: results agree within rounding")
SPEED = MayChange("speed and memory")
NEXT_STEP = MayChange("takes effect from the next step on")
LENGTH = MayChange("the run becomes longer or shorter, and its schedule is that of the new length")
TIMES = MayChange("when the run logs, validates, saves and ends; training callbacks")
LOGGING = MayChange("logging, and which checkpoints are kept; another folder is another run")
FILES = MayChange("where files are written, and who may read them")

Count = Annotated[int, Ge(1)]
Part = Annotated[int | float, check(_is_part, "be an integer of at least 0, or a fraction from 0.0 to 1.0")]
Duration = Annotated[
    Name, check(_accepts(parse_duration), "be written DD:HH:MM:SS (days:hours:minutes:seconds)", "e.g. {key}=00:03:45:00")
]
Splits = Annotated[
    Name, check(_accepts(read_splits_string), 'be auto, or up to three numbers, the first above 0, such as "98,2"')
]
RecomputeModules = Annotated[
    list[Annotated[str, one_of(("mlp", "core_attn"))]], check(bool, "not be empty", "null recomputes the MLP")
]
LoRALayer = Annotated[int, Ge(1), Remedy("layers are counted from 1")]


class LoopConfig(Section):
    """Section trainer.NAME: the training loop."""

    max_epochs: Annotated[Count, LENGTH]
    max_steps: Annotated[int, check(lambda steps: steps == -1 or steps >= 1, "be at least 1", "use -1 for no limit"), LENGTH]
    val_check_interval: Annotated[Part, TIMES]
    val_before_training: Annotated[bool, TIMES]
    save_interval: Annotated[Part, TIMES]
    log_every_n_steps: Annotated[Count, TIMES]
    limit_train_batches: Annotated[
        Part, check(bool, "be above 0", "use 1.0 for all"), MustStay("the number of steps in an epoch", verbatim=False)
    ]
    limit_val_batches: Annotated[Part, TIMES]
    gradient_clip_val: Annotated[float, Ge(0), Remedy("0 disables clipping"), NEXT_STEP]

    def duration(self) -> dict[str, Any]:
        """Return the arguments of :class:`nemo_kto.algorithms.duration.TrainerConfig`."""
        return self.model_dump(exclude={"gradient_clip_val"})


class TrainerConfig(Section):
    """Section trainer, without trainer.NAME."""

    num_nodes: Annotated[Count, LAYOUT]
    devices: Annotated[Count | Literal["auto"], Remedy("use auto for one rank per GPU"), LAYOUT]
    accelerator: Annotated[Literal["auto", "cpu", "gpu"], LAYOUT]
    precision: Annotated[
        Name, one_of(tuple(PRECISIONS)), Remedy("fp16 and fp64 are not supported"), MustStay("the same; `auto` keeps it")
    ]
    max_time: Annotated[Duration | None, TIMES]
    stop_signals: Annotated[list[Annotated[str, one_of(signals.NAMES)]], TIMES]
    requeue: Annotated[bool, TIMES]
    max_skipped_steps: Annotated[int, Ge(1), Remedy("1 ends the run at the first skipped step"), TIMES]
    timeout_minutes: Annotated[Count, check(lambda minutes: minutes <= 525_600, "be at most 525600 (a year)"), SPEED]
    deterministic: Annotated[bool, MayChange("kernels: results agree within rounding")]
    callbacks: Annotated[list[str | dict[str, object]], TIMES]


class TrackioConfig(Section):
    """Section exp_manager.trackio_logger_kwargs: arguments of trackio.init."""

    project: Name
    name: Name


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
    min_delta: Annotated[float, Ge(0), Remedy("0 counts every improvement")]
    patience: Count


class SamplesConfig(Section):
    """Section exp_manager.samples: answers to a few prompts at each validation, or before and after the run."""

    count: Annotated[int, Ge(0), Le(MAX_PROMPTS), Remedy("0 takes no prompts from the validation rows")] | None
    prompts: FilePath | None
    max_new_tokens: Count
    temperature: Annotated[float, Ge(0), Remedy("0.0 chooses the most probable token")]
    top_p: Annotated[float, Gt(0), Le(1), Remedy("1.0 draws from all tokens")]
    top_k: Annotated[int, Ge(0), Remedy("0 draws from all tokens")]
    seed: Annotated[int, Ge(0), Le(2**32 - 1), Remedy("e.g. {key}=1234")]

    @property
    def enabled(self) -> bool:
        return self.count != 0 or self.prompts is not None

    @property
    def only_at_ends(self) -> bool:
        """Whether there are only the samples before the first and after the last step that every run has."""
        return self.count is None and self.prompts is None


class ExpManagerConfig(Section):
    """Section exp_manager: the run folder, checkpoints and loggers."""

    exp_dir: FilePath
    name: Name
    explicit_log_dir: Annotated[FilePath, check(bool, "not be empty")]
    resume_if_exists: bool
    create_tensorboard_logger: bool
    create_trackio_logger: bool
    trackio_logger_kwargs: TrackioConfig
    create_wandb_logger: bool
    wandb_logger_kwargs: WandbConfig
    create_mlflow_logger: bool
    mlflow_logger_kwargs: MLflowConfig
    notify: Annotated[str | None, check(_can_notify, "be an https URL, or a command whose program is installed")]
    checkpoint_callback_params: CheckpointConfig
    create_early_stopping_callback: Annotated[bool, TIMES]
    early_stopping_callback_params: Annotated[EarlyStoppingConfig, TIMES]
    samples: SamplesConfig


class PretrainedConfig(Section):
    """Section pretrained_checkpoint: the model to train."""

    restore_from_path: Annotated[
        FilePath,
        check(bool, "be given", "name the folder of a Hugging Face model"),
        MustStay("weights, configuration, tokenizer and chat template, by content", verbatim=False),
    ]


class LoRATuningConfig(Section):
    """Section model.peft.lora_tuning: settings of the LoRA adapters."""

    target_modules: Annotated[
        list[Annotated[str, one_of(TARGET_MODULES)]],
        BeforeValidator(lambda names: [names] if isinstance(names, str) else names),
        check(bool, "not be empty", "e.g. all-linear"),
    ]
    adapter_dim: Count
    alpha: Annotated[float, Gt(0), Le(MAX_ALPHA), Remedy("e.g. {key}=32")]
    rslora: bool
    dora: bool
    adapter_dropout: Annotated[float, Ge(0), Lt(1), Remedy("e.g. 0.05"), NEXT_STEP]
    layer_selection: Annotated[list[LoRALayer], check(bool, "not be empty", "null adapts all")] | None


class PeftConfig(Section):
    """Section model.peft: adapters."""

    peft_scheme: Annotated[Literal["none", "lora"], MustStay(ADAPTERS)]
    restore_from_path: Annotated[FilePath | None, MustStay("the adapters, by content", verbatim=False)]
    lora_tuning: Annotated[LoRATuningConfig, MustStay(ADAPTERS, verbatim=False)]


class ReferenceConfig(Section):
    """Section model.reference: mode, weights and synchronization of the reference."""

    mode: Annotated[Literal["auto", "swap", "adapter", "cached"], MayChange("how the reference is evaluated")]
    device: Annotated[Literal["auto", "cpu", "gpu"], SPEED]
    restore_from_path: Annotated[FilePath | None, MustStay("weights and configuration, by content", verbatim=False)]
    sync_interval: Annotated[int, Ge(0), Remedy("0 keeps the reference fixed"), SAME]
    sync_alpha: Annotated[
        float, Gt(0), Le(1), Remedy("e.g. 0.6"), MustStay("the same if `sync_interval` is above 0", verbatim=False)
    ]


class ScheduleConfig(Section):
    """Section model.optim.sched: the learning rate schedule."""

    name: Literal["CosineAnnealing", "CosineWithRestarts", "LinearAnnealing", "WSD", "constant"]
    warmup_steps: Annotated[int, Ge(0)] | None
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

    name: Annotated[Adam, AfterValidator(lambda name: "adam"), SAME]
    lr: Annotated[float, Gt(0), Remedy("e.g. {key}=1e-5"), NEXT_STEP]
    weight_decay: Annotated[float, Ge(0), NEXT_STEP]
    betas: Annotated[list[float], check(_two_decays, "be two numbers from 0 to below 1", "e.g. {key}=[0.9,0.98]"), NEXT_STEP]
    eps: Annotated[float, Gt(0), Remedy("e.g. {key}=1e-8"), NEXT_STEP]
    use_distributed_optimizer: Annotated[bool, SAME]
    num_distributed_optimizer_instances: Annotated[Count, LAYOUT]
    overlap: Annotated[bool | None, SPEED]
    grad_reduce_in_fp32: Annotated[bool, NEXT_STEP]
    moments_dtype: Annotated[Literal["fp32", "bf16"], NEXT_STEP]
    offload_fraction: Annotated[float, Ge(0), Le(1), Remedy("0.0 offloads nothing"), SPEED]
    sched: Annotated[ScheduleConfig, NEXT_STEP]


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
        ROWS,
    ]
    splits_string: Annotated[Splits | None, ROWS]
    fields: Annotated[dict[str, Name] | None, ROWS]
    labels: Annotated[dict[str, list[bool | int | float | str]] | None, ROWS]
    json_columns: Annotated[list[Name] | None, ROWS]
    drop: Annotated[list[Annotated[str, one_of(tuple(DROPS))]], ROWS]
    seq_length: Annotated[Annotated[int, Ge(2), Remedy("a sequence has a prompt and a response")] | None, SAME]
    apply_chat_template: Annotated[bool, ROWS]
    truncation_mode: Annotated[str, one_of(TRUNCATION_MODES), SAME]
    packing: Annotated[bool | Literal["auto"], SPEED]
    share_prompts: Annotated[bool | Literal["auto"], SPEED]
    num_workers: Annotated[int, Ge(0), SPEED]
    preprocess_workers: Annotated[Count | None, SPEED]
    cache_dir: Annotated[FilePath, FILES]
    cache_shared: Annotated[bool, FILES]
    reset_attention_mask: Annotated[bool, SAME]
    eod_mask_loss: Annotated[bool, SAME]


class GPTConfig(Section):
    """Section model, without the algorithm-specific section."""

    micro_batch_size: Annotated[Count | None, SPEED]
    micro_batch_tokens: Annotated[Count | None, SPEED]
    global_batch_size: Annotated[Count, SAME]
    tensor_model_parallel_size: Annotated[Count, LAYOUT]
    pipeline_model_parallel_size: Annotated[Count, LAYOUT]
    virtual_pipeline_model_parallel_size: Annotated[
        Annotated[int, Ge(2), Remedy("null disables the virtual pipeline")] | None, LAYOUT
    ]
    num_layers_in_first_pipeline_stage: Annotated[Count | None, LAYOUT]
    num_layers_in_last_pipeline_stage: Annotated[Count | None, LAYOUT]
    account_for_embedding_in_pipeline_split: Annotated[bool, LAYOUT]
    account_for_loss_in_pipeline_split: Annotated[bool, LAYOUT]
    context_parallel_size: Annotated[Count, LAYOUT]
    expert_model_parallel_size: Annotated[Count, LAYOUT]
    expert_tensor_parallel_size: Annotated[Count | None, LAYOUT]
    moe_aux_loss_coeff: Annotated[float, Ge(0), Remedy("0.0 disables the loss"), SAME]
    sequence_parallel: Annotated[bool, LAYOUT]
    seed: Annotated[int, Ge(0), Le(2**32 - 1), Remedy("e.g. {key}=1234"), SAME]
    fp8: Annotated[Literal["hybrid", "e4m3"] | None, SPEED]
    quantize: Annotated[Annotated[str, one_of(tuple(FORMATS))] | None, SAME]
    activations_checkpoint_granularity: Annotated[Literal["selective", "full"] | None, SPEED]
    activations_checkpoint_method: Annotated[Literal["uniform", "block"] | None, SPEED]
    activations_checkpoint_num_layers: Annotated[Count | None, SPEED]
    recompute_modules: Annotated[RecomputeModules | None, SPEED]
    logprob_chunk_size: Annotated[Count, SPEED]
    logprob_gradient_summands: Annotated[Literal[1, 2], SPEED]
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
    report: bool


class RunConfig(Section):
    """The whole configuration; :func:`config_type` adds the sections of an algorithm."""

    recipe: ClassVar[Recipe]

    algorithm: str
    trainer: TrainerConfig
    exp_manager: Annotated[ExpManagerConfig, LOGGING]
    pretrained_checkpoint: PretrainedConfig
    model: GPTConfig
    export: Annotated[ExportConfig, FILES]

    @property
    def loop(self) -> LoopConfig:
        return getattr(self.trainer, self.recipe.name)

    @property
    def loss(self) -> LossConfig:
        return getattr(self.model, self.recipe.name)

    @property
    def seq_length(self) -> int:
        """Maximum number of tokens of a sequence; ``ResolvedRun.of`` has replaced null by the default of the model."""
        assert self.model.data.seq_length is not None
        return self.model.data.seq_length

    def data_options(self) -> dict[str, float]:
        """Return the algorithm-specific keys of model.data, with defaults for those not given."""
        given = {name: getattr(self.model.data, name) for name in self.recipe.data_defaults}
        return {name: default if given[name] is None else given[name] for name, default in self.recipe.data_defaults.items()}


def _extended(base: type[Base], fields: Mapping[str, tuple[object, object]]) -> type[Base]:
    """Derive a section with additional keys: name -> (type, default); the default ... marks a required key."""
    return create_model(base.__name__, __base__=base, **dict[str, Any](fields))


@cache
def config_type(recipe: Recipe, loss: Loss | None = None) -> type[RunConfig]:
    """Build the type of an algorithm's configuration; options of its losses and of ``loss`` are keys of model.NAME."""
    losses = [*recipe.losses.values(), *([] if loss is None else [loss])]
    options = {name: option.annotation for each in losses for name, option in each.options.items()}
    section = _extended(recipe.loss_section, {name: (or_(kind, None), None) for name, kind in options.items()})
    section.losses = recipe.losses
    data = _extended(DataConfig, dict.fromkeys(recipe.data_defaults, (Annotated[float | None, REWARD], ...)))
    fields: dict[str, tuple[object, object]] = {
        "algorithm": (Annotated[Literal[recipe.name], MustStay("the algorithm")], ...),
        "trainer": (_extended(TrainerConfig, {recipe.name: (LoopConfig, ...)}), ...),
        "model": (_extended(GPTConfig, {"data": (data, ...), recipe.name: (Annotated[section, LOSS], ...)}), ...),
    }
    config = _extended(RunConfig, fields)
    config.recipe = recipe
    return config
