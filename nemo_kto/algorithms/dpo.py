"""DPOTrainer: the training loop, for any preference loss."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from nemo_kto.algorithms.callbacks import Callback, CheckpointCallback, Event, LoggerCallback, StepLog
from nemo_kto.algorithms.duration import (
    BestValidation,
    EarlyStopping,
    SkippedSteps,
    TrainerConfig,
    ValidationLoaders,
    interval_steps,
    validation_sets,
)
from nemo_kto.algorithms.protocols import CheckpointWriter, Loader, MetricsLogger, Optimizer, PolicyModel, Scheduler
from nemo_kto.data.batches.collate import dpo_custom_collate
from nemo_kto.data.batches.loader import Prefetching
from nemo_kto.errors import UserError
from nemo_kto.losses.metrics import Metrics, metrics_by_set
from nemo_kto.telemetry.watch import PhaseTimers, RunTimer, StopReason

__all__ = ["DPOTrainer", "TrainerConfig", "dpo_custom_collate"]


def identity(batch: Any) -> Any:
    """Return the batch unchanged: the collate function for loaders that yield batches."""
    return batch


@dataclass(kw_only=True, eq=False)
class DPOTrainer:
    """Trainer for preference losses: steps, validation, checkpoints and timers, independent of the loss.

    ``cfg`` may be a mapping, such as the section ``trainer.NAME`` of a configuration, see :meth:`TrainerConfig.of`. The
    validation loader yields also an incomplete last batch; a mapping from names to loaders gives validation sets with
    separate metrics. Raises ValueError if the run has no steps, or ``cfg`` is an invalid mapping.
    """

    cfg: TrainerConfig | Mapping[str, Any]
    model: PolicyModel[Any]
    optimizer: Optimizer  # also clips the gradient
    scheduler: Scheduler
    train_dataloader: Loader[Any]
    val_dataloader: ValidationLoaders  # None for no validation
    test_dataloader: Loader[Any] | None  # not used by the trainer, only stored for the caller
    collate_fn: Callable[[Any], Any] = identity  # applied to each item that a loader yields
    logger: MetricsLogger
    ckpt_callback: CheckpointWriter
    run_timer: RunTimer  # decides when the run must stop before its last step
    timers: PhaseTimers = field(default_factory=PhaseTimers)  # pass the same object to the model
    callbacks: Sequence[Callback] = ()  # called before checkpoints and the logger
    skipped: SkippedSteps = field(default_factory=SkippedSteps)  # by default the first skipped step ends the run
    early_stopping: EarlyStopping | None = None
    best_validation: BestValidation | None = None  # a checkpoint is saved whenever it improves; None for no such saves
    prefetch: bool = False  # a thread collates the next batch while the device computes; the batches are the same

    def __post_init__(self) -> None:
        checkpoints = CheckpointCallback(writer=self.ckpt_callback, logger=self.logger)
        self.callbacks = [*self.callbacks, checkpoints, LoggerCallback(logger=self.logger)]
        sampler = self.train_dataloader.batch_sampler
        if isinstance(self.cfg, TrainerConfig):
            self._cfg = self.cfg
        else:
            batch_size = getattr(sampler, "global_batch_size", None)
            clip_grad = getattr(getattr(self.optimizer, "config", None), "clip_grad", None)
            self._cfg = TrainerConfig.of(self.cfg, global_batch_size=batch_size, clip_grad=clip_grad)
        self.steps_per_epoch = self._cfg.steps_per_epoch(len(sampler))
        self.max_steps = self._cfg.total_steps(len(sampler))
        if self.max_steps < 1:
            raise UserError(
                f"the run must have at least one step, got {self.max_steps}; "
                "raise max_epochs, max_steps or limit_train_batches"
            )
        self.val_interval = interval_steps(self._cfg.val_check_interval, self.steps_per_epoch)
        self.save_interval = interval_steps(self._cfg.save_interval, self.steps_per_epoch)
        self.val_sets = validation_sets(self.val_dataloader, limit=self._cfg.limit_val_batches)
        self.step = 0
        self.step_log = StepLog()
        self.validation_due = False  # the validation due at the current step was skipped because the run had to stop
        self.stop: StopReason | None = None
        self.monitored: dict[str, float] = {}

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self.step // self.steps_per_epoch

    @property
    def consumed_samples(self) -> int:
        """Number of training examples used so far, over all ranks."""
        return self.step * self._cfg.global_batch_size

    @property
    def ended_early(self) -> bool:
        """Whether the run was stopped with work left for a resumed run."""
        return self._interrupted and (not self._finished or self.validation_due)

    @property
    def stopped_early(self) -> str | None:
        """Reason why early stopping ended the run, as text; None if it did not."""
        return None if self.early_stopping is None else self.early_stopping.reason

    @property
    def _is_best(self) -> bool:
        """Whether the validation after the current step is the best so far."""
        return self.best_validation is not None and self.best_validation.best_step == self.step > 0

    @property
    def _finished(self) -> bool:
        return self.step >= self.max_steps or self.stopped_early is not None

    @property
    def _interrupted(self) -> bool:
        """Whether the run must end at once, without further validation."""
        return self.stop is not None and self.stop.early

    def fit(self) -> None:
        """Train until the run ends, with validations, checkpoints and log lines at their intervals.

        A checkpoint is also saved after a validation that is the best so far, if ``best_validation`` is set. After the last
        step the policy is validated and saved, whether this is the last step of the run, the last that
        ``max_time`` allows, or one whose validation triggers early stopping. If the run must end early, such as on a
        signal, it only saves: a validation that is due or was interrupted is made by the resumed run. Raises UserError if
        too many consecutive steps had a non-finite loss or gradient, or the weights are not finite, which are never saved.
        """
        self.run_timer.start_time()
        try:
            self._call_callbacks("on_fit_start")
            if self.validation_due or (self._cfg.val_before_training and self.step == 0):
                self._validate()
                if self._is_best or (self.step and (self._finished or self._interrupted) and not self.validation_due):
                    self._save()  # replaces the checkpoint that was saved with the validation still due
            for started, batch in self._remaining_batches():
                self.optimizer.zero_grad()
                self.model.zero_grad()
                model_state = self.model.state_dict()
                loss, metrics = self.model.get_loss_and_metrics(batch, forward_only=False)
                step_values = self._optimizer_step(loss, model_state)
                self.step += 1
                self._report_step(metrics, step_values, started=started)
                is_last = self._must_stop() or self._finished
                if self._is_due(self.val_interval) or self._finished or (is_last and not self._interrupted):
                    self._validate()
                    is_last = is_last or self._interrupted or self._finished  # interrupted, or early stopping
                if is_last and not self.ended_early:  # a resumed run continues the unfinished log line
                    self._log()
                if is_last or self._is_best or self._is_due(self.save_interval):
                    self._save()
                if is_last:
                    break
        except BaseException as error:
            self._call_callbacks("on_exception", error)
            raise
        # The checkpoint first: it must be complete even if another callback, such as that of the samples, fails.
        for callback in sorted(self.callbacks, key=lambda each: not isinstance(each, CheckpointCallback)):
            callback.on_fit_end(self)

    def _remaining_batches(self) -> Iterator[tuple[float, Any]]:
        """Yield (time at which loading began, augmented batch) for each remaining step, over all epochs."""
        first_step = self.step
        while not self._finished and not self._interrupted:
            self._call_callbacks("on_train_epoch_start")
            self.timers.report_and_reset()  # the time of these callbacks is not part of a step
            if self.step > first_step and self._must_stop():
                self._end_before_epoch()
                return
            self._set_position()
            remaining = self.steps_per_epoch - self.step % self.steps_per_epoch
            started = time.perf_counter()
            for batch in islice(self.augment_dataloader(self.train_dataloader), remaining):
                yield started, batch
                started = time.perf_counter()

    def _end_before_epoch(self) -> None:
        """End a run that must stop before the first step of an epoch: do what its last step has left to do."""
        if not self._interrupted and not self._is_due(self.val_interval):
            self._validate()
        if not self.ended_early:
            self._log()
        if not self._interrupted or not (self._is_best or self._is_due(self.save_interval)):
            self._save()

    def _optimizer_step(self, loss: float, model_state: Mapping[str, Any]) -> dict[str, float]:
        """Apply the gradient, or skip the step on all ranks if loss or gradient are not finite; return values to log.

        ``model_state``, the state of the model before the step, is restored if the step is skipped.
        """
        updated, grad_norm = False, None
        with self.timers.phase("optimizer"):
            self.scheduler.step(1)  # before the optimizer, so that the first warm-up step has a learning rate above 0
            ranks = self.model.ranks_not_finite()
            if math.isfinite(loss) and not ranks:
                updated, grad_norm, _ = self.optimizer.step()
        step_values = {"lr": self.optimizer.param_groups[0]["lr"]}
        if updated:
            self.skipped.applied()
            if grad_norm is not None:  # the optimizer may not compute the norm if it does not clip
                step_values["grad_norm"] = float(grad_norm)
        else:
            if not math.isfinite(loss):
                reason = f"the loss is {loss}"
            else:
                reason = "the gradient is not finite" if ranks else f"the gradient norm is {grad_norm}"
            self.model.load_state_dict(model_state)
            self._set_position()  # to the current batch; does not affect the running iteration
            examples = next(iter(self.train_dataloader.batch_sampler))
            self.skipped.skip(reason, step=self.step + 1, ranks=ranks, examples=examples)
        return step_values | {"skipped_steps": self.skipped.total}

    def _report_step(self, metrics: Metrics, step_values: Mapping[str, float], *, started: float) -> None:
        values = {**metrics, **step_values}
        self.monitored = {}  # a checkpoint is ranked by a validation of its own weights only
        self._monitor("train", values)
        report = {f"train/{name}": value for name, value in values.items()}
        epoch = (self.step - 1) // self.steps_per_epoch  # of this step, the last of an epoch too
        report |= {"train/epoch": epoch, "train/consumed_samples": self.consumed_samples}
        report |= {f"timing/{name}": value for name, value in self.timers.report_and_reset().items()}
        seconds = time.perf_counter() - started  # report_and_reset() has synchronised with the device
        event = Event(step=self.step, metrics=metrics, seconds=seconds, report=report | {"timing/step_time": seconds})
        self._call_callbacks("on_train_step_end", event)
        self.step_log.add(event)
        if self._is_due(self._cfg.log_every_n_steps) or self.step >= self.max_steps:
            self._log()

    def _log(self) -> None:
        if (line := self.step_log.take()) is not None:
            self._call_callbacks("on_log", line)

    def _validate(self) -> None:
        """Validate now, or leave it to the resumed run if the run must end early."""
        if not self.val_sets:
            return
        self.validation_due = True
        if self._interrupted:
            return
        with self.timers.phase("validation"):
            parts, batches = [], sum(each.batches for each in self.val_sets)
            for part in self._validation_batches():
                parts.append(part)
                if self._must_stop() and self._interrupted and len(parts) < batches:
                    return
        metrics = metrics_by_set(parts)
        self.validation_due = False
        seconds = self.timers.report_and_reset()["validation"]  # phases inside a validation are not part of a step
        self._monitor("val", metrics)
        for each in (self.best_validation, self.early_stopping):
            if each is not None and self.step:  # the initial model is not a result of training
                each.update(metrics, step=self.step)
        report = {f"val/{name}": value for name, value in metrics.items()} | {"timing/validation": seconds}
        event = Event(step=self.step, metrics=metrics, seconds=seconds, report=report)
        self._call_callbacks("on_validation_end", event)

    def _save(self) -> None:
        if not self.model.has_finite_weights():
            text = f"the weights are not finite after step {self.step}; no checkpoint is written"
            raise UserError(f"{text}{self.skipped.advice}")
        report: dict[str, float] = {}
        self._call_callbacks("on_save", report)

    def run_validation(self) -> tuple[float, dict[str, float]]:
        """Return loss and metrics over all validation examples, with equal weight for each example.

        Named validation sets have separate metrics, called NAME_METRIC; the loss is over the examples of all sets.
        Raises ValueError if there are no validation examples.
        """
        if not self.val_sets:
            raise ValueError(
                "validation must have at least one batch, got none; set val_dataloader or raise limit_val_batches"
            )
        parts = list(self._validation_batches())
        loss = Metrics.total([metrics for _, metrics in parts])["loss"]
        return loss, dict(metrics_by_set(parts))

    @torch.no_grad()
    def _validation_batches(self) -> Iterator[tuple[str, Metrics]]:
        for each in self.val_sets:
            for batch in islice(self.augment_dataloader(each.loader), each.batches):
                yield each.name, self.model.get_loss_and_metrics(batch, forward_only=True)[1]

    def augment_dataloader(self, dataloader: Iterable[Any]) -> Iterator[Any]:
        """Yield collated batches with the reference log-probs of both answers added if the loss uses a reference."""
        with self.batches(dataloader) as batches:
            for batch in batches:
                if self.model.uses_reference:
                    chosen, rejected = self.model.get_ref_policy_logprobs(batch).tensor_split(2)
                    batch = {**batch, "ref_policy_log_probs_chosen": chosen, "ref_policy_log_probs_rejected": rejected}
                batches.begin_next()
                yield batch

    def batches(self, dataloader: Iterable[Any]) -> Prefetching[Any]:
        """Return the collated batches of ``dataloader``; the time spent waiting for each counts as the phase "data"."""
        items = map(self.collate_fn, dataloader)
        return Prefetching(items=items, waiting=lambda: self.timers.phase("data"), in_thread=self.prefetch)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the run as integers, and the state of log, loss, best validation and early stopping."""
        unlogged, objective = self.step_log.state_dict(), self.model.state_dict()
        return {
            "step": self.step,
            "epoch": self.epoch,
            "consumed_samples": self.consumed_samples,
            "steps_per_epoch": self.steps_per_epoch,
            "skipped_steps": self.skipped.total,
            "skipped_in_a_row": self.skipped.in_a_row,
            "validation_due": int(self.validation_due),
            **({"unlogged": unlogged} if unlogged else {}),
            **({"objective": objective} if objective else {}),
            **({} if self.best_validation is None else {"best_validation": self.best_validation.state_dict()}),
            **({} if self.early_stopping is None else {"early_stopping": self.early_stopping.state_dict()}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`.

        Raises ValueError if the state is from a run with another global batch size or another number of steps per epoch, so
        that examples would be used twice or never.
        """
        step, consumed = int(state["step"]), int(state["consumed_samples"])
        if consumed != step * self._cfg.global_batch_size:
            raise ValueError(
                f"global_batch_size must stay {consumed // max(step, 1)} in a resumed run, got "
                f"{self._cfg.global_batch_size}; start a new run in another folder"
            )
        length = int(state.get("steps_per_epoch", self.steps_per_epoch))
        if length != self.steps_per_epoch:
            raise ValueError(
                f"the number of steps per epoch must stay {length} in a resumed run, got {self.steps_per_epoch}; use the "
                "same training data and limit_train_batches, or start a new run in another folder"
            )
        self.step = step
        self.skipped.total = int(state.get("skipped_steps", 0))
        self.skipped.in_a_row = int(state.get("skipped_in_a_row", 0))
        self.validation_due = bool(state.get("validation_due", 0))
        self.step_log.load_state_dict(state.get("unlogged", {}))
        if "objective" in state:
            self.model.load_state_dict(state["objective"])
        if self.best_validation is not None:
            self.best_validation.load_state_dict(state.get("best_validation", {}))
        if self.early_stopping is not None:
            self.early_stopping.load_state_dict(state.get("early_stopping", {}))

    def _set_position(self) -> None:
        done = self.step % self.steps_per_epoch
        self.train_dataloader.batch_sampler.set_position(self.epoch, done * self._cfg.global_batch_size)

    def _is_due(self, interval: int) -> bool:
        return interval > 0 and self.step % interval == 0

    def _must_stop(self) -> bool:
        """Return whether the run must stop now, as agreed by all ranks; collective. An interruption is never revoked."""
        if not self._interrupted:
            self.stop = self.run_timer.stop_reason() or self.stop
        return self.stop is not None

    def _monitor(self, prefix: str, values: Mapping[str, float]) -> None:
        """Update the metrics that rank a checkpoint of this step; non-finite values, as in a skipped step, are left out."""
        self.monitored |= {f"{prefix}_{name}": value for name, value in values.items() if math.isfinite(value)}

    def _call_callbacks(self, hook: str, *arguments: object) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, *arguments)
