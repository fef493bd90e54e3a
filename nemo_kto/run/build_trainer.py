"""Build the trainer of a run and its components: engine, reference, model, optimizer, checkpoints, logs and callbacks."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, NamedTuple

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import unwrap_model

from nemo_kto.algorithms.callbacks import (
    Callback,
    LoggerCallback,
    PrecomputeReference,
    ReferenceSync,
    RewardCallback,
    SpikeCallback,
    StragglerCallback,
    ThroughputCallback,
)
from nemo_kto.algorithms.dpo import DPOTrainer
from nemo_kto.algorithms.duration import BestValidation, SkippedSteps, fraction_of
from nemo_kto.checkpoint.manager import CheckpointManager
from nemo_kto.checkpoint.safe_loading import read_errors
from nemo_kto.config.resolved import ResolvedRun, find_callback
from nemo_kto.config.saved_config import public_config
from nemo_kto.config.schema import RunConfig, ScheduleConfig
from nemo_kto.device import device
from nemo_kto.device.precision import dtype_of
from nemo_kto.distributed import state
from nemo_kto.errors import plural
from nemo_kto.model_files.checkpoint_files import INFO, named_checkpoints
from nemo_kto.models.engine.engine import LogProbEngine
from nemo_kto.models.engine.optimizer import build_optimizer, build_scheduler
from nemo_kto.models.engine.sequences import MicroBatchLimits
from nemo_kto.models.flops import ModelFlops
from nemo_kto.models.preference_model import Objective
from nemo_kto.processes import ranks, signals, watchdog
from nemo_kto.redaction import redacted_value
from nemo_kto.run.data import RunData
from nemo_kto.run.lifecycle import name_of_newest
from nemo_kto.run.policy import Policy
from nemo_kto.run.prepare import Placement, Start
from nemo_kto.run.reference_setup import ReferenceSetup, build_reference
from nemo_kto.run.resume import build_early_stopping
from nemo_kto.run.samples import Sampler, build_sampler, extreme_rows
from nemo_kto.telemetry.display import Progress
from nemo_kto.telemetry.loggers import RunLogger, check_loggers
from nemo_kto.telemetry.watch import PhaseTimers, RunTimer, device_peak_flops

logger = logging.getLogger(__name__)

_WARMUP_STEPS = 10  # default, or fewer in a shorter run


def build_trainer(run: ResolvedRun, policy: Policy, start: Start, placement: Placement) -> DPOTrainer:
    """Build the trainer and all its components; if the run is resumed, load the chosen checkpoint. Collective."""
    cfg, (data, samples, resumption) = run.cfg, start
    resumed_step = resumption.resumed_step
    max_steps = run.length.total_steps(len(data.train.batch_sampler))

    timers = PhaseTimers(clock=device.moment, observe=watchdog.phase)
    run_timer = RunTimer(
        max_time=cfg.trainer.max_time,
        started=ranks.started_at(),
        received=signals.received,
        agree=state.max_over_ranks,
        requeue=cfg.trainer.requeue,
    )

    engine = build_engine(cfg, policy, placement.limits)
    sampler = build_sampler(
        run, engine, tokenizer=data.tokenizer, samples=samples, run_timer=run_timer, resumed_step=resumed_step
    )
    reference = build_reference(
        run,
        policy,
        engine,
        data=data,
        timers=timers,
        run_timer=run_timer,
        on_gpu=placement.reference_on_gpu,
        first_step=resumed_step or 0,
        sampler=sampler,
    )
    model = cfg.recipe.model(
        engine=engine,
        reference=reference.policy,
        objective=Objective(
            loss=cfg.loss.definition,
            options=cfg.loss.loss_options(),
            beta=cfg.loss.ref_policy_kl_penalty,
            preference_loss_weight=cfg.loss.preference_loss_weight,
            sft_loss_weight=cfg.loss.sft_loss_weight,
            sft_average_log_probs=cfg.loss.sft_average_log_probs,
        ),
        phase=timers.phase,
        **cfg.loss.model_options(data.splits.train),
    )

    optimizer, scheduler = build_optimizer_and_schedule(run, policy, max_steps=max_steps)
    checkpoints = CheckpointManager(
        folder=run.checkpoints,
        chunks=policy.chunks,
        optimizer=optimizer,
        scheduler=scheduler,
        hugging_face_source=policy.files.hf_folder,
        base_model=policy.base_model,
        original=policy.files.original,
        reference_weights=reference.synced_weights,
        run=resumption.facts,
        **cfg.exp_manager.checkpoint_callback_params.model_dump(),
    )
    resumed = None if resumption.checkpoint is None else checkpoints.load(resumption.checkpoint)

    run_logger = build_logger(run, resumed_step=resumed_step)
    trainer = cfg.recipe.trainer(
        cfg=run.length,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        train_dataloader=data.train,
        val_dataloader=data.validation,
        test_dataloader=None,
        logger=run_logger,
        ckpt_callback=checkpoints,
        run_timer=run_timer,
        timers=timers,
        callbacks=build_callbacks(
            run, start, engine, sampler=sampler, reference=reference, run_logger=run_logger, max_steps=max_steps
        ),
        skipped=build_skipping(run, data, checkpoints),
        early_stopping=build_early_stopping(cfg, agree=state.max_over_ranks),
        best_validation=build_best_validation(cfg),
        prefetch=device.on_gpu() and cfg.model.data.num_workers == 0,  # worker processes prefetch themselves
    )
    if resumed is not None and resumption.checkpoint is not None:
        with read_errors(resumption.checkpoint.folder / INFO):
            trainer.load_state_dict(resumed)
    return trainer


def build_engine(cfg: RunConfig, policy: Policy, limits: MicroBatchLimits) -> LogProbEngine:
    loss, model = cfg.loss, cfg.model
    return LogProbEngine(
        chunks=list(policy.chunks),
        vocab_size=policy.architecture.vocab_size,
        limits=limits,
        forward_micro_batch_size=loss.log_prob_forward_micro_batch_size,
        average_log_probs=loss.preference_average_log_probs or loss.definition.average_log_probs,
        logprob_chunk_size=model.logprob_chunk_size,
        logprob_gradient_summands=model.logprob_gradient_summands,
        flops=ModelFlops.of_model(policy.architecture, adapters=unwrap_model(policy.chunks[0]).adapters),
        moe_aux_loss_coeff=model.moe_aux_loss_coeff,
    )


def build_best_validation(cfg: RunConfig) -> BestValidation | None:
    """Build the best validation, whose checkpoints are saved; None if it would not be kept, or only the end is saved."""
    kept = cfg.exp_manager.checkpoint_callback_params
    if kept.save_top_k == 0 or cfg.loop.save_interval == 0 or not kept.monitor.startswith("val_"):
        return None
    return BestValidation(monitor=kept.monitor, mode=kept.mode, reduce_max=state.max_over_ranks)


def build_skipping(run: ResolvedRun, data: RunData, checkpoints: CheckpointManager) -> SkippedSteps:
    def last_checkpoint() -> str:
        checkpoints.finish()  # complete the checkpoint in progress
        return name_of_newest(run.checkpoints)

    return SkippedSteps(
        max_in_a_row=run.cfg.trainer.max_skipped_steps,
        name_rows=None if data.splits.train is None else data.splits.train.names,
        last_checkpoint=last_checkpoint,
        logs=state.is_rank_zero(),
    )


def build_callbacks(
    run: ResolvedRun,
    start: Start,
    engine: LogProbEngine,
    *,
    sampler: Sampler | None,
    reference: ReferenceSetup,
    run_logger: RunLogger,
    max_steps: int,
) -> list[Callback]:
    """Build the callbacks: samples and rewards of validations, then training; the user's come last."""
    callbacks: list[Callback] = []
    if sampler is not None:
        # prompts of the data, which may be private, leave the machine only if the user asked for samples
        record = partial(run_logger.log_samples, to_services=not sampler.only_at_ends)
        callbacks.append(sampler.callback(record=record))
    if state.is_rank_zero():
        callbacks.append(RewardCallback(record=run_logger.log_rewards, extremes=partial(extreme_rows, run, start.data)))
    if reference.precompute is not None:
        callbacks.append(PrecomputeReference(precompute=reference.precompute))
    if state.world_size() > 1:
        callbacks.append(
            StragglerCallback(
                gather=state.gather,
                forward_seconds=engine.forward_clock.read_and_reset,
                stage=state.pipeline_stage(),
                warn=logger.warning if state.is_rank_zero() else lambda text: None,
            )
        )
    if (weights := reference.synced_weights) is not None:
        settings = run.cfg.model.reference
        callbacks.append(ReferenceSync(mix=weights.mix, interval=settings.sync_interval, mixup_alpha=settings.sync_alpha))
    peak = device_peak_flops(device.current_device(), run.dtype, name=device.device_name())
    callbacks.append(
        ThroughputCallback(world_size=state.world_size(), peak_memory=device.peak_memory_bytes, peak_flops=peak)
    )
    if state.is_rank_zero():
        first_step = start.resumption.resumed_step or 0
        progress = Progress(total_steps=max_steps, start_step=first_step, validations=run.validation_titles)
        callbacks += [LoggerCallback(logger=progress), SpikeCallback()]
    return [*callbacks, *(find_callback(spec)() for spec in run.cfg.trainer.callbacks)]


def check_logs(run: ResolvedRun) -> None:
    """Raise UserError if logs of a new run cannot be opened; collective. A resumed run continues without such logs."""

    def check() -> None:
        if not named_checkpoints(run.checkpoints):
            check_loggers(**_logger_settings(run))

    state.from_rank_zero(check, doing="opening the logs")


def build_logger(run: ResolvedRun, *, resumed_step: int | None) -> RunLogger:
    """Build the logger, which writes on rank 0 only; collective: if a log cannot be opened, all ranks raise the error."""
    run_logger: RunLogger

    def make() -> None:
        nonlocal run_logger
        run_logger = RunLogger(enabled=state.is_rank_zero(), resumed_step=resumed_step, **_logger_settings(run))
        run_logger.log_hyperparams(public_config(run.cfg))

    state.raise_together(state.attempt(make), "{}")
    return run_logger


def _logger_settings(run: ResolvedRun) -> dict[str, Any]:
    settings = run.cfg.exp_manager
    return {
        "folder": run.folder,
        "tensorboard": settings.create_tensorboard_logger,
        "trackio": settings.trackio_logger_kwargs.model_dump() if settings.create_trackio_logger else None,
        "wandb": redacted_value(settings.wandb_logger_kwargs.model_dump()) if settings.create_wandb_logger else None,
        "mlflow": settings.mlflow_logger_kwargs.model_dump() if settings.create_mlflow_logger else None,
        "samples": settings.samples.enabled,
        "val_prefixes": [*run.validation_titles.values()],
    }


def build_optimizer_and_schedule(
    run: ResolvedRun, policy: Policy, *, max_steps: int
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    optim = run.cfg.model.optim
    rates = {"lr": optim.lr, "min_lr": optim.sched.min_lr, "weight_decay": optim.weight_decay}
    optimizer = build_optimizer(
        chunks=policy.chunks,
        betas=(optim.betas[0], optim.betas[1]),
        eps=optim.eps,
        clip_grad=run.cfg.loop.gradient_clip_val,
        params_dtype=run.dtype,
        use_distributed_optimizer=optim.use_distributed_optimizer,
        moments_dtype=dtype_of(optim.moments_dtype),
        offload_fraction=optim.offload_fraction,
        **rates,
    )
    lengths, warnings = schedule_lengths(optim.sched, max_steps)
    if run.length.max_steps > max_steps:
        prefix, length = f"trainer.{run.cfg.recipe.name}", plural(run.length.max_epochs, "epoch")
        text = f"{prefix}.max_steps={run.length.max_steps} exceeds the {plural(max_steps, 'step')} of {length}"
        warnings.append(f"{text}; training stops after step {max_steps}. Raise {prefix}.max_epochs to train longer.")
    for warning in warnings if state.is_rank_zero() else ():
        logger.warning(warning)
    scheduler = build_scheduler(
        optimizer=optimizer,
        name=optim.sched.name,
        max_steps=max_steps,
        warmup_steps=lengths.warmup_steps,
        constant_steps=lengths.constant_steps,
        wsd_decay_steps=lengths.wsd_decay_steps,
        wsd_decay_style=optim.sched.wsd_decay_style,
        cycles=optim.sched.num_cycles,
        **rates,
    )
    return optimizer, scheduler


class ScheduleLengths(NamedTuple):
    """Lengths of the parts of a schedule in optimizer steps."""

    warmup_steps: int
    constant_steps: int
    wsd_decay_steps: int | None


def schedule_lengths(schedule: ScheduleConfig, max_steps: int) -> tuple[ScheduleLengths, list[str]]:
    """Fit the parts of a schedule into ``max_steps`` steps; return a warning for each part shortened or left out."""
    prefix, warnings = "model.optim.sched", []
    wanted, total = schedule.warmup_steps, plural(max_steps, "step")
    warmup = min(_WARMUP_STEPS if wanted is None else wanted, max_steps - 1)
    if schedule.warmup_ratio is not None:
        warmup = fraction_of(max_steps, schedule.warmup_ratio)
    if wanted is not None and warmup < wanted:
        warnings.append(f"{prefix}.warmup_steps={wanted} does not fit into the {total} of the run; using {warmup}")
    rest = max_steps - warmup
    constant = schedule.constant_steps if schedule.constant_steps < rest else 0
    if constant < schedule.constant_steps:
        text = f"does not fit into the {rest} steps after the warm-up; using 0"
        warnings.append(f"{prefix}.constant_steps={schedule.constant_steps} {text}")
    decay = None if schedule.wsd_decay_steps is None else min(schedule.wsd_decay_steps, rest - constant)
    if decay is not None and decay != schedule.wsd_decay_steps:
        text = f"exceeds the {decay} steps between the warm-up and those at min_lr; using {decay}"
        warnings.append(f"{prefix}.wsd_decay_steps={schedule.wsd_decay_steps} {text}")
    return ScheduleLengths(warmup, constant, decay), warnings
