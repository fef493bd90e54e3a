"""What hangs on the training loop: the callback protocol, and the callbacks that every run has.

A run's callbacks are called in order: those of the package, the user's own (``trainer.callbacks``), then checkpoints and
loggers, so that what a callback adds to an event's report is logged. Every rank calls them; only rank 0 should write.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from nemo_kto.algorithms.protocols import CheckpointWriter, MetricsLogger, Trainer, WrittenCheckpoint
from nemo_kto.losses.metrics import Metrics
from nemo_kto.telemetry.spikes import LossSpikes
from nemo_kto.telemetry.stragglers import INTERVAL, RankTimes, StragglerFinder, slowest
from nemo_kto.telemetry.throughput import ThroughputMeter


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something the loop has just done.

    Attributes:
        step: optimizer steps done so far.
        metrics: of the global batch, or over the validation examples, under NAME_METRIC where validation sets have names;
            ``metrics.sums`` are what they are made of.
        seconds: wall-clock time it took.
        report: what will be logged, under its full names (train/loss, timing/step_time, ...); add to it.
    """

    step: int
    metrics: Metrics
    seconds: float
    report: dict[str, float]


class Callback:
    """Does nothing; override what you need. Named after Lightning's hooks: on_train_batch_end, on_save_checkpoint."""

    def on_fit_start(self, trainer: Trainer) -> None:
        """Before the first step, or the first after a resume."""

    def on_train_epoch_start(self, trainer: Trainer) -> None:
        """Before the first step of an epoch, or the first after a resume."""

    def on_train_step_end(self, trainer: Trainer, event: Event) -> None:
        """After an optimizer step."""

    def on_log(self, trainer: Trainer, event: Event) -> None:
        """After every ``log_every_n_steps`` steps and the last one. ``event`` is of all steps since the last call."""

    def on_validation_end(self, trainer: Trainer, event: Event) -> None:
        """After a validation."""

    def on_save(self, trainer: Trainer, report: dict[str, float]) -> None:
        """A checkpoint is due. What is added to ``report`` is logged."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """After the last step, its validation and its checkpoint."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """The run failed or was interrupted; the error is raised afterwards."""


@dataclass(kw_only=True, eq=False)
class LoggerCallback(Callback):
    """Hands every report to a logger."""

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
    """Begins a checkpoint when one is due, and logs how long it took once it is complete, which may be some steps later.

    When the run fails, what is not complete is left behind.
    """

    writer: CheckpointWriter
    logger: MetricsLogger

    def on_train_step_end(self, trainer: Trainer, event: Event) -> None:
        self._log(self.writer.poll())

    def on_save(self, trainer: Trainer, report: dict[str, float]) -> None:
        with trainer.timers.phase("checkpoint"):
            self._log(self.writer.save(trainer.state_dict(), trainer.monitored))
        trainer.timers.report_and_reset()  # it is no phase of a step

    def on_fit_end(self, trainer: Trainer) -> None:
        with trainer.timers.phase("checkpoint"):
            self._log(self.writer.finish())

    def _log(self, written: WrittenCheckpoint | None) -> None:
        """Under the step of the checkpoint."""
        if written is not None:
            times = {"timing/checkpoint": written.seconds, "timing/checkpoint_stall": written.stall_seconds}
            self.logger.log_metrics(times, written.step)


@dataclass(kw_only=True, eq=False)
class ThroughputCallback(Callback):
    """Adds perf/...: tokens a second, padding, memory, and the model FLOPs utilisation where the device's peak is known."""

    meter: ThroughputMeter

    def on_log(self, trainer: Trainer, event: Event) -> None:
        sums = event.metrics.sums
        figures = self.meter.figures(
            seconds=event.seconds,
            tokens=int(sums["tokens"]),
            padded_tokens=int(sums["padded_tokens"]),
            flops=sums["flops"],
            kl_tokens=int(sums.get("kl_tokens", 0)),
        )
        event.report.update({f"perf/{name}": value for name, value in figures.items()})


@dataclass(kw_only=True, eq=False)
class StragglerCallback(Callback):
    """Adds timing/forward, and every few steps what the slowest rank took in each phase: timing/PHASE_max and who it was.

    Those are seconds a step on average since the last time, in the next line of the log. A rank that holds the others up is
    named in a warning.
    """

    gather: Callable[[RankTimes], list[RankTimes]]  # what every rank gives, in their order; collective
    forward_seconds: Callable[[], float]  # of this rank's forward passes since the last call
    stage: int  # of the pipeline
    warn: Callable[[str], None]  # where warnings go
    interval: int = INTERVAL

    def __post_init__(self) -> None:
        self._finder, self._sums, self._steps = StragglerFinder(), dict[str, float](), 0
        self._slowest: dict[str, float] = {}

    def on_train_epoch_start(self, trainer: Trainer) -> None:
        self.forward_seconds()  # those before the first step of an epoch are not of a step

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
class SpikeCallback(Callback):
    """Warns where the loss jumps; it looks at every step, whatever is logged."""

    spikes: LossSpikes = field(default_factory=LossSpikes)

    def on_train_step_end(self, trainer: Trainer, event: Event) -> None:
        self.spikes.watch(event.step, event.metrics["loss"])


@dataclass(kw_only=True, eq=False)
class PrecomputeReference(Callback):
    """Precomputes the reference log-probs that an epoch needs when it begins."""

    precompute: Callable[[int], None]  # those from this step to the end of its epoch

    def on_train_epoch_start(self, trainer: Trainer) -> None:
        self.precompute(trainer.step)


@dataclass(kw_only=True, eq=False)
class ReferenceSync(Callback):
    """Moves the reference towards the policy every few steps (TR-DPO, Gorbatovski et al. 2024, arXiv 2404.09656)."""

    mix: Callable[[float], None]  # reference = alpha * policy + (1 - alpha) * reference, of alpha
    interval: int  # optimizer steps
    mixup_alpha: float

    def on_train_step_end(self, trainer: Trainer, event: Event) -> None:
        if event.step % self.interval == 0:
            self.mix(self.mixup_alpha)
