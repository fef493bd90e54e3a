"""What the training loop needs of its parts. megatron-core's and torch's objects have these forms as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch

from nemo_kto.losses.metrics import Metrics
from nemo_kto.telemetry.timers import PhaseTimers

Batch = TypeVar("Batch", contravariant=True)
Raw = TypeVar("Raw", covariant=True)


class PolicyModel(Protocol[Batch]):
    """All results are over the global batch and the same on every rank."""

    @property
    def uses_reference(self) -> bool:
        """Whether the loss needs reference log-probs."""

    def get_loss_and_metrics(self, batch: Batch, forward_only: bool) -> tuple[float, Metrics]:
        """Loss and metrics; gradients too, unless ``forward_only``."""

    def get_ref_policy_logprobs(self, batch: Batch) -> torch.Tensor:
        """Reference log-probs, one of each sequence."""

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""


class Optimizer(Protocol):
    """megatron-core's optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Its groups of parameters, each with its learning rate ``lr``."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def step(self) -> tuple[bool, float | torch.Tensor | None, object]:
        """Clip and apply the gradient: whether it was applied, its norm, and the number of zeros in it."""


class Scheduler(Protocol):
    """megatron-core's OptimizerParamScheduler."""

    def step(self, increment: int) -> None:
        """Advance by so many optimizer steps."""


class Position(Protocol):
    """The order of the global batches of an epoch."""

    def __len__(self) -> int:
        """Batches of an epoch."""

    def set_position(self, epoch: int, consumed_in_epoch: int) -> None:
        """Where the next iteration starts."""


class Loader(Protocol[Raw]):
    """This rank's share of every global batch of an epoch."""

    @property
    def batch_sampler(self) -> Position:
        """The order."""

    def __iter__(self) -> Iterator[Raw]:
        """The batches from the position on."""


class MetricsLogger(Protocol):
    """Where metrics go; Lightning's loggers have this form."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of one step."""

    def finalize(self, status: str) -> None:
        """Flush and close."""


class CheckpointWriter(Protocol):
    """What writes a checkpoint."""

    def save(self, trainer_state: Mapping[str, int], metrics: Mapping[str, float]) -> None:
        """Write one; collective."""


class Trainer(Protocol):
    """What a callback may use of the trainer that calls it.

    Attributes:
        model: the policy.
        step: optimizer steps done so far.
        max_steps: of the whole run.
        monitored: the newest metrics, as val_NAME and train_NAME.
        timers: measure the phases of a step.
    """

    model: PolicyModel[Any]
    step: int
    max_steps: int
    monitored: dict[str, float]
    timers: PhaseTimers

    def state_dict(self) -> dict[str, int]:
        """Where the run stands."""
