"""Training callbacks: events, the interface and the built-in callbacks.

Callbacks run in a fixed order: the built-in ones, the user's (``trainer.callbacks``), then checkpoints and loggers, so that
values which a callback adds to ``event.report`` are logged. They run on every rank; only rank 0 should write files.
"""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_kto.algorithms.protocols import CheckpointWriter, MetricsLogger, Trainer, WrittenCheckpoint
from nemo_kto.losses.metrics import Metrics, Rewards, metric_prefix
from nemo_kto.telemetry.evaluations import ExtremeRow, RewardHistogram, Sample
from nemo_kto.telemetry.watch import INTERVAL, LossSpikes, RankTimes, StragglerFinder, slowest, throughput

logger = logging.getLogger(__name__)
_MEANS = ("timing/", "train/grad_norm")  # prefixes of the values that are averaged over the steps of a log line


@dataclass(frozen=True, kw_only=True)
class Event:
    """A finished training step, group of logged steps, or validation."""

    step: int  # optimizer steps done so far
    metrics: Metrics  # over the global batch or the validation examples; of named validation sets as NAME_METRIC
    seconds: float  # elapsed wall-clock time
    report: dict[str, float]  # values to log by full name (train/loss, timing/step_time, ...); callbacks may add to it


class StepLog:
    """Aggregation of the steps since the last log line.

    A log line contains

    - the metrics over all examples of these steps, with equal weight for each example; counts are summed. Steps with
      non-finite metrics are left out, unless there are no others;
    - the mean over the steps of seconds (``timing/...``) and of ``train/grad_norm``;
    - for everything else (learning rate, counters, values added by callbacks) the newest value.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._last: Event | None = None
        self._steps, self._seconds = 0, 0.0
        self._sums: dict[str, float] = {}  # sums from which the metrics are computed
        self._totals: dict[str, tuple[float, int]] = {}  # sum of each averaged value, and the number of steps with it
        self._newest: dict[str, float] = {}

    def add(self, event: Event) -> None:
        self._last = event
        self._steps += 1
        self._seconds += event.seconds
        if all(map(math.isfinite, event.metrics.sums.values())):
            for name, value in event.metrics.sums.items():
                self._sums[name] = self._sums.get(name, 0) + value
        for name, value in event.report.items():
            if name.startswith(_MEANS):
                total, steps = self._totals.get(name, (0.0, 0))
                self._totals[name] = total + value, steps + 1
            elif name.removeprefix("train/") not in event.metrics:
                self._newest[name] = value

    def take(self) -> Event | None:
        """Return the steps since the last log line as one event with their total seconds, and reset; None if no steps."""
        if (last := self._last) is None:
            return None
        metrics = last.metrics.of(self._sums) if self._sums else last.metrics
        report = {f"train/{name}": value for name, value in metrics.items()} | self._newest
        report |= {name: total / steps for name, (total, steps) in self._totals.items()}
        line = Event(step=last.step, metrics=metrics, seconds=self._seconds, report=report)
        self._clear()
        return line

    def state_dict(self) -> dict[str, Any]:
        """Return the accumulated steps for a checkpoint; empty if there are none."""
        names = ("steps", "seconds", "sums", "totals", "newest")
        return {name: getattr(self, f"_{name}") for name in names} if self._steps else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self._clear()
        if state:
            self._steps, self._seconds = int(state["steps"]), float(state["seconds"])
            self._sums, self._newest = dict(state["sums"]), dict(state["newest"])
            self._totals = {name: (total, steps) for name, (total, steps) in state["totals"].items()}


class Callback:
    """Base class for callbacks, with hooks modelled on those of Lightning; every hook does nothing by default."""

    def on_fit_start(self, trainer: Trainer) -> None:
        """Called before the first step of a new or resumed run."""

    def on_train_epoch_start(self, trainer: Trainer) -> None:
        """Called before the first step of an epoch, and before the first step of a resumed run."""

    def on_train_step_end(self, trainer: Trainer, event: Event) -> None:
        """Called after each optimizer step."""

    def on_log(self, trainer: Trainer, event: Event) -> None:
        """Called every ``log_every_n_steps`` steps and after the last; ``event`` covers all steps since the last call."""

    def on_validation_end(self, trainer: Trainer, event: Event) -> None:
        """Called after each validation."""

    def on_save(self, trainer: Trainer, report: dict[str, float]) -> None:
        """Called when a checkpoint is due; values added to ``report`` are logged."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """Called after the last step, its validation and its checkpoint."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Called when the run fails or is interrupted; the error is re-raised afterwards."""


@dataclass(kw_only=True, eq=False)
class LoggerCallback(Callback):
    """Callback that passes every report to a logger."""

    logger: MetricsLogger

    def on_log(self, trainer: Trainer, event: Event) -> None:
        self.logger.log_metrics(event.report, event.step)

    def on_validation_end(self, trainer: Trainer, event: Event) -> None:
        self.logger.log_metrics(event.report, event.step)

    def on_save(self, trainer: Trainer, report: dict[str, float]) -> None:
        if report:
            self.logger.log_metrics(report, trainer.step)

    def on_fit_end(self, trainer: Trainer) -> None:
        self.logger.finalize("success")

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        self.logger.finalize("failed")


@dataclass(kw_only=True, eq=False)
class CheckpointCallback(Callback):
    """Callback that starts checkpoints and logs their durations; a run that fails leaves an incomplete one on disk."""

    writer: CheckpointWriter
    logger: MetricsLogger

    def on_train_step_end(self, trainer: Trainer, event: Event) -> None:
        self._log(self.writer.poll())

    def on_save(self, trainer: Trainer, report: dict[str, float]) -> None:
        with trainer.timers.phase("checkpoint"):
            self._log(self.writer.save(trainer.state_dict(), trainer.monitored))
        trainer.timers.report_and_reset()  # the time of a checkpoint is not part of a step

    def on_fit_end(self, trainer: Trainer) -> None:
        with trainer.timers.phase("checkpoint"):
            self._log(self.writer.finish())

    def _log(self, written: WrittenCheckpoint | None) -> None:
        if written is not None:
            times = {"timing/checkpoint": written.seconds, "timing/checkpoint_stall": written.stall_seconds}
            self.logger.log_metrics(times, written.step)


@dataclass(kw_only=True, eq=False)
class ThroughputCallback(Callback):
    """Callback that adds perf/...: tokens per second, padding, memory and, for a known device, model FLOPs utilisation."""

    world_size: int
    peak_memory: Callable[[], int]  # of this rank so far, in bytes
    peak_flops: float | None = None  # FLOP/s of one device; None: no utilisation

    def on_log(self, trainer: Trainer, event: Event) -> None:
        sums, seconds = event.metrics.sums, event.seconds
        figures = throughput(sums, seconds=seconds, world_size=self.world_size, peak_flops=self.peak_flops)
        figures["peak_memory_gb"] = self.peak_memory() / 1e9
        event.report.update({f"perf/{name}": value for name, value in figures.items()})


@dataclass(kw_only=True, eq=False)
class StragglerCallback(Callback):
    """Callback that adds timing/forward and warns about slow ranks.

    Every ``interval`` steps the ranks are compared. For each phase, timing/PHASE_max is the time of the slowest rank, in
    seconds per step averaged since the last comparison, and timing/PHASE_max_rank is that rank. Both appear in the next line
    of the log. A rank that delays the others is named in a warning.
    """

    gather: Callable[[RankTimes], list[RankTimes]]  # times of all ranks in rank order; collective
    forward_seconds: Callable[[], float]  # seconds that this rank spent in forward passes since the last call
    stage: int  # pipeline stage of this rank
    warn: Callable[[str], None]
    interval: int = INTERVAL  # steps between two comparisons

    def __post_init__(self) -> None:
        self._finder, self._sums, self._steps = StragglerFinder(), dict[str, float](), 0
        self._slowest: dict[str, float] = {}

    def on_train_epoch_start(self, trainer: Trainer) -> None:
        self.forward_seconds()  # discard forward passes made between epochs: they belong to no step

    def on_validation_end(self, trainer: Trainer, event: Event) -> None:
        self.forward_seconds()

    def on_train_step_end(self, trainer: Trainer, event: Event) -> None:
        event.report["timing/forward"] = self.forward_seconds()
        for name, seconds in event.report.items():
            if name.startswith("timing/"):
                name = name.removeprefix("timing/")
                self._sums[name] = self._sums.get(name, 0.0) + seconds
        self._steps += 1
        if event.step % self.interval == 0:
            means = {name: seconds / self._steps for name, seconds in self._sums.items()}
            self._sums, self._steps = {}, 0
            step = means.pop("step_time")
            times = self.gather(RankTimes(host=socket.gethostname(), stage=self.stage, step=step, phases=means))
            self._slowest = {f"timing/{name}": value for name, value in slowest(times).items()}
            for warning in self._finder.find(times):
                self.warn(warning)

    def on_log(self, trainer: Trainer, event: Event) -> None:
        event.report.update(self._slowest)
        self._slowest = {}


@dataclass(kw_only=True, eq=False)
class RewardCallback(Callback):
    """Callback that records the rewards of each validation, and warns if their AUC is undefined."""

    record: Callable[[Sequence[RewardHistogram], int, Sequence[ExtremeRow]], None]
    extremes: Callable[[str, Rewards, int], Sequence[ExtremeRow]]  # (name of the set, its rewards, step) -> rows

    def on_validation_end(self, trainer: Trainer, event: Event) -> None:
        of_sets = event.metrics.rewards.items()
        found = (RewardHistogram.of(name, rewards.by_class) for name, rewards in of_sets)
        extremes = [row for name, rewards in of_sets for row in self.extremes(name, rewards, event.step)]
        self.record([histogram for histogram in found if histogram is not None], event.step, extremes)
        for name, rewards in event.metrics.rewards.items():
            counts = {one: len(values_N) for one, values_N in rewards.by_class.items() if len(values_N)}
            if not rewards.paired and len(counts) == 1:
                ((only, count),) = counts.items()
                what = f"val/{metric_prefix(name)}auc is undefined and not logged"
                logger.warning(f"{what}: all {count:,} examples of the validation are {only}")


@dataclass(kw_only=True, eq=False)
class SampleCallback(Callback):
    """Callback that records answers of the policy to a few prompts at each validation, and adds timing/samples.

    With ``only_at_ends`` it records those from before the first step and after the last one.

    It must precede StragglerCallback, which discards the forward passes of a validation.
    """

    answer: Callable[[int], Sequence[Sample]]  # answers of the policy after a step; empty if the run must stop; collective
    record: Callable[[Sequence[Sample], int], None]
    initial: Sequence[Sample] = ()  # answers from before the first step that are not recorded yet
    starts_as_policy: bool = True  # the initial answers are those of the policy before the first step
    only_at_ends: bool = False
    recorded: Collection[int] = ()  # steps whose answers an earlier start of the run has recorded

    def on_fit_start(self, trainer: Trainer) -> None:
        if self.initial:
            self.record(self.initial, 0)

    def on_validation_end(self, trainer: Trainer, event: Event) -> None:
        if self.only_at_ends or (event.step == 0 and self.starts_as_policy):
            return
        with trainer.timers.phase("samples"):
            samples = self.answer(event.step)
        event.report["timing/samples"] = trainer.timers.report_and_reset()["samples"]
        if samples:
            self.record(samples, event.step)

    def on_fit_end(self, trainer: Trainer) -> None:
        if not self.only_at_ends or not trainer.step or trainer.step in self.recorded:
            return
        with trainer.timers.phase("samples"):
            samples = self.answer(trainer.step)
        if samples:
            self.record(samples, trainer.step)


@dataclass(kw_only=True, eq=False)
class SpikeCallback(Callback):
    """Callback that warns about loss spikes; checks every step, including those that are not logged."""

    spikes: LossSpikes = field(default_factory=LossSpikes)

    def on_train_step_end(self, trainer: Trainer, event: Event) -> None:
        self.spikes.watch(event.step, event.metrics["loss"])


@dataclass(kw_only=True, eq=False)
class PrecomputeReference(Callback):
    """Callback that precomputes the reference log-probs from the current step to the end of its epoch."""

    precompute: Callable[[int], None]

    def on_train_epoch_start(self, trainer: Trainer) -> None:
        self.precompute(trainer.step)


@dataclass(kw_only=True, eq=False)
class ReferenceSync(Callback):
    """Callback that moves the reference towards the policy (TR-DPO, Gorbatovski et al. 2024, arXiv 2404.09656).

    Every ``interval`` steps ``mix`` sets reference = mixup_alpha * policy + (1 - mixup_alpha) * reference.
    """

    mix: Callable[[float], None]
    interval: int
    mixup_alpha: float

    def on_train_step_end(self, trainer: Trainer, event: Event) -> None:
        if event.step % self.interval == 0:
            self.mix(self.mixup_alpha)
