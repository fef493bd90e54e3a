"""The types of the configuration. Values, their meaning and their units are in conf/, and only there."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from typing import Any, get_type_hints

from omegaconf import MISSING


@dataclass(kw_only=True)
class LoopConfig:
    """trainer.kto or trainer.dpo: the training loop."""

    max_epochs: int
    max_steps: int
    val_check_interval: int | float
    val_before_training: bool
    save_interval: int | float
    limit_train_batches: int | float
    limit_val_batches: int | float
    gradient_clip_val: float


@dataclass(kw_only=True)
class MachineConfig:
    """trainer, without the loop of one algorithm."""

    num_nodes: int
    devices: int | str
    accelerator: str
    precision: str
    max_time: str | None
    timeout_minutes: int


@dataclass(kw_only=True)
class KTOTrainerConfig(MachineConfig):
    """trainer."""

    kto: LoopConfig


@dataclass(kw_only=True)
class DPOTrainerConfig(MachineConfig):
    """trainer."""

    dpo: LoopConfig


@dataclass(kw_only=True)
class WandbConfig:
    """exp_manager.wandb_logger_kwargs: arguments of Lightning's WandbLogger."""

    project: str
    name: str
    entity: str | None
    group: str | None
    offline: bool


@dataclass(kw_only=True)
class MLflowConfig:
    """exp_manager.mlflow_logger_kwargs: arguments of Lightning's MLFlowLogger."""

    experiment_name: str
    run_name: str
    tracking_uri: str | None


@dataclass(kw_only=True)
class CheckpointConfig:
    """exp_manager.checkpoint_callback_params."""

    monitor: str
    mode: str
    save_top_k: int


@dataclass(kw_only=True)
class ExpManagerConfig:
    """exp_manager: the run folder and what is written there."""

    exp_dir: str
    name: str
    explicit_log_dir: str
    resume_if_exists: bool
    create_tensorboard_logger: bool
    create_wandb_logger: bool
    wandb_logger_kwargs: WandbConfig
    create_mlflow_logger: bool
    mlflow_logger_kwargs: MLflowConfig
    checkpoint_callback_params: CheckpointConfig


@dataclass(kw_only=True)
class PretrainedConfig:
    """pretrained_checkpoint."""

    restore_from_path: str


@dataclass(kw_only=True)
class LoRATuningConfig:
    """model.peft.lora_tuning."""

    target_modules: list[str]
    adapter_dim: int
    alpha: float
    adapter_dropout: float
    layer_selection: list[int] | None


@dataclass(kw_only=True)
class PeftConfig:
    """model.peft."""

    peft_scheme: str
    restore_from_path: str | None
    lora_tuning: LoRATuningConfig


@dataclass(kw_only=True)
class ReferenceConfig:
    """model.reference: how the reference policy is held."""

    mode: str
    restore_from_path: str | None
    sync_interval: int
    sync_alpha: float


@dataclass(kw_only=True)
class ScheduleConfig:
    """model.optim.sched."""

    name: str
    warmup_steps: int
    min_lr: float


@dataclass(kw_only=True)
class OptimConfig:
    """model.optim."""

    name: str
    lr: float
    weight_decay: float
    betas: list[float]
    eps: float
    use_distributed_optimizer: bool
    sched: ScheduleConfig


@dataclass(kw_only=True)
class DataConfig:
    """model.data; data_prefix is a text, a list, or a mapping from split to either."""

    data_prefix: Any
    splits_string: str | None
    seq_length: int
    truncation_mode: str
    num_workers: int
    cache_dir: str
    reset_attention_mask: bool
    eod_mask_loss: bool


@dataclass(kw_only=True)
class GPTConfig:
    """model, without the block of one algorithm."""

    micro_batch_size: int
    global_batch_size: int
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    context_parallel_size: int
    expert_model_parallel_size: int
    sequence_parallel: bool
    seed: int
    fp8: str | None
    activations_checkpoint_granularity: str | None
    activations_checkpoint_method: str | None
    activations_checkpoint_num_layers: int | None
    logprob_chunk_size: int
    reference: ReferenceConfig
    peft: PeftConfig
    optim: OptimConfig
    data: DataConfig


@dataclass(kw_only=True)
class LossConfig:
    """What model.kto and model.dpo share."""

    preference_loss: str
    ref_policy_kl_penalty: float
    preference_average_log_probs: bool
    preference_loss_weight: float
    sft_loss_weight: float
    sft_average_log_probs: bool
    log_prob_forward_micro_batch_size: int


@dataclass(kw_only=True)
class KTOLossConfig(LossConfig):
    """model.kto."""

    desirable_loss_weight: float
    undesirable_loss_weight: float
    auto_balance: bool


@dataclass(kw_only=True)
class DPOLossConfig(LossConfig):
    """model.dpo."""

    label_smoothing: float
    gt_reward_scale: float
    simpo_gamma: float


@dataclass(kw_only=True)
class KTOModelConfig(GPTConfig):
    """model."""

    kto: KTOLossConfig


@dataclass(kw_only=True)
class DPODataConfig(DataConfig):
    """model.data, where rows are pairs."""

    default_chosen_reward: float
    default_rejected_reward: float


@dataclass(kw_only=True)
class DPOModelConfig(GPTConfig):
    """model."""

    data: DPODataConfig
    dpo: DPOLossConfig


@dataclass(kw_only=True)
class ExportConfig:
    """export: the aligned model in Hugging Face format."""

    enabled: bool
    path: str
    adapter_path: str
    max_shard_size_gb: float


@dataclass(kw_only=True)
class RunConfig:
    """What the configurations of all algorithms have."""

    trainer: MachineConfig
    exp_manager: ExpManagerConfig
    pretrained_checkpoint: PretrainedConfig
    model: GPTConfig
    export: ExportConfig

    @property
    def algorithm(self) -> Algorithm:
        """What this is the configuration of."""
        return next(algorithm for algorithm in ALGORITHMS.values() if isinstance(self, algorithm.config_type))

    @property
    def loop(self) -> LoopConfig:
        """trainer.ALGORITHM."""
        loop: LoopConfig = getattr(self.trainer, self.algorithm.name)
        return loop

    @property
    def loss(self) -> LossConfig:
        """model.ALGORITHM."""
        loss: LossConfig = getattr(self.model, self.algorithm.name)
        return loss


@dataclass(kw_only=True)
class KTOConfig(RunConfig):
    """The whole configuration of `nemo-kto kto`."""

    trainer: KTOTrainerConfig
    model: KTOModelConfig


@dataclass(kw_only=True)
class DPOConfig(RunConfig):
    """The whole configuration of `nemo-kto dpo`."""

    trainer: DPOTrainerConfig
    model: DPOModelConfig


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A command of nemo-kto that trains.

    Attributes:
        name: of the command, and of its sections trainer.NAME and model.NAME; conf/gpt_NAME.yaml is its configuration.
        title: what it does.
        rows: what it learns from.
        config_type: types of its keys.
    """

    name: str
    title: str
    rows: str
    config_type: type[RunConfig]

    @property
    def config_name(self) -> str:
        """Name of the configuration file."""
        return f"gpt_{self.name}"


KTO = Algorithm(
    name="kto",
    title="KTO training of a GPT model",
    rows='jsonl rows of prompt, response and "chosen" or "rejected"',
    config_type=KTOConfig,
)
DPO = Algorithm(
    name="dpo",
    title="Training of a GPT model on pairs: DPO, IPO, RPO, hinge, SimPO, ORPO",
    rows="jsonl rows of prompt, chosen and rejected",
    config_type=DPOConfig,
)
ALGORITHMS = {algorithm.name: algorithm for algorithm in (KTO, DPO)}


def blank(config_type: type[Any]) -> Any:
    """An instance of a type of this module with every value missing, which the YAML files then fill.

    Sections are instances too: omegaconf 2.3 cannot merge values into a missing section that has a field of two types.
    """
    hints = get_type_hints(config_type)
    return config_type(
        **{name: blank(hint) if is_dataclass(hint) and isinstance(hint, type) else MISSING for name, hint in hints.items()}
    )
