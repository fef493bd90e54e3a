"""From a configuration to a running job: here, and in build_*.py for its parts, everything is put together.

Configuration objects stop here; everything below takes plain keyword arguments.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from nemo_kto.algorithms.dpo import DPOTrainer, TrainerConfig
from nemo_kto.algorithms.kto import KTOTrainer
from nemo_kto.checkpoint.distributed import CHECKPOINTS, CheckpointManager
from nemo_kto.launch.build_data import RunData, build_data, loss_weights
from nemo_kto.launch.build_policy import Policy, base_model, build_policy, export_policy
from nemo_kto.launch.build_reference import HeldReference, with_reference
from nemo_kto.launch.precision import resolve_precision
from nemo_kto.launch.saved_config import save_config
from nemo_kto.launch.schema import RunConfig
from nemo_kto.models.nlp.gpt.megatron_gpt_dpo_model import MegatronGPTDPOModel
from nemo_kto.models.nlp.gpt.megatron_gpt_kto_model import MegatronGPTKTOModel
from nemo_kto.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_kto.models.optimizer import build_optimizer, build_scheduler
from nemo_kto.parallel import cpu, state
from nemo_kto.parallel.precision import DTYPES
from nemo_kto.recipes.kto import KTOLossConfig
from nemo_kto.telemetry.loggers import RunLogger
from nemo_kto.telemetry.progress import Progress
from nemo_kto.telemetry.throughput import ThroughputMeter
from nemo_kto.telemetry.timers import PhaseTimers, RunTimer

logger = logging.getLogger(__name__)


def train(cfg: RunConfig) -> None:
    """Run the whole job on this rank: align the model and export it.

    Args:
        cfg: checked by ``launch.cli``.
    """
    layout = state.Layout(
        tensor=cfg.model.tensor_model_parallel_size,
        pipeline=cfg.model.pipeline_model_parallel_size,
        sequence_parallel=cfg.model.sequence_parallel,
    )
    state.start(layout=layout, seed=cfg.model.seed, timeout=timedelta(minutes=cfg.trainer.timeout_minutes))
    cfg = resolve_precision(cfg)
    policy = build_policy(cfg.model, Path(cfg.pretrained_checkpoint.restore_from_path), dtype=DTYPES[cfg.trainer.precision])
    trainer = build_trainer(cfg, policy)
    if state.is_rank_zero():
        save_config(cfg)  # not earlier: what a run cannot be resumed with must not replace what it was started with
    trainer.fit()
    if cfg.export.enabled:
        export_policy(policy, cfg.export)
    state.stop()


def build_trainer(cfg: RunConfig, policy: Policy) -> DPOTrainer:
    """Everything around the policy: data, reference, optimizer, logs and checkpoints; goes on from the newest checkpoint."""
    timers = PhaseTimers(synchronize=cpu.synchronize)
    data = build_data(cfg, policy.tokenizer)
    trainer_cfg = build_trainer_config(cfg)
    model = with_reference(
        cfg,
        policy,
        data,
        trainer_cfg=trainer_cfg,
        timers=timers,
        build_model=partial(build_model, cfg, policy, data, timers),
    )
    max_steps = trainer_cfg.total_steps(len(data.train.batch_sampler))  # type: ignore[arg-type]  # it has a length
    optimizer, scheduler = build_optimizer_and_schedule(cfg, policy, max_steps=max_steps)
    checkpoints = build_checkpoint_manager(cfg, policy, model, optimizer, scheduler)
    if not cfg.exp_manager.resume_if_exists:
        checkpoints.refuse_to_mix()
    resumed = checkpoints.load_latest()
    parts: dict[str, Any] = {
        "cfg": trainer_cfg,
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "train_dataloader": data.train,
        "val_dataloader": data.validation,
        "test_dataloader": None,
        "logger": build_logger(cfg, max_steps=max_steps, resumed_step=None if resumed is None else resumed["step"]),
        "ckpt_callback": checkpoints,
        "run_timer": RunTimer(max_time=cfg.trainer.max_time, agree=state.agree),
        "timers": timers,
        "throughput": ThroughputMeter(world_size=state.world_size(), peak_memory=cpu.peak_memory_bytes),
    }
    trainer = KTOTrainer(**parts) if isinstance(cfg.loss, KTOLossConfig) else DPOTrainer(**parts, collate_fn=data.collate_fn)
    if resumed is not None:
        trainer.load_state_dict(resumed)
    return trainer


def build_trainer_config(cfg: RunConfig) -> TrainerConfig:
    """trainer.ALGORITHM as the trainer takes it."""
    loop = cfg.loop
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


def build_model(cfg: RunConfig, policy: Policy, data: RunData, timers: PhaseTimers, held: HeldReference) -> MegatronGPTModel:
    """The policy with its loss and its reference."""
    loss = cfg.loss
    shared: dict[str, Any] = {
        "preference_loss": loss.preference_loss,
        "ref_policy_kl_penalty": loss.ref_policy_kl_penalty,
        "chunks": policy.chunks,
        "reference": held.policy,
        "moving_reference": held.moving,
        "vocab_size": policy.architecture.vocab_size,
        "micro_batch_size": cfg.model.micro_batch_size,
        "forward_micro_batch_size": loss.log_prob_forward_micro_batch_size,
        "average_log_probs": loss.preference_average_log_probs,
        "logprob_chunk_size": cfg.model.logprob_chunk_size,
        "preference_loss_weight": loss.preference_loss_weight,
        "sft_loss_weight": loss.sft_loss_weight,
        "sft_average_log_probs": loss.sft_average_log_probs,
        "phase": timers.phase,
    }
    if not isinstance(loss, KTOLossConfig):
        return MegatronGPTDPOModel(**shared, loss_options=loss.loss_options())
    desirable, undesirable = loss_weights(cfg, data.train_rows)
    return MegatronGPTKTOModel(**shared, desirable_loss_weight=desirable, undesirable_loss_weight=undesirable)


def build_optimizer_and_schedule(cfg: RunConfig, policy: Policy, *, max_steps: int) -> tuple[Any, Any]:
    """The optimizer of a run of ``max_steps`` steps and its learning rates."""
    optim = cfg.model.optim
    rates = {"lr": optim.lr, "min_lr": optim.sched.min_lr, "weight_decay": optim.weight_decay}
    optimizer = build_optimizer(
        chunks=policy.chunks,
        betas=(optim.betas[0], optim.betas[1]),
        eps=optim.eps,
        clip_grad=cfg.loop.gradient_clip_val,
        params_dtype=DTYPES[cfg.trainer.precision],
        use_distributed_optimizer=optim.use_distributed_optimizer,
        **rates,
    )
    warmup_steps = fitting_warmup(optim.sched.warmup_steps, max_steps=max_steps)
    scheduler = build_scheduler(
        optimizer=optimizer, name=optim.sched.name, warmup_steps=warmup_steps, max_steps=max_steps, **rates
    )
    return optimizer, scheduler


def fitting_warmup(warmup_steps: int, *, max_steps: int) -> int:
    """The warm-up of a run of ``max_steps`` steps: one that would not end within the run is shortened, with a warning."""
    if warmup_steps < max_steps:
        return warmup_steps
    if state.is_rank_zero():
        text = f"model.optim.sched.warmup_steps must be below the number of steps, {max_steps}, got {warmup_steps}"
        logger.warning(f"{text}; shortened to {max_steps - 1}")
    return max_steps - 1


def build_checkpoint_manager(
    cfg: RunConfig, policy: Policy, model: MegatronGPTModel, optimizer: Any, scheduler: Any
) -> CheckpointManager:
    """Checkpoints in RUN FOLDER/checkpoints."""
    kept = cfg.exp_manager.checkpoint_callback_params
    return CheckpointManager(
        folder=Path(cfg.exp_manager.explicit_log_dir) / CHECKPOINTS,
        chunks=policy.chunks,
        optimizer=optimizer,
        scheduler=scheduler,
        monitor=kept.monitor,
        mode=kept.mode,
        save_top_k=kept.save_top_k,
        hugging_face_source=policy.folder,
        base_model=base_model(policy.source),
        moving_reference=None if model.moving_reference is None else model.moving_reference.weights,
    )


def build_logger(cfg: RunConfig, *, max_steps: int, resumed_step: int | None) -> RunLogger:
    """What the run tells, and whom; rank 0 alone speaks."""
    settings = cfg.exp_manager
    progress = (Progress(total_steps=max_steps, start_step=resumed_step or 0),) if state.is_rank_zero() else ()
    run_logger = RunLogger(
        folder=Path(settings.explicit_log_dir),
        enabled=state.is_rank_zero(),
        resumed_step=resumed_step,
        tensorboard=settings.create_tensorboard_logger,
        wandb=settings.wandb_logger_kwargs.model_dump() if settings.create_wandb_logger else None,
        mlflow=settings.mlflow_logger_kwargs.model_dump() if settings.create_mlflow_logger else None,
        extra=progress,
    )
    run_logger.log_hyperparams(cfg.model_dump())
    return run_logger
