"""Test doubles for the trainers' loop: a least-squares model whose steps have a closed form and that records its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from nemo_kto.algorithms.callbacks import Callback
from nemo_kto.algorithms.dpo import DPOTrainer, TrainerConfig
from nemo_kto.algorithms.duration import BestValidation, EarlyStopping, SkippedSteps, ValidationLoaders
from nemo_kto.data.batches.loader import GlobalBatchSampler
from nemo_kto.losses.metrics import Metrics
from nemo_kto.telemetry.watch import PhaseTimers, RunTimer

LEARNING_RATE = 0.25


def mean_loss(sums: Mapping[str, float]) -> dict[str, float]:
    return {"loss": sums["loss"] / sums["rows"], "rows": sums["rows"]}


class Mean:
    """Learns the mean of its rows: loss (w - x)^2 / 2 a row, so a step is w - lr (w - mean of the batch)."""

    def __init__(self) -> None:
        self.weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
        self.trained_on: list[list[float]] = []
        self.validated_on: list[list[float]] = []
        self.reference_passes = 0
        self.zeroed = 0
        self.steps = 0  # that were applied
        self.uses_reference = True
        self.graphs_kept = 0
        self.spoil: Callable[[int], float] = lambda step: 0.0

    def get_loss_and_metrics(self, batch: dict[str, torch.Tensor], forward_only: bool) -> tuple[float, Metrics]:
        rows = batch["x"]
        self.graphs_kept += forward_only and torch.is_grad_enabled()
        (self.validated_on if forward_only else self.trained_on).append(rows.tolist())
        losses = (self.weight - rows) ** 2 / 2 + self.spoil(len(self.trained_on))
        self.last_is_finite = bool(losses.isfinite().all())
        if not forward_only:
            self.steps += 1
            losses.mean().backward()
        metrics = Metrics({"loss": float(losses.sum().detach()), "rows": len(rows)}, mean_loss)
        return metrics["loss"], metrics

    def get_ref_policy_logprobs(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.reference_passes += 1
        return torch.arange(2 * len(batch["x"]), dtype=torch.float32)

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.steps = state["steps"]

    def zero_grad(self) -> None:
        self.zeroed += 1

    def ranks_not_finite(self) -> list[int]:
        return [] if self.last_is_finite else [0, 2]

    def has_finite_weights(self) -> bool:
        return bool(self.weight.isfinite())


class Descent:
    """Gradient descent with the answers of megatron-core's optimizers."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.param_groups = [{"lr": 0.0}]
        self.skip: set[int] = set()
        self.calls = 0

    def zero_grad(self) -> None:
        self.weight.grad = None

    def step(self) -> tuple[bool, float | None, int | None]:
        self.calls += 1
        if self.calls in self.skip:
            return False, math.inf, None
        assert self.weight.grad is not None
        norm = float(self.weight.grad.abs())
        with torch.no_grad():
            self.weight -= self.param_groups[0]["lr"] * self.weight.grad
        return True, norm, None


class Schedule:
    """The full learning rate from the first step on; nothing before it."""

    def __init__(self, optimizer: Descent) -> None:
        self.optimizer = optimizer

    def step(self, increment: int) -> None:
        assert increment == 1
        self.optimizer.param_groups[0]["lr"] = LEARNING_RATE


class Complete(NamedTuple):
    """The event of a complete checkpoint."""

    step: int
    seconds: float
    stall_seconds: float


class Notebook:
    """Logger and checkpoint callback in one that records its calls."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.saved: list[tuple[dict[str, int], dict[str, float]]] = []
        self.ended: list[str] = []
        self.unfinished = 0  # the step of the checkpoint that is being written

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.logged.append((step, dict(metrics)))

    def finalize(self, status: str) -> None:
        self.ended.append(status)

    def save(self, trainer_state: Mapping[str, int], metrics: Mapping[str, float]) -> Complete | None:
        earlier = self.finish()
        self.saved.append((dict(trainer_state), dict(metrics)))
        self.unfinished = trainer_state["step"]
        return earlier

    def poll(self) -> Complete | None:
        """A checkpoint takes until the end of the next step."""
        return self.finish()

    def finish(self) -> Complete | None:
        step, self.unfinished = self.unfinished, 0
        return Complete(step, 3.0, 0.25) if step else None

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of one metric."""
        return [(step, metrics[name]) for step, metrics in self.logged if name in metrics]

    def steps_with(self, name: str) -> list[int]:
        return [step for step, _ in self.series(name)]

    @property
    def saved_steps(self) -> list[int]:
        return [trainer_state["step"] for trainer_state, _ in self.saved]


def loader(rows: int, *, batch: int, training: bool, workers: int = 0) -> Any:
    """Rows 0.0, 1.0, ... in global batches."""
    sampler = GlobalBatchSampler(
        num_examples=rows, global_batch_size=batch, seed=5, shuffle=training, drop_last=training, needs_kl_examples=False
    )
    data = torch.arange(rows, dtype=torch.float64)
    return DataLoader(
        data.tolist(),  # type: ignore[arg-type]
        batch_sampler=sampler,
        collate_fn=as_batch,
        num_workers=workers,
        generator=torch.Generator().manual_seed(0),
    )


def validation_loaders(rows: int | Mapping[str, int] | None, *, batch: int) -> ValidationLoaders:
    """Loaders of one set, of several named sets, or of none."""
    if isinstance(rows, Mapping):
        return {name: loader(each, batch=batch, training=False) for name, each in rows.items()}
    return None if rows is None else loader(rows, batch=batch, training=False)


def as_batch(rows: list[float]) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor(rows, dtype=torch.float64)}


class Run:
    """A trainer and all its parts."""

    def __init__(
        self,
        *,
        rows: int = 20,
        batch: int = 2,
        val_rows: int | Mapping[str, int] | None = 5,
        max_time: str | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        workers: int = 0,
        prefetch: bool = False,
        callbacks: Sequence[Callback] = (),
        max_skipped_steps: int = 3,
        early_stopping: EarlyStopping | None = None,
        best_validation: BestValidation | None = None,
        **settings: Any,
    ) -> None:
        self.model = Mean()
        self.optimizer = Descent(self.model.weight)
        self.notes = Notebook()
        defaults: dict[str, Any] = {
            "max_epochs": 1,
            "max_steps": -1,
            "val_check_interval": 0,
            "save_interval": 0,
            "limit_train_batches": 1.0,
            "limit_val_batches": 1.0,
            "global_batch_size": batch,
        }
        self.trainer = DPOTrainer(
            cfg=TrainerConfig(**{**defaults, **settings}),
            model=self.model,
            optimizer=self.optimizer,
            scheduler=Schedule(self.optimizer),
            train_dataloader=loader(rows, batch=batch, training=True, workers=workers),
            val_dataloader=validation_loaders(val_rows, batch=batch),
            test_dataloader=None,
            collate_fn=lambda raw: raw,
            logger=self.notes,
            ckpt_callback=self.notes,
            run_timer=RunTimer(max_time=max_time, clock=clock),
            timers=PhaseTimers(),
            callbacks=callbacks,
            early_stopping=early_stopping,
            best_validation=best_validation,
            prefetch=prefetch,
            skipped=SkippedSteps(
                max_in_a_row=max_skipped_steps,
                name_rows=lambda places: [f"rows.jsonl:{place + 1}" for place in places],
                last_checkpoint=lambda: str(self.notes.saved_steps[-1:]),
            ),
        )

    def fit(self) -> Run:
        self.trainer.fit()
        return self
