"""What a configuration leaves to the program: what is adapted, how the reference is held, and the parts of the schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from nemo_kto.algorithms.duration import fraction_of
from nemo_kto.checkpoint.adapter_files import read_adapter_settings
from nemo_kto.launch.schema import PeftConfig, RunConfig, ScheduleConfig
from nemo_kto.models.lora_settings import LoRASettings


def adapter_settings(cfg: PeftConfig) -> LoRASettings | None:
    """What is to be adapted; adapters that are there already say it themselves."""
    if cfg.peft_scheme == "none":
        return None
    tuning = cfg.lora_tuning
    if cfg.restore_from_path is not None:
        return replace(read_adapter_settings(cfg.restore_from_path), dropout=tuning.adapter_dropout)
    return LoRASettings(
        rank=tuning.adapter_dim,
        alpha=tuning.alpha,
        dropout=tuning.adapter_dropout,
        target_modules=tuple(tuning.target_modules),
        layers=None if tuning.layer_selection is None else tuple(tuning.layer_selection),
    )


def choose_mode(cfg: RunConfig) -> tuple[str, str]:
    """How the reference is held (swap, adapter, cached or none), and why."""
    settings = cfg.model.reference
    if not cfg.loss.record.needs_reference:
        return "none", f"{cfg.loss.preference_loss} needs no reference"
    if settings.mode != "auto":
        return settings.mode, "set by the user"
    if settings.sync_interval:
        return "swap", "it is synced with the policy, so that its log-probs change"
    if cfg.model.peft.peft_scheme != "none" and settings.restore_from_path is None:
        return "adapter", "it is the model without what its adapters learn, and costs almost no memory"
    return "cached", "it does not change: one pass over the data serves this run, its validations and later runs"


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
