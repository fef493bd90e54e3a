"""What the training loop needs of its parts. megatron-core's and torch's objects have these forms as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from nemo_kto.losses.metrics import Metrics
from nemo_kto.telemetry.timers import PhaseTimers

if TYPE_CHECKING:
    from torch import Tensor

Batch = TypeVar("Batch", contravariant=True)
Raw = TypeVar("Raw", covariant=True)


class PolicyModel(Protocol[Batch]):
    """Gives the loss and its gradient. Results are over the global batch and the same on every rank.

    ``state_dict`` is what the loss carries from step to step besides the weights, in plain numbers, the same on every rank.
    ``ranks_not_finite`` are the ranks whose own part of the last step's loss or gradient is not finite, and
    ``has_finite_weights`` says whether those of all ranks are; both are collective.
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
    """megatron-core's optimizer; ``step`` says whether the gradient was applied, its norm, and the number of zeros in it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    def zero_grad(self) -> None: ...
    def step(self) -> tuple[bool, float | Tensor | None, object]: ...


class Scheduler(Protocol):
    """megatron-core's OptimizerParamScheduler; ``step`` advances by so many optimizer steps."""

    def step(self, increment: int) -> None: ...


class Position(Protocol):
    """The order of an epoch's global batches, of which there are ``len``; the next iteration starts at the position.

    It gives the numbers of the examples of each.
    """

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[list[int]]: ...
    def set_position(self, epoch: int, consumed_in_epoch: int) -> None: ...


class Loader(Protocol[Raw]):
    """This rank's share of every global batch of an epoch, from the position of ``batch_sampler`` on."""

    @property
    def batch_sampler(self) -> Position: ...
    def __iter__(self) -> Iterator[Raw]: ...


class MetricsLogger(Protocol):
    """Where metrics go; Lightning's loggers have this form."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None: ...
    def finalize(self, status: str) -> None: ...


class WrittenCheckpoint(Protocol):
    """A checkpoint that is complete: its step, seconds from the request to that, and how many of them training waited."""

    @property
    def step(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def stall_seconds(self) -> float: ...


class CheckpointWriter(Protocol):
    """What writes checkpoints, at once or while training continues; collective. Each is returned once, when it is complete.

    ``save`` finishes the one before and begins the next, ``poll`` looks whether it is complete, ``finish`` waits for it.
    """

    def save(self, trainer_state: Mapping[str, Any], metrics: Mapping[str, float]) -> WrittenCheckpoint | None: ...
    def poll(self) -> WrittenCheckpoint | None: ...
    def finish(self) -> WrittenCheckpoint | None: ...


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

    def state_dict(self) -> dict[str, Any]: ...
