"""The optimizer of a run and its learning rates, from the configuration."""

from __future__ import annotations

import logging
from typing import NamedTuple

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from nemo_kto.algorithms.duration import fraction_of
from nemo_kto.config.schema import RunConfig, ScheduleConfig
from nemo_kto.device.dtypes import DTYPES, MOMENTS
from nemo_kto.distributed import state
from nemo_kto.models.engine.optimizer import build_optimizer, build_scheduler
from nemo_kto.run.build_policy import Policy

logger = logging.getLogger(__name__)


def build_optimizer_and_schedule(
    cfg: RunConfig, policy: Policy, *, max_steps: int
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
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
    """Optimizer steps of the parts of a schedule; ``wsd_decay_steps`` is None where it has no such part."""

    warmup_steps: int
    constant_steps: int
    wsd_decay_steps: int | None


def schedule_lengths(schedule: ScheduleConfig, max_steps: int) -> tuple[ScheduleLengths, list[str]]:
    """The parts of the schedule of a run of ``max_steps`` steps, and a warning for each that has no room as it is."""
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
