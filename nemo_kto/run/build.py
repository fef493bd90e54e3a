"""Run a training job from its configuration: build each object once, train, and export the model."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import unwrap_model

from nemo_kto.algorithms.callbacks import (
    Callback,
    LoggerCallback,
    PrecomputeReference,
    ReferenceSync,
    SpikeCallback,
    StragglerCallback,
    ThroughputCallback,
)
from nemo_kto.algorithms.dpo import DPOTrainer
from nemo_kto.algorithms.duration import TrainerConfig, fraction_of
from nemo_kto.algorithms.stopping import SkippedSteps
from nemo_kto.artifacts.checkpoint_files import CHECKPOINTS, INFO, named_checkpoints
from nemo_kto.checkpoint.distributed import CheckpointManager
from nemo_kto.checkpoint.restricted import reading
from nemo_kto.config.choices import find_callback
from nemo_kto.config.rules.gpu import check_gpu
from nemo_kto.config.saved_config import public_config, redacted, save_config
from nemo_kto.config.schema import RunConfig, ScheduleConfig
from nemo_kto.device import device
from nemo_kto.device.dtypes import DTYPES, MOMENTS
from nemo_kto.distributed import state
from nemo_kto.models.engine.engine import LogProbEngine
from nemo_kto.models.engine.optimizer import build_optimizer, build_scheduler
from nemo_kto.models.flops import ModelFlops
from nemo_kto.models.nlp.gpt.megatron_gpt_model import Objective
from nemo_kto.processes import ranks, signals, watchdog
from nemo_kto.run.data import RunData, build_data
from nemo_kto.run.finish import check_export, finish
from nemo_kto.run.lifecycle import hold_run_folder, newest_checkpoint, resolve_precision, stop_early
from nemo_kto.run.policy import Policy, build_policy
from nemo_kto.run.reference import ReferenceSetup, build_reference
from nemo_kto.run.resume import Resumption, build_early_stopping, check_early_stopping, look_for_run
from nemo_kto.run.rows import micro_batch_limits, model_tokenizer
from nemo_kto.run.summary import print_start, validation_titles
from nemo_kto.telemetry.loggers import RunLogger, check_loggers
from nemo_kto.telemetry.progress import Progress
from nemo_kto.telemetry.throughput import ThroughputMeter, device_peak_flops
from nemo_kto.telemetry.timers import PhaseTimers, RunTimer

logger = logging.getLogger(__name__)


# (configuration, number of ranks, number of ranks on this machine); raises UserError if memory is too small.
CheckMemory = Callable[[RunConfig, int, int], None]


def train(cfg: RunConfig, *, check_memory: CheckMemory | None = None) -> None:
    """Run the whole job on this rank: train the policy and export it; ``cfg`` must already be validated (see ``cli``)."""
    layout = state.Layout(
        tensor=cfg.model.tensor_model_parallel_size,
        pipeline=cfg.model.pipeline_model_parallel_size,
        context=cfg.model.context_parallel_size,
        virtual=cfg.model.virtual_pipeline_model_parallel_size,
        sequence_parallel=cfg.model.sequence_parallel,
        expert=cfg.model.expert_model_parallel_size,
        expert_tensor=cfg.model.expert_tensor_parallel_size,
    )
    device.record_collectives(str(Path(cfg.exp_manager.explicit_log_dir) / "nccl_trace_rank_"))
    state.init_distributed(layout=layout, seed=cfg.model.seed, timeout=timedelta(minutes=cfg.trainer.timeout_minutes))
    with hold_run_folder(Path(cfg.exp_manager.explicit_log_dir)):
        _train(cfg, check_memory)


def _train(cfg: RunConfig, check_memory: CheckMemory | None) -> None:
    """Run the job; the lock of the run folder must be held."""
    cfg, why = resolve_precision(cfg)
    state.raise_together(state.attempt(lambda: check_gpu(cfg)), "{}")
    if check_memory is not None:
        ranks = state.world_size()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", max(1, ranks // cfg.trainer.num_nodes)))
        state.raise_together(state.attempt(partial(check_memory, cfg, ranks, local)), "{}")
    with watchdog.phase("opening the logs"):
        check_logs(cfg)
    with watchdog.phase("preparing data"):
        start = prepare(cfg)
    if start.run.finished is not None:
        if state.is_rank_zero():
            print(f"nemo-kto: {start.run.finished}", flush=True)
        state.destroy()
        return
    check_export(cfg, start.data)
    check_early_stopping(cfg, start.data)
    with watchdog.phase("loading the model"):
        source = Path(cfg.pretrained_checkpoint.restore_from_path)
        policy = build_policy(cfg.model, source, dtype=DTYPES[cfg.trainer.precision])
    resumed_step = start.run.resumed_step
    print_start(cfg, policy, start.data, start.trainer_cfg, why_precision=why, resumed_step=resumed_step)
    with watchdog.phase("building the trainer"):
        trainer = build_trainer(cfg, policy, start, build_timer(cfg))
    watchdog.count_steps(lambda: trainer.step)
    # Defer stop signals before the ranks synchronise: otherwise one rank could exit without saving while another is in its
    # first step.
    with signals.deferred():
        # Only after the resume checks: a configuration with which the run cannot be resumed must not replace the saved one.
        state.on_rank_zero(lambda: save_config(cfg), "the configuration could not be written: {}")
        began = time.monotonic()
        trainer.fit()
        if trainer.ended_early:
            stop_early(cfg, trainer)
        with watchdog.phase("export"):
            finish(cfg, policy, trainer, start.trainer_cfg, seconds=time.monotonic() - began)
    state.destroy()


@dataclass(frozen=True, kw_only=True)
class Start:
    """State of a run before its model is built: data, run length, and the result of the resume checks."""

    data: RunData
    trainer_cfg: TrainerConfig
    run: Resumption


def prepare(cfg: RunConfig) -> Start:
    """Read the data and run the resume checks on the run folder; collective.

    Raises:
        UserError: the data cannot be used, or the run cannot be resumed with this configuration.
    """
    source = Path(cfg.pretrained_checkpoint.restore_from_path)
    data = build_data(cfg, model_tokenizer(source))
    trainer_cfg = TrainerConfig(global_batch_size=cfg.model.global_batch_size, **cfg.loop.duration())
    return Start(data=data, trainer_cfg=trainer_cfg, run=look_for_run(cfg, data, trainer_cfg))


def build_timer(cfg: RunConfig) -> RunTimer:
    """Build the timer that decides, equally on all ranks, when the run must stop."""
    return RunTimer(
        max_time=cfg.trainer.max_time,
        started=ranks.started_at(),
        received=signals.received,
        agree=state.largest,
        requeue=cfg.trainer.requeue,
    )


def build_trainer(cfg: RunConfig, policy: Policy, start: Start, run_timer: RunTimer) -> DPOTrainer:
    """Build the trainer and all its components; if the run is resumed, load the chosen checkpoint."""
    timers = PhaseTimers(clock=device.moment, observe=watchdog.phase)
    data, trainer_cfg = start.data, start.trainer_cfg
    engine = build_engine(cfg, policy)
    first_step = start.run.resumed_step or 0
    reference = build_reference(cfg, policy, engine, data, trainer_cfg, timers, run_timer, first_step=first_step)
    make_model = cfg.recipe.model(cfg.loss, data.splits.train, lr=cfg.model.optim.lr)
    model = make_model(engine=engine, reference=reference.policy, objective=build_objective(cfg), phase=timers.phase)
    max_steps = trainer_cfg.total_steps(len(data.train.batch_sampler))
    if trainer_cfg.max_steps > max_steps and state.is_rank_zero():
        prefix, epochs = f"trainer.{cfg.recipe.name}", trainer_cfg.max_epochs
        text = f"must be at most {max_steps} for {epochs} epoch{'s' * (epochs > 1)}, got {trainer_cfg.max_steps}; the run "
        logger.warning(f"{prefix}.max_steps {text}ends after step {max_steps}, raise {prefix}.max_epochs to train longer")
    optimizer, scheduler = build_optimizer_and_schedule(cfg, policy, max_steps=max_steps)
    checkpoints = CheckpointManager(
        folder=Path(cfg.exp_manager.explicit_log_dir) / CHECKPOINTS,
        chunks=policy.chunks,
        optimizer=optimizer,
        scheduler=scheduler,
        hugging_face_source=policy.folder,
        base_model=policy.base_model,
        reference_weights=reference.synced_weights,
        run=start.run.facts,
        **cfg.exp_manager.checkpoint_callback_params.model_dump(),
    )
    resumed = None if start.run.checkpoint is None else checkpoints.load(start.run.checkpoint)
    resumed_step = None if resumed is None else resumed["step"]

    def last_good() -> str:
        checkpoints.finish()  # complete the checkpoint in progress
        return newest_checkpoint(cfg)

    trainer = cfg.recipe.trainer(data.collate_fn)(
        cfg=trainer_cfg,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        train_dataloader=data.train,
        val_dataloader=data.validation,
        test_dataloader=None,
        logger=build_logger(cfg, resumed_step=resumed_step),
        ckpt_callback=checkpoints,
        run_timer=run_timer,
        timers=timers,
        callbacks=build_callbacks(cfg, engine, reference, max_steps=max_steps, resumed_step=resumed_step),
        skipped=SkippedSteps(
            max_in_a_row=cfg.trainer.max_skipped_steps,
            name_rows=None if data.splits.train is None else data.splits.train.names,
            last_checkpoint=last_good,
            logs=state.is_rank_zero(),
        ),
        early_stopping=build_early_stopping(cfg, agree=state.largest),
    )
    if resumed is not None and start.run.checkpoint is not None:
        with reading(start.run.checkpoint.folder / INFO):
            trainer.load_state_dict(resumed)
    return trainer


def build_engine(cfg: RunConfig, policy: Policy) -> LogProbEngine:
    """Build the engine that runs the policy."""
    return LogProbEngine(
        chunks=list(policy.chunks),
        vocab_size=policy.architecture.vocab_size,
        limits=micro_batch_limits(cfg),
        forward_micro_batch_size=cfg.loss.log_prob_forward_micro_batch_size,
        average_log_probs=cfg.loss.preference_average_log_probs or cfg.loss.record.average_log_probs,
        logprob_chunk_size=cfg.model.logprob_chunk_size,
        flops=ModelFlops.of_model(policy.architecture, adapters=unwrap_model(policy.chunks[0]).adapters),
        moe_aux_loss_coeff=cfg.model.moe_aux_loss_coeff,
    )


def build_objective(cfg: RunConfig) -> Objective:
    """Build the training objective."""
    return Objective(
        loss=cfg.loss.record,
        options=cfg.loss.loss_options(),
        beta=cfg.loss.ref_policy_kl_penalty,
        preference_loss_weight=cfg.loss.preference_loss_weight,
        sft_loss_weight=cfg.loss.sft_loss_weight,
        sft_average_log_probs=cfg.loss.sft_average_log_probs,
    )


def build_callbacks(
    cfg: RunConfig, engine: LogProbEngine, reference: ReferenceSetup, *, max_steps: int, resumed_step: int | None
) -> list[Callback]:
    """Build the training callbacks except for checkpoints and loggers; the user's callbacks come last."""
    callbacks: list[Callback] = []
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
        settings = cfg.model.reference
        callbacks.append(ReferenceSync(mix=weights.mix, interval=settings.sync_interval, mixup_alpha=settings.sync_alpha))
    meter = ThroughputMeter(
        world_size=state.world_size(),
        peak_memory=device.peak_memory_bytes,
        peak_flops=device_peak_flops(device.current_device(), DTYPES[cfg.trainer.precision], name=device.device_name()),
    )
    callbacks.append(ThroughputCallback(meter=meter))
    if state.is_rank_zero():
        progress = Progress(total_steps=max_steps, start_step=resumed_step or 0, validations=validation_titles(cfg))
        callbacks.append(LoggerCallback(logger=progress))
        callbacks.append(SpikeCallback())
    return [*callbacks, *(find_callback(spec)() for spec in cfg.trainer.callbacks)]


def check_logs(cfg: RunConfig) -> None:
    """Check that the logs of a new run can be opened; collective.

    A resumed run is not checked: it continues without logs that cannot be opened.

    Raises:
        UserError: some logs cannot be opened; the message names them.
    """

    def check() -> None:
        settings = cfg.exp_manager
        if not named_checkpoints(Path(settings.explicit_log_dir) / CHECKPOINTS):
            check_loggers(**_logger_settings(cfg))

    state.from_rank_zero(check, doing="opening the logs")


def _logger_settings(cfg: RunConfig) -> dict[str, Any]:
    settings = cfg.exp_manager
    return {
        "folder": Path(settings.explicit_log_dir),
        "tensorboard": settings.create_tensorboard_logger,
        "wandb": settings.wandb_logger_kwargs.model_dump() if settings.create_wandb_logger else None,
        "mlflow": settings.mlflow_logger_kwargs.model_dump() if settings.create_mlflow_logger else None,
        "redact": redacted,
    }


def build_logger(cfg: RunConfig, *, resumed_step: int | None) -> RunLogger:
    """Build the logger, which writes on rank 0 only; collective: if a log cannot be opened, all ranks raise the error."""
    made = list[RunLogger]()

    def make() -> None:
        run_logger = RunLogger(enabled=state.is_rank_zero(), resumed_step=resumed_step, **_logger_settings(cfg))
        run_logger.log_hyperparams(public_config(cfg))
        made.append(run_logger)

    state.raise_together(state.attempt(make), "{}")
    return made[0]


def build_optimizer_and_schedule(
    cfg: RunConfig, policy: Policy, *, max_steps: int
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Build the optimizer and the learning-rate schedule of a run of ``max_steps`` steps."""
    optim = cfg.model.optim
    rates = {"lr": optim.lr, "min_lr": optim.sched.min_lr, "weight_decay": optim.weight_decay}
    optimizer = build_optimizer(
        chunks=policy.chunks,
        betas=(optim.betas[0], optim.betas[1]),
        eps=optim.eps,
        clip_grad=cfg.loop.gradient_clip_val,
        params_dtype=DTYPES[cfg.trainer.precision],
        use_distributed_optimizer=optim.use_distributed_optimizer,
        moments_dtype=MOMENTS[optim.moments_dtype],
        offload_fraction=optim.offload_fraction,
        **rates,
    )
    lengths, warnings = schedule_lengths(optim.sched, max_steps)
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
    """Lengths of the parts of a schedule in optimizer steps; ``wsd_decay_steps`` is None if there is no such part."""

    warmup_steps: int
    constant_steps: int
    wsd_decay_steps: int | None


def schedule_lengths(schedule: ScheduleConfig, max_steps: int) -> tuple[ScheduleLengths, list[str]]:
    """Fit the parts of a schedule into ``max_steps`` steps.

    Returns:
        The lengths of the parts, and a warning for each part that was shortened or left out.
    """
    prefix, warnings = "model.optim.sched", []
    wanted, ratio = schedule.warmup_steps, schedule.warmup_ratio
    warmup = min(wanted, max_steps - 1) if ratio is None else fraction_of(max_steps, ratio)
    if warmup < wanted:
        below = f"below the number of steps, {max_steps}, got {wanted}; shortened to {warmup}"
        warnings.append(f"{prefix}.warmup_steps must be {below}")
    room = max_steps - warmup
    constant = schedule.constant_steps if schedule.constant_steps < room else 0
    if constant < schedule.constant_steps:
        below = f"below the number of steps after the warm-up, {room}, got {schedule.constant_steps}; left out"
        warnings.append(f"{prefix}.constant_steps must be {below}")
    decay = None if schedule.wsd_decay_steps is None else min(schedule.wsd_decay_steps, room - constant)
    if decay is not None and decay != schedule.wsd_decay_steps:
        most = f"at most {decay}, the steps between the warm-up and those at min_lr, got {schedule.wsd_decay_steps}"
        warnings.append(f"{prefix}.wsd_decay_steps must be {most}; shortened to {decay}")
    return ScheduleLengths(warmup, constant, decay), warnings
