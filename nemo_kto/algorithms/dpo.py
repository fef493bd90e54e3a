"""The training loop, for any preference loss: DPOTrainer."""

from __future__ import annotations

import functools
import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nemo_kto.telemetry.throughput import ThroughputMeter
from nemo_kto.telemetry.timers import PhaseTimers, RunTimer

Batch = dict[str, torch.Tensor]


class PolicyModel(Protocol):
    """What the trainer asks of a model; all answers are over the global batch and the same on every rank."""

    @property
    def uses_reference(self) -> bool:
        """Whether the loss needs reference log-probs."""

    def get_loss_and_metrics(self, batch: Batch, forward_only: bool) -> tuple[float, Any]:
        """Loss and metrics (a mapping that can be added to another); gradients too, unless ``forward_only``."""

    def get_ref_policy_logprobs(self, batch: Batch) -> torch.Tensor:
        """Reference log-probs, one number a row."""

    def prepare_for_training_step(self) -> None:
        """Forget the gradients of the step before."""

    def finish_training_step(self, step: int) -> None:
        """Whatever is due after optimizer step ``step`` (from 1)."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How long to train and how often to look.

    Attributes:
        max_epochs: passes over the training rows.
        max_steps: optimizer steps after which the run ends; -1 for as many as ``max_epochs`` gives.
        val_check_interval: steps between validations; a float is a fraction of an epoch, 0 is never.
        save_interval: steps between checkpoints, likewise; 0 is one at the end alone.
        limit_train_batches: global batches of an epoch to use; a float is a fraction of them.
        limit_val_batches: global batches of the validation rows to use, likewise; 0 switches validation off.
        global_batch_size: rows of one step over all ranks.
        val_at_start: validate before the first step too.
    """

    max_epochs: int
    max_steps: int
    val_check_interval: int | float
    save_interval: int | float
    limit_train_batches: int | float
    limit_val_batches: int | float
    global_batch_size: int
    val_at_start: bool = False

    def steps_per_epoch(self, batches: int) -> int:
        """Optimizer steps of an epoch of ``batches`` global batches."""
        return limited(batches, self.limit_train_batches)

    def total_steps(self, batches: int) -> int:
        """Optimizer steps of the whole run over ``batches`` global batches an epoch."""
        steps = self.steps_per_epoch(batches) * self.max_epochs
        return steps if self.max_steps < 0 else min(steps, self.max_steps)


def limited(batches: int, limit: int | float) -> int:
    """How many of ``batches`` a limit lets through: a float is a fraction of them, never less than one unless it is 0."""
    if isinstance(limit, float):
        return min(batches, max(1, _part(batches, limit))) if limit > 0 else 0
    return min(batches, limit)


def interval_steps(interval: int | float, steps_per_epoch: int) -> int:
    """Steps between two events; a float is a fraction of an epoch, never less than one step; 0 is never."""
    if isinstance(interval, float):
        return max(1, _part(steps_per_epoch, interval)) if interval > 0 else 0
    return interval


def _part(whole: int, fraction: float) -> int:
    return int(whole * fraction + 1e-9)  # 0.29 of 100 is 28.999999999999996 in floating point


class DPOTrainer:
    """Fits a policy to preferences: steps, validation, checkpoints, timers. Knows nothing of any one loss."""

    def __init__(
        self,
        *,
        cfg: TrainerConfig,
        model: PolicyModel,
        optimizer: Any,
        scheduler: Any,
        train_dataloader: Any,
        val_dataloader: Any,
        test_dataloader: Any,
        collate_fn: Callable[[Any], Batch],
        logger: Any,
        ckpt_callback: Any,
        run_timer: RunTimer,
        timers: PhaseTimers | None = None,
        throughput: ThroughputMeter | None = None,
    ) -> None:
        """
        Args:
            cfg: how long to train and how often to look.
            model: the policy.
            optimizer: megatron-core's; it clips the gradient itself.
            scheduler: megatron-core's OptimizerParamScheduler.
            train_dataloader: yields global batches; its ``batch_sampler`` has a length (batches of an epoch) and
                ``set_position(epoch, consumed_in_epoch)``.
            val_dataloader: yields the validation rows, the incomplete last batch too; None for no validation.
            test_dataloader: kept for the caller; may be None.
            collate_fn: applied to what the loaders yield.
            logger: ``log_metrics(metrics, step)`` and ``finalize(status)``.
            ckpt_callback: ``save(trainer_state, metrics)``.
            run_timer: says when the time of the run is up.
            timers: measure the phases of a step; share them with the model.
            throughput: turns steps into tokens a second.

        Raises:
            ValueError: there is no step to take.
        """
        self.cfg = cfg
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.train_dataloader = train_dataloader
        self.val_dataloader = val_dataloader
        self.test_dataloader = test_dataloader
        self.collate_fn = collate_fn
        self.logger = logger
        self.ckpt_callback = ckpt_callback
        self.run_timer = run_timer
        self.timers = timers if timers is not None else PhaseTimers()
        self.throughput = throughput
        self.step = 0
        self.skipped_steps = 0
        self.monitored: dict[str, float] = {}
        self._step_sums: Mapping[str, float] = {}
        self._set_lengths(len(train_dataloader.batch_sampler))

    def _set_lengths(self, batches: int) -> None:
        self.steps_per_epoch = self.cfg.steps_per_epoch(batches)
        self.max_steps = self.cfg.total_steps(batches)
        if self.max_steps < 1:
            raise ValueError(
                f"the run must have at least one step, got {self.max_steps}; "
                "raise max_epochs, max_steps or limit_train_batches"
            )
        self.val_interval = interval_steps(self.cfg.val_check_interval, self.steps_per_epoch)
        self.save_interval = interval_steps(self.cfg.save_interval, self.steps_per_epoch)
        self.val_batches = 0
        if self.val_dataloader is not None:
            self.val_batches = limited(len(self.val_dataloader.batch_sampler), self.cfg.limit_val_batches)

    @property
    def epoch(self) -> int:
        """Whole epochs done."""
        return self.step // self.steps_per_epoch

    @property
    def consumed_samples(self) -> int:
        """Training rows used so far, over all ranks."""
        return self.step * self.cfg.global_batch_size

    def fit(self) -> None:
        """Train to the end: every step, and the validations, checkpoints and log lines that fall due.

        The last step validates and saves, whether it is the last of the run or the last that ``max_time`` allows.

        Raises:
            FloatingPointError: the loss or the gradient is not finite; nothing of that step is saved.
        """
        self.run_timer.start_time()
        try:
            self._fit()
        except BaseException:
            self.logger.finalize("failed")
            raise
        self.logger.finalize("success")

    def _fit(self) -> None:
        if self.cfg.val_at_start and self.step == 0:
            self._validate()
        done = self.step >= self.max_steps
        while not done:
            started = time.perf_counter()
            for batch in self._rest_of_epoch():
                metrics = self.train_single_step(batch)
                self._log_step(metrics, seconds=time.perf_counter() - started)
                done = self.run_timer.is_finished() or self.step >= self.max_steps
                if done or self._due(self.val_interval):
                    self._validate()
                if done or self._due(self.save_interval):
                    self._save()
                if done:
                    break
                started = time.perf_counter()

    def train_single_step(self, batch: Batch) -> dict[str, float]:
        """One optimizer step on one augmented global batch; returns its metrics."""
        self.optimizer.zero_grad()
        self.model.prepare_for_training_step()
        loss, metrics = self.model.get_loss_and_metrics(batch, forward_only=False)
        self._must_be_finite("loss", loss)
        with self.timers.phase("optimizer"):
            self.scheduler.step(1)  # before the optimizer, so that the first step of a warm-up already learns
            updated, grad_norm, _ = self.optimizer.step()
        report = dict(metrics) | {"lr": self.optimizer.param_groups[0]["lr"]}
        if updated and grad_norm is not None:  # a step that was skipped, or is not clipped, may have none
            self._must_be_finite("gradient norm", float(grad_norm))
            report["grad_norm"] = float(grad_norm)
        self.step += 1
        self.skipped_steps += not updated
        self.model.finish_training_step(self.step)
        self._step_sums = metrics.sums
        return report | {"skipped_steps": self.skipped_steps}

    @torch.no_grad()
    def run_validation(self) -> tuple[float, dict[str, float]]:
        """Loss and metrics over the validation rows, each row weighing the same.

        Raises:
            ValueError: there are no validation rows.
        """
        if not self.val_batches:
            raise ValueError(
                "validation must have at least one batch, got none; give val_dataloader or raise limit_val_batches"
            )
        batches = zip(range(self.val_batches), self.augment_dataloader(self.val_dataloader), strict=False)
        total = functools.reduce(
            operator.add, (self.model.get_loss_and_metrics(batch, forward_only=True)[1] for _, batch in batches)
        )
        return total["loss"], dict(total)

    def augment_dataloader(self, dataloader: Iterable[Any]) -> Iterator[Batch]:
        """Collated batches with the reference log-probs attached as ``ref_policy_log_probs_{chosen,rejected}``.

        They are left out where the loss needs none.
        """
        for raw in self.timed(dataloader):
            batch = self.collate_fn(raw)
            if self.model.uses_reference:
                chosen, rejected = self.model.get_ref_policy_logprobs(batch).cpu().tensor_split(2)
                batch = {**batch, "ref_policy_log_probs_chosen": chosen, "ref_policy_log_probs_rejected": rejected}
            yield batch

    def timed(self, dataloader: Iterable[Any]) -> Iterator[Any]:
        """What ``dataloader`` yields; the wait for it is booked on the phase "data"."""
        iterator = iter(dataloader)
        while True:
            with self.timers.phase("data"):
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Where the run stands, in whole numbers."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "consumed_samples": self.consumed_samples,
            "steps_per_epoch": self.steps_per_epoch,
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from :meth:`state_dict`.

        Raises:
            ValueError: the run it comes from had another global batch size or epochs of another length, so that rows would
                be used twice or never.
        """
        step, consumed = int(state["step"]), int(state["consumed_samples"])
        if consumed != step * self.cfg.global_batch_size:
            raise ValueError(
                f"global_batch_size must stay {consumed // max(step, 1)} in a run that goes on, got "
                f"{self.cfg.global_batch_size}; start a new run in another folder"
            )
        length = int(state.get("steps_per_epoch", self.steps_per_epoch))
        if length != self.steps_per_epoch:
            raise ValueError(
                f"an epoch must stay {length} steps long in a run that goes on, got {self.steps_per_epoch}; take the same "
                "training rows and limit_train_batches, or start a new run in another folder"
            )
        self.step = step
        self.skipped_steps = int(state.get("skipped_steps", 0))

    def _rest_of_epoch(self) -> Iterator[Batch]:
        done = self.step % self.steps_per_epoch
        self.train_dataloader.batch_sampler.set_position(self.epoch, done * self.cfg.global_batch_size)
        batches = self.augment_dataloader(self.train_dataloader)
        return (batch for _, batch in zip(range(self.steps_per_epoch - done), batches, strict=False))

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.step % interval == 0

    def _validate(self) -> None:
        if not self.val_batches:
            return
        with self.timers.phase("validation"):
            _, metrics = self.run_validation()
        seconds = self.timers.report_and_reset()["validation"]  # the phases within it are not those of a step
        self.monitored |= {f"val_{name}": value for name, value in metrics.items()}
        report = {f"val/{name}": value for name, value in metrics.items()}
        self.logger.log_metrics(report | {"timing/validation": seconds}, self.step)

    def _save(self) -> None:
        with self.timers.phase("checkpoint"):
            self.ckpt_callback.save(self.state_dict(), self.monitored)
        self.logger.log_metrics({"timing/checkpoint": self.timers.report_and_reset()["checkpoint"]}, self.step)

    def _log_step(self, metrics: dict[str, float], *, seconds: float) -> None:
        report = {f"train/{name}": value for name, value in metrics.items()}
        report |= {"train/epoch": self.epoch, "train/consumed_samples": self.consumed_samples}
        report |= {f"timing/{name}": value for name, value in self.timers.report_and_reset().items()}
        report["timing/step_time"] = seconds
        if self.throughput is not None:
            tokens, positions = (int(self._step_sums[name]) for name in ("tokens", "positions"))
            self.throughput.update(seconds=seconds, tokens=tokens, positions=positions)
            report |= {f"perf/{name}": value for name, value in self.throughput.report_and_reset().items()}
        self.monitored |= {f"train_{name}": value for name, value in metrics.items()}
        self.logger.log_metrics(report, self.step)

    def _must_be_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the {what} must be finite, got {value} at step {self.step + 1}; lower the learning rate, or look at the "
                "rows of this step; the last checkpoint is untouched"
            )
