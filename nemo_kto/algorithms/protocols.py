"""Interfaces of the components of the training loop; objects of megatron-core and torch implement them unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from nemo_kto.losses.metrics import Metrics
from nemo_kto.telemetry.watch import PhaseTimers

if TYPE_CHECKING:
    from torch import Tensor

Batch = TypeVar("Batch", contravariant=True)
Raw = TypeVar("Raw", covariant=True)


class PolicyModel(Protocol[Batch]):
    """Policy with its loss and gradient; results are over the global batch and equal on all ranks.

    ``state_dict`` returns the state that the loss keeps between steps besides the weights, as plain numbers, equal on all
    ranks. ``ranks_not_finite`` returns the ranks whose own part of the loss or gradient of the last step is not finite;
    ``has_finite_weights`` returns whether the weights of all ranks are finite. Both are collective.
    """

    @property
    def uses_reference(self) -> bool: ...
    def get_loss_and_metrics(self, batch: Batch, forward_only: bool) -> tuple[float, Metrics]: ...
    def get_ref_policy_logprobs(self, batch: Batch) -> Tensor: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def zero_grad(self) -> None: ...
    def ranks_not_finite(self) -> list[int]: ...
    def has_finite_weights(self) -> bool: ...


class Optimizer(Protocol):
    """Optimizer of megatron-core; ``step`` returns whether the gradient was applied, its norm and its number of zeros."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    def zero_grad(self) -> None: ...
    def step(self) -> tuple[bool, float | Tensor | None, object]: ...


class Scheduler(Protocol):
    """OptimizerParamScheduler of megatron-core; ``step`` advances it by ``increment`` optimizer steps."""

    def step(self, increment: int) -> None: ...


class Position(Protocol):
    """Sampler of global batches with a settable position, at which the next iteration starts.

    Iterating yields the indices of the examples of each global batch; ``len`` is the number of global batches per epoch.
    """

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[list[int]]: ...
    def set_position(self, epoch: int, consumed_in_epoch: int) -> None: ...


class Loader(Protocol[Raw]):
    """Loader of this rank's part of each global batch of an epoch, starting at the position of ``batch_sampler``."""

    @property
    def batch_sampler(self) -> Position: ...
    def __iter__(self) -> Iterator[Raw]: ...


class MetricsLogger(Protocol):
    """Destination of metrics; the loggers of Lightning implement this interface."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None: ...
    def finalize(self, status: str) -> None: ...


class WrittenCheckpoint(Protocol):
    """Completed checkpoint: its step, the seconds from request to completion, and the seconds that training waited."""

    @property
    def step(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def stall_seconds(self) -> float: ...


class CheckpointWriter(Protocol):
    """Writer of checkpoints, synchronous or asynchronous; all methods are collective.

    ``save`` finishes the previous checkpoint and begins the next, ``poll`` checks whether the current one is complete, and
    ``finish`` waits for it. Each checkpoint is returned once, by the call that finds it complete.
    """

    def save(self, trainer_state: Mapping[str, Any], metrics: Mapping[str, float]) -> WrittenCheckpoint | None: ...
    def poll(self) -> WrittenCheckpoint | None: ...
    def finish(self) -> WrittenCheckpoint | None: ...


class Trainer(Protocol):
    """Interface of the trainer for callbacks."""

    model: PolicyModel[Any]
    step: int  # optimizer steps done so far
    max_steps: int  # optimizer steps of the whole run
    monitored: dict[str, float]  # metrics of the last step and of its validation, as train_NAME and val_NAME
    timers: PhaseTimers

    def state_dict(self) -> dict[str, Any]: ...
