"""The training loop, for any preference loss: DPOTrainer."""

from __future__ import annotations

import functools
import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import torch

from nemo_kto.algorithms.callbacks import Callback, CheckpointCallback, Event, LoggerCallback
from nemo_kto.algorithms.duration import TrainerConfig, interval_steps
from nemo_kto.algorithms.early_stopping import EarlyStopping
from nemo_kto.algorithms.protocols import CheckpointWriter, Loader, MetricsLogger, Optimizer, PolicyModel, Scheduler
from nemo_kto.algorithms.skipping import SkippedSteps
from nemo_kto.algorithms.step_log import StepLog
from nemo_kto.algorithms.validation import ValidationLoaders, metrics_by_set, validation_sets
from nemo_kto.data.batches.collate import DPOBatch, dpo_custom_collate
from nemo_kto.errors import UserError
from nemo_kto.losses.metrics import Metrics
from nemo_kto.telemetry.timers import PhaseTimers, RunTimer, StopReason

__all__ = ["DPOTrainer", "TrainerConfig", "dpo_custom_collate"]

Item = TypeVar("Item")


@dataclass(kw_only=True, eq=False)
class DPOTrainer:
    """Fits a policy to preferences: steps, validation, checkpoints, timers. Knows nothing of any one loss.

    Attributes:
        cfg: how long to train and how often to validate and save; or a mapping of the same, such as the section
            ``trainer.NAME`` of a configuration, see :meth:`TrainerConfig.of`.
        model: the policy.
        optimizer: megatron-core's; it clips the gradient itself.
        scheduler: megatron-core's OptimizerParamScheduler.
        train_dataloader: yields global batches; its ``batch_sampler`` has a length (batches of an epoch) and
            ``set_position(epoch, consumed_in_epoch)``.
        val_dataloader: yields the validation batches, the incomplete last one too; or a mapping from the names of several
            validation sets to such loaders, each of which is validated by itself; None for no validation.
        test_dataloader: kept for the caller; may be None.
        collate_fn: applied to what the loaders yield.
        logger: gets every report.
        ckpt_callback: writes the checkpoints.
        run_timer: says when the run must stop before its last step.
        timers: measure the phases of a step; share them with the model.
        callbacks: called before checkpoints and the logger, see ``algorithms.callbacks``.
        skipped: decides about steps whose numbers are not finite; by default the first one ends the run.
        early_stopping: decides after each validation whether the run ends with it; None for never.

    Raises:
        ValueError: there is no step to take, or ``cfg`` is a mapping that is not right.
    """

    cfg: TrainerConfig | Mapping[str, Any]
    model: PolicyModel[Any]
    optimizer: Optimizer
    scheduler: Scheduler
    train_dataloader: Loader[Any]
    val_dataloader: ValidationLoaders
    test_dataloader: Loader[Any] | None
    collate_fn: Callable[[Any], Any]
    logger: MetricsLogger
    ckpt_callback: CheckpointWriter
    run_timer: RunTimer
    timers: PhaseTimers = field(default_factory=PhaseTimers)
    callbacks: Sequence[Callback] = ()
    skipped: SkippedSteps = field(default_factory=SkippedSteps)
    early_stopping: EarlyStopping | None = None

    def __post_init__(self) -> None:
        checkpoints = CheckpointCallback(writer=self.ckpt_callback, logger=self.logger)
        self.callbacks = [*self.callbacks, checkpoints, LoggerCallback(logger=self.logger)]
        self._cfg = self._read_cfg()
        self.step = 0
        self.step_log = StepLog()
        self.validation_due = False  # it was due at the present step, and a stop left it out
        self.stop: StopReason | None = None
        self.monitored: dict[str, float] = {}
        self._set_lengths(len(self.train_dataloader.batch_sampler))

    def _read_cfg(self) -> TrainerConfig:
        if isinstance(self.cfg, TrainerConfig):
            return self.cfg
        batch_size = getattr(self.train_dataloader.batch_sampler, "global_batch_size", None)
        clips = getattr(getattr(self.optimizer, "config", None), "clip_grad", None)
        return TrainerConfig.of(self.cfg, global_batch_size=batch_size, clip_grad=clips)

    def _set_lengths(self, batches: int) -> None:
        self.steps_per_epoch = self._cfg.steps_per_epoch(batches)
        self.max_steps = self._cfg.total_steps(batches)
        if self.max_steps < 1:
            raise UserError(
                f"the run must have at least one step, got {self.max_steps}; "
                "raise max_epochs, max_steps or limit_train_batches"
            )
        self.val_interval = interval_steps(self._cfg.val_check_interval, self.steps_per_epoch)
        self.save_interval = interval_steps(self._cfg.save_interval, self.steps_per_epoch)
        self.val_sets = validation_sets(self.val_dataloader, limit=self._cfg.limit_val_batches)

    @property
    def epoch(self) -> int:
        """Complete epochs done."""
        return self.step // self.steps_per_epoch

    @property
    def consumed_samples(self) -> int:
        """Training examples used so far, over all ranks."""
        return self.step * self._cfg.global_batch_size

    @property
    def ended_early(self) -> bool:
        """Whether the run was asked to stop and has work left, which the next start does."""
        return self._ends_early and (not self._is_over or self.validation_due)

    @property
    def stopped_early(self) -> str | None:
        """Why early stopping has ended the run, in words; None if it has not."""
        return None if self.early_stopping is None else self.early_stopping.reason

    @property
    def _is_over(self) -> bool:
        """Whether there is no further step to take."""
        return self.step >= self.max_steps or self.stopped_early is not None

    def fit(self) -> None:
        """Train to the end: every step, and the validations, checkpoints and log lines that are due.

        The last step validates and saves, whether it is the last of the run, the last that ``max_time`` allows, or one
        whose validation stops the run. Where the run must end early it saves only: a validation that is due, or
        interrupted, is made when the run is resumed.

        Raises:
            UserError: too many steps in a row had a loss or gradient that is not finite, or the weights are not finite;
                they are never saved.
        """
        self.run_timer.start_time()
        try:
            self._begin()
            for started, batch in self._remaining_batches():
                self.optimizer.zero_grad()
                self.model.zero_grad()
                before = self.model.state_dict()
                loss, metrics = self.model.get_loss_and_metrics(batch, forward_only=False)
                figures = self._optimizer_step(loss, before)
                self._report_step(metrics, figures, started=started)
                if self._end_step():
                    break
        except BaseException as error:
            for callback in self.callbacks:
                callback.on_exception(self, error)
            raise
        for callback in self.callbacks:
            callback.on_fit_end(self)

    def _begin(self) -> None:
        """What comes before the first step of this start."""
        self._first_step = self.step
        for callback in self.callbacks:
            callback.on_fit_start(self)
        if self.validation_due or (self._cfg.val_before_training and self.step == 0):
            self._validate()
            if self.step and (self._is_over or self._ends_early) and not self.validation_due:
                self._save()  # in the place of the checkpoint without the validation

    def _begin_epoch(self) -> bool:
        """Let the callbacks prepare the epoch; False if the run had to stop meanwhile and ends with the last step."""
        for callback in self.callbacks:
            callback.on_train_epoch_start(self)
        self.timers.report_and_reset()  # what they took is not part of a step
        if self.step == self._first_step or not self._must_stop():
            return True
        if not self._ends_early and not self._due(self.val_interval):
            self._validate()
        if not self.ended_early:
            self._log()
        if not self._ends_early or not self._due(self.save_interval):
            self._save()
        return False

    def _remaining_batches(self) -> Iterator[tuple[float, Any]]:
        """Augmented batches from the present step to the last, epoch after epoch, and when the wait for each began."""
        while not self._is_over and not self._ends_early and self._begin_epoch():
            self._set_position()
            left = self.steps_per_epoch - self.step % self.steps_per_epoch
            started = time.perf_counter()
            for batch in islice(self.augment_dataloader(self.train_dataloader), left):
                yield started, batch
                started = time.perf_counter()

    def _end_step(self) -> bool:
        """Validate and save where that is due; True if the run ends here."""
        done = self._must_stop() or self._is_over
        if self._due(self.val_interval) or self._is_over or (done and not self._ends_early):
            self._validate()
        done = done or self._ends_early or self._is_over  # a validation may have been left, or have stopped the run
        if done and not self.ended_early:  # what ended early is resumed, and its line with it
            self._log()
        if done or self._due(self.save_interval):
            self._save()
        return done

    @property
    def _ends_early(self) -> bool:
        return self.stop is not None and self.stop.early

    def _must_stop(self) -> bool:
        """Ask all ranks whether the run must stop now; collective. Once it ends early, that stays so."""
        if not self._ends_early:
            self.stop = self.run_timer.stop_reason() or self.stop
        return self.stop is not None

    def _optimizer_step(self, loss: float, before: Mapping[str, Any]) -> dict[str, float]:
        """Apply the gradient, or skip it on all ranks; learning rate, norm of the gradient, and steps skipped so far."""
        with self.timers.phase("optimizer"):
            self.scheduler.step(1)  # before the optimizer, so that the first step of a warm-up already learns
            ranks = self.model.ranks_not_finite()
            wrong = f"the loss is {loss}" if not math.isfinite(loss) else "the gradient is not finite" if ranks else None
            updated, grad_norm, _ = (False, None, None) if wrong else self.optimizer.step()
        figures = {"lr": self.optimizer.param_groups[0]["lr"]}
        self._note(None if updated else wrong or f"the gradient norm is {grad_norm}", ranks, before)
        if updated and grad_norm is not None:  # a gradient that is not clipped may have none
            figures["grad_norm"] = float(grad_norm)
        self.step += 1
        return figures | {"skipped_steps": self.skipped.total}

    def _note(self, wrong: str | None, ranks: Sequence[int], before: Mapping[str, Any]) -> None:
        """Count a step that was applied, or skipped because of what is ``wrong`` on these ranks.

        The model's state is then put back to what it was ``before`` the step.
        """
        if wrong is None:
            self.skipped.applied()
            return
        self.model.load_state_dict(before)
        sampler = self.train_dataloader.batch_sampler
        self._set_position()  # of the batch at hand; the iteration that gave it has its own already
        examples = next(iter(sampler))
        self.skipped.skip(wrong, step=self.step + 1, ranks=ranks, examples=examples)

    def run_validation(self) -> tuple[float, dict[str, float]]:
        """Loss and metrics over the validation examples, each weighing the same.

        Validation sets with names have metrics of their own, under NAME_METRIC; the loss is that over the examples of all.

        Raises:
            ValueError: there are no validation examples.
        """
        if not self.val_sets:
            raise ValueError(
                "validation must have at least one batch, got none; give val_dataloader or raise limit_val_batches"
            )
        parts = list(self._validation_batches())
        loss = functools.reduce(operator.add, (metrics for _, metrics in parts))["loss"]
        return loss, dict(metrics_by_set(parts))

    @torch.no_grad()
    def _validation_batches(self) -> Iterator[tuple[str, Metrics]]:
        """Name of the set and metrics of each batch, set after set."""
        for each in self.val_sets:
            for batch in islice(self.augment_dataloader(each.loader), each.batches):
                yield each.name, self.model.get_loss_and_metrics(batch, forward_only=True)[1]

    def augment_dataloader(self, dataloader: Iterable[Any]) -> Iterator[Any]:
        """Collated batches with the reference log-probs attached as ``ref_policy_log_probs_{chosen,rejected}``.

        They are left out where the loss needs none.
        """
        for raw in self.timed(dataloader):
            batch: DPOBatch = self.collate_fn(raw)
            if self.model.uses_reference:
                chosen, rejected = self.model.get_ref_policy_logprobs(batch).cpu().tensor_split(2)
                batch = {**batch, "ref_policy_log_probs_chosen": chosen, "ref_policy_log_probs_rejected": rejected}
            yield batch

    def timed(self, dataloader: Iterable[Item]) -> Iterator[Item]:
        """What ``dataloader`` yields; the wait for it is measured as the phase "data"."""
        iterator = iter(dataloader)
        while True:
            with self.timers.phase("data"):
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, in integers; and the state of the log, the loss and early stopping, where they have any."""
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
            **({} if self.early_stopping is None else {"early_stopping": self.early_stopping.state_dict()}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from :meth:`state_dict`.

        Raises:
            ValueError: the run it comes from had another global batch size or epochs of another length, so that examples
                would be used twice or never.
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
                f"an epoch must stay {length} steps long in a resumed run, got {self.steps_per_epoch}; take the same "
                "training rows and limit_train_batches, or start a new run in another folder"
            )
        self.step = step
        self.skipped.total = int(state.get("skipped_steps", 0))
        self.skipped.in_a_row = int(state.get("skipped_in_a_row", 0))
        self.validation_due = bool(state.get("validation_due", 0))
        self.step_log.load_state_dict(state.get("unlogged", {}))
        if "objective" in state:
            self.model.load_state_dict(state["objective"])
        if self.early_stopping is not None:
            self.early_stopping.load_state_dict(state.get("early_stopping", {}))

    def _set_position(self) -> None:
        """Let the next iteration over the training examples begin with the next step."""
        done = self.step % self.steps_per_epoch
        self.train_dataloader.batch_sampler.set_position(self.epoch, done * self._cfg.global_batch_size)

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.step % interval == 0

    def _report_step(self, metrics: Metrics, figures: Mapping[str, float], *, started: float) -> None:
        self._monitor("train", values := {**metrics, **figures})
        report = {f"train/{name}": value for name, value in values.items()}
        report |= {"train/epoch": self.epoch, "train/consumed_samples": self.consumed_samples}
        report |= {f"timing/{name}": value for name, value in self.timers.report_and_reset().items()}
        seconds = time.perf_counter() - started  # the timers have waited for the device
        event = Event(step=self.step, metrics=metrics, seconds=seconds, report=report | {"timing/step_time": seconds})
        for callback in self.callbacks:
            callback.on_train_step_end(self, event)
        self.step_log.add(event)
        if self._due(self._cfg.log_every_n_steps) or self.step >= self.max_steps:
            self._log()

    def _log(self) -> None:
        """A line of the log, of the steps since the last one."""
        if (line := self.step_log.take()) is not None:
            for callback in self.callbacks:
                callback.on_log(self, line)

    def _validate(self) -> None:
        """Validate now; where the run must end early, leave it to the resumed run."""
        if not self.val_sets:
            return
        self.validation_due = True
        if self._ends_early:
            return
        with self.timers.phase("validation"):
            parts, batches = [], sum(each.batches for each in self.val_sets)
            for part in self._validation_batches():
                parts.append(part)
                if self._must_stop() and self._ends_early and len(parts) < batches:
                    return
        metrics = metrics_by_set(parts)
        self.validation_due = False
        seconds = self.timers.report_and_reset()["validation"]  # the phases within it are not those of a step
        self._monitor("val", metrics)
        if self.early_stopping is not None and self.step:  # the model that training starts from is no result of it
            self.early_stopping.update(metrics, step=self.step)
        report = {f"val/{name}": value for name, value in metrics.items()} | {"timing/validation": seconds}
        event = Event(step=self.step, metrics=metrics, seconds=seconds, report=report)
        for callback in self.callbacks:
            callback.on_validation_end(self, event)

    def _monitor(self, prefix: str, values: Mapping[str, float]) -> None:
        """Note what checkpoints are ranked by; a step that was skipped ranks none."""
        self.monitored |= {f"{prefix}_{name}": value for name, value in values.items() if math.isfinite(value)}

    def _save(self) -> None:
        if not self.model.has_finite_weights():
            text = f"the weights are not finite after step {self.step}, so that no checkpoint of it is written"
            raise UserError(f"{text}{self.skipped.advice}")
        report: dict[str, float] = {}
        for callback in self.callbacks:
            callback.on_save(self, report)
