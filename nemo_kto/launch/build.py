"""From a configuration to a running job: the only place where the parts are put together.

Configuration objects stop here; everything below takes plain keyword arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from nemo_kto.algorithms.dpo import TrainerConfig
from nemo_kto.algorithms.kto import KTOTrainer
from nemo_kto.checkpoint.distributed import (
    CheckpointManager,
    checkpoint_dtype,
    find_checkpoints,
    hugging_face_folder,
    load_weights_only,
)
from nemo_kto.checkpoint.huggingface import export, load_weights
from nemo_kto.data.chat import load_tokenizer
from nemo_kto.data.dataset import KTODataset, build_kto_splits
from nemo_kto.data.loader import build_kto_dataloader
from nemo_kto.data.records import DataError
from nemo_kto.data.sampler import GlobalBatchSampler
from nemo_kto.launch.schema import GPTConfig, KTOConfig
from nemo_kto.models.gpt import Architecture, build_gpt, read_architecture
from nemo_kto.models.nlp.gpt.megatron_gpt_kto_model import MegatronGPTKTOModel
from nemo_kto.models.optimizer import build_optimizer, build_scheduler, wrap_data_parallel
from nemo_kto.models.reference import LiveReference, SwappedWeights
from nemo_kto.parallel import cpu, state
from nemo_kto.telemetry.loggers import RunLogger
from nemo_kto.telemetry.progress import Progress
from nemo_kto.telemetry.throughput import ThroughputMeter
from nemo_kto.telemetry.timers import PhaseTimers, RunTimer

DTYPES = {"bf16": torch.bfloat16, "32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The model of this rank and what belongs to it.

    Attributes:
        folder: Hugging Face folder with the configuration and the tokenizer.
        chunks: model chunks, wrapped for data parallelism.
    """

    folder: Path
    architecture: Architecture
    tokenizer: PreTrainedTokenizerBase
    chunks: Sequence[MegatronModule]


def train_kto(cfg: KTOConfig) -> None:
    """Run the whole job on this rank: align the model and export it.

    Args:
        cfg: checked by ``launch.validate``.
    """
    layout = state.Layout(
        tensor=cfg.model.tensor_model_parallel_size,
        pipeline=cfg.model.pipeline_model_parallel_size,
        sequence_parallel=cfg.model.sequence_parallel,
    )
    state.start(layout=layout, seed=cfg.model.seed, timeout=timedelta(minutes=cfg.trainer.timeout_minutes))
    policy = build_policy(cfg.model, Path(cfg.pretrained_checkpoint.restore_from_path), dtype=DTYPES[cfg.trainer.precision])
    build_kto_trainer(cfg, policy).fit()
    if cfg.export.enabled:
        export_policy(policy, Path(cfg.export.path), max_shard_size_gb=cfg.export.max_shard_size_gb)
    state.stop()


def build_policy(cfg: GPTConfig, source: Path, *, dtype: torch.dtype) -> Policy:
    """The model at ``source`` (a Hugging Face folder or one of our checkpoints), on this rank's share of the layout."""
    folder = hugging_face_folder(source) or source
    architecture = read_architecture(folder, tensor_parallel=cfg.tensor_model_parallel_size)
    gpt = build_gpt(
        architecture,
        params_dtype=dtype,
        pipeline_parallel=cfg.pipeline_model_parallel_size,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        sequence_parallel=cfg.sequence_parallel,
        recompute_granularity=cfg.activations_checkpoint_granularity,
        recompute_method=cfg.activations_checkpoint_method,
        recompute_num_layers=cfg.activations_checkpoint_num_layers,
        attn_mask_type=AttnMaskType.arbitrary if cfg.data.reset_attention_mask else AttnMaskType.causal,
    )
    chunks = wrap_data_parallel([gpt], use_distributed_optimizer=cfg.optim.use_distributed_optimizer)
    if folder == source:
        load_weights(chunks, architecture, folder)
    else:
        load_weights_only(source, chunks)
    return Policy(folder=folder, architecture=architecture, tokenizer=load_tokenizer(folder), chunks=chunks)


def export_policy(policy: Policy, out: Path, *, max_shard_size_gb: float) -> None:
    """Write the model in Hugging Face format; every rank takes part."""
    export(policy.chunks, policy.architecture, source=policy.folder, out=out, max_shard_bytes=int(max_shard_size_gb * 1e9))
    if state.is_rank_zero():
        print(f"aligned model in Hugging Face format: {out}", flush=True)


def export_checkpoint(checkpoint: Path, out: Path, *, max_shard_size_gb: float = 5.0) -> None:
    """Write one of our own checkpoints in Hugging Face format, on this one process.

    Args:
        checkpoint: a checkpoint, or a run folder, whose newest one is taken.
        out: folder to write to.

    Raises:
        FileNotFoundError: there is no complete checkpoint.
    """
    if hugging_face_folder(checkpoint) is None:
        complete = find_checkpoints(checkpoint / "checkpoints")
        if not complete:
            raise FileNotFoundError(f"{checkpoint} must be a checkpoint or a run folder with a complete one, but has none")
        checkpoint = complete[-1].folder
    state.start(layout=state.Layout(), seed=0)
    folder = checkpoint / "hf"
    architecture = read_architecture(folder, tensor_parallel=1)
    gpt = build_gpt(architecture, params_dtype=checkpoint_dtype(checkpoint))
    load_weights_only(checkpoint, [gpt])
    policy = Policy(folder=folder, architecture=architecture, tokenizer=load_tokenizer(folder), chunks=[gpt])
    export_policy(policy, out, max_shard_size_gb=max_shard_size_gb)
    state.stop()


def build_kto_trainer(cfg: KTOConfig, policy: Policy) -> KTOTrainer:
    """Everything around the policy: data, reference, optimizer, logs and checkpoints; goes on from the newest checkpoint."""
    timers = PhaseTimers(synchronize=cpu.synchronize)
    model = build_kto_model(cfg, policy, timers)
    train_dataloader, val_dataloader = build_kto_dataloaders(cfg, policy.tokenizer, with_kl=model.uses_kl_rows)
    trainer_cfg = build_trainer_config(cfg)
    max_steps = trainer_cfg.total_steps(len(train_dataloader.batch_sampler))
    optim = cfg.model.optim
    optimizer = build_optimizer(
        chunks=policy.chunks,
        lr=optim.lr,
        min_lr=optim.sched.min_lr,
        weight_decay=optim.weight_decay,
        betas=(optim.betas[0], optim.betas[1]),
        eps=optim.eps,
        clip_grad=cfg.trainer.kto.gradient_clip_val,
        params_dtype=DTYPES[cfg.trainer.precision],
        use_distributed_optimizer=optim.use_distributed_optimizer,
    )
    scheduler = build_scheduler(
        optimizer=optimizer,
        name=optim.sched.name,
        lr=optim.lr,
        min_lr=optim.sched.min_lr,
        warmup_steps=optim.sched.warmup_steps,
        max_steps=max_steps,
        weight_decay=optim.weight_decay,
    )
    checkpoints = build_checkpoint_manager(cfg, policy, optimizer, scheduler)
    if not cfg.exp_manager.resume_if_exists:
        checkpoints.refuse_to_mix()
    resumed = checkpoints.load_latest()
    trainer = KTOTrainer(
        cfg=trainer_cfg,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        train_dataloader=train_dataloader,
        val_dataloader=val_dataloader,
        test_dataloader=None,
        logger=build_logger(cfg, max_steps=max_steps, resumed_step=None if resumed is None else resumed["step"]),
        ckpt_callback=checkpoints,
        run_timer=RunTimer(max_time=cfg.trainer.max_time, agree=state.agree),
        timers=timers,
        throughput=ThroughputMeter(world_size=state.world_size(), peak_memory=cpu.peak_memory_bytes),
    )
    if resumed is not None:
        trainer.load_state_dict(resumed)
    return trainer


def build_trainer_config(cfg: KTOConfig) -> TrainerConfig:
    """trainer.kto as the trainer takes it."""
    loop = cfg.trainer.kto
    return TrainerConfig(
        max_epochs=loop.max_epochs,
        max_steps=loop.max_steps,
        val_check_interval=loop.val_check_interval,
        save_interval=loop.save_interval,
        limit_train_batches=loop.limit_train_batches,
        limit_val_batches=loop.limit_val_batches,
        global_batch_size=cfg.model.global_batch_size,
        val_at_start=loop.val_before_training,
    )


def build_kto_model(cfg: KTOConfig, policy: Policy, timers: PhaseTimers) -> MegatronGPTKTOModel:
    """The policy as a KTO model; the weights it has now become the reference."""
    kto = cfg.model.kto
    return MegatronGPTKTOModel(
        preference_loss=kto.preference_loss,
        ref_policy_kl_penalty=kto.ref_policy_kl_penalty,
        desirable_loss_weight=kto.desirable_loss_weight,
        undesirable_loss_weight=kto.undesirable_loss_weight,
        chunks=policy.chunks,
        reference=LiveReference(SwappedWeights(parameters=policy.chunks[0].parameters(), phase=timers.phase).active),
        vocab_size=policy.architecture.vocab_size,
        micro_batch_size=cfg.model.micro_batch_size,
        forward_micro_batch_size=kto.log_prob_forward_micro_batch_size,
        average_log_probs=kto.preference_average_log_probs,
        logprob_chunk_size=cfg.model.logprob_chunk_size,
        phase=timers.phase,
    )


def build_kto_dataloaders(cfg: KTOConfig, tokenizer: PreTrainedTokenizerBase, *, with_kl: bool) -> tuple[Any, Any]:
    """Loaders of the training and of the validation rows (None where there are none)."""
    data = cfg.model.data
    with state.main_process_first():
        splits = build_kto_splits(
            data_prefix=data.data_prefix,
            splits_string=data.splits_string,
            tokenizer=tokenizer,
            seq_length=data.seq_length,
            truncation_mode=data.truncation_mode,
            cache_dir=Path(data.cache_dir).expanduser(),
            seed=cfg.model.seed,
        )

    if splits.train is None:
        raise DataError(f"model.data.data_prefix must give training rows, got none for splits_string={data.splits_string!r}")

    def loader(dataset: KTODataset, *, training: bool) -> DataLoader[dict[str, torch.Tensor]]:
        sampler = GlobalBatchSampler(
            num_rows=len(dataset),
            global_batch_size=cfg.model.global_batch_size,
            seed=cfg.model.seed,
            shuffle=training,
            drop_last=training,
            with_pairs=with_kl,
        )
        return build_kto_dataloader(
            dataset=dataset,
            sampler=sampler,
            rank=state.data_parallel_rank(),
            size=state.data_parallel_size(),
            eos_id=tokenizer.eos_token_id,
            seq_length=data.seq_length,
            pad_to_multiple=cfg.model.tensor_model_parallel_size if cfg.model.sequence_parallel else 1,
            with_kl=with_kl,
            reset_attention_mask=data.reset_attention_mask,
            eod_mask_loss=data.eod_mask_loss,
            num_workers=data.num_workers,
            pin_memory=cpu.on_gpu(),
        )

    validation = None if splits.validation is None else loader(splits.validation, training=False)
    return loader(splits.train, training=True), validation


def build_checkpoint_manager(cfg: KTOConfig, policy: Policy, optimizer: Any, scheduler: Any) -> CheckpointManager:
    """Checkpoints in RUN FOLDER/checkpoints."""
    kept = cfg.exp_manager.checkpoint_callback_params
    return CheckpointManager(
        folder=Path(cfg.exp_manager.explicit_log_dir) / "checkpoints",
        chunks=policy.chunks,
        optimizer=optimizer,
        scheduler=scheduler,
        monitor=kept.monitor,
        mode=kept.mode,
        save_top_k=kept.save_top_k,
        hugging_face_source=policy.folder,
    )


def build_logger(cfg: KTOConfig, *, max_steps: int, resumed_step: int | None) -> RunLogger:
    """What the run tells, and whom; rank 0 alone speaks."""
    settings = cfg.exp_manager
    progress = (Progress(total_steps=max_steps, start_step=resumed_step or 0),) if state.is_rank_zero() else ()
    logger = RunLogger(
        folder=Path(settings.explicit_log_dir),
        enabled=state.is_rank_zero(),
        resumed_step=resumed_step,
        tensorboard=settings.create_tensorboard_logger,
        wandb=asdict(settings.wandb_logger_kwargs) if settings.create_wandb_logger else None,
        mlflow=asdict(settings.mlflow_logger_kwargs) if settings.create_mlflow_logger else None,
        extra=progress,
    )
    logger.log_hyperparams(asdict(cfg))
    return logger
