"""How long a run is, how often it validates and saves, and which batches it will use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from itertools import islice
from typing import Any, TypeVar

from nemo_kto.algorithms.protocols import Loader

Raw = TypeVar("Raw")


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How long to train and how often to validate and save.

    Attributes:
        max_epochs: passes over the training examples.
        max_steps: optimizer steps after which the run ends; -1 for as many as ``max_epochs`` gives.
        val_check_interval: steps between validations; a float is a fraction of an epoch, 0 is never.
        save_interval: steps between checkpoints; a float is a fraction of an epoch, 0 is only one at the end.
        limit_train_batches: global batches of an epoch to use; a float is a fraction of them.
        limit_val_batches: global batches of each validation set to use, in the same way; 0 switches validation off.
        global_batch_size: examples of one step over all ranks.
        val_before_training: validate before the first step too.
        log_every_n_steps: steps that a line of the log is of.
    """

    max_epochs: int
    max_steps: int
    val_check_interval: int | float
    save_interval: int | float
    limit_train_batches: int | float
    limit_val_batches: int | float
    global_batch_size: int
    val_before_training: bool = False
    log_every_n_steps: int = 1

    @classmethod
    def of(
        cls, section: Mapping[str, Any], *, global_batch_size: int | None = None, clip_grad: float | None = None
    ) -> TrainerConfig:
        """From a mapping such as the section ``trainer.NAME`` of a configuration.

        Args:
            section: names and values of the attributes, and perhaps ``gradient_clip_val``, which is the optimizer's.
            global_batch_size: where ``section`` does not say it.
            clip_grad: norm that the optimizer clips gradients to, if it does.

        Raises:
            ValueError: a name is unknown or missing, or ``gradient_clip_val`` is not what the optimizer clips to.
        """
        asked = section.get("gradient_clip_val", clip_grad)
        if clip_grad is not None and asked != clip_grad:
            raise ValueError(f"gradient_clip_val must be that of the optimizer, which clips, {clip_grad}, got {asked}")
        given = {str(name): value for name, value in section.items() if name != "gradient_clip_val"}
        if global_batch_size is not None:
            given.setdefault("global_batch_size", global_batch_size)
        known = {each.name: each.default is MISSING for each in fields(cls)}
        wrong = [
            *(name for name in given if name not in known),
            *(name for name in known if known[name] and name not in given),
        ]
        if wrong:
            raise ValueError(
                f"cfg must have the keys {', '.join(known)}, got {', '.join(given)}; look at {', '.join(wrong)}"
            )
        return cls(**given)

    def steps_per_epoch(self, batches: int) -> int:
        """Optimizer steps of an epoch of ``batches`` global batches."""
        return limit_batches(batches, self.limit_train_batches)

    def total_steps(self, batches: int) -> int:
        """Optimizer steps of the whole run over ``batches`` global batches an epoch."""
        steps = self.steps_per_epoch(batches) * self.max_epochs
        return steps if self.max_steps < 0 else min(steps, self.max_steps)

    def what_ends(self, batches: int) -> tuple[str, tuple[str, ...]]:
        """What ends a run over ``batches`` global batches an epoch, in words, and the settings to raise for a longer one."""
        epochs = "one epoch" if self.max_epochs == 1 else f"{self.max_epochs} epochs"
        of_epochs = self.steps_per_epoch(batches) * self.max_epochs
        if self.max_steps < 0 or self.max_steps > of_epochs:
            return epochs, ("max_epochs",)
        if self.max_steps == of_epochs:
            return epochs, ("max_epochs", "max_steps")
        return f"max_steps={self.max_steps}", ("max_steps",)


def limit_batches(batches: int, limit: int | float) -> int:
    """How many of ``batches`` a limit lets through: a float is a fraction of them, never less than one unless it is 0."""
    if isinstance(limit, float):
        return min(batches, max(1, fraction_of(batches, limit))) if limit > 0 else 0
    return min(batches, limit)


def interval_steps(interval: int | float, steps_per_epoch: int) -> int:
    """Steps between two events; a float is a fraction of an epoch, never less than one step; 0 is never."""
    if isinstance(interval, float):
        return max(1, fraction_of(steps_per_epoch, interval)) if interval > 0 else 0
    return interval


def fraction_of(total: int, fraction: float) -> int:
    """Rounded down."""
    return int(total * fraction + 1e-9)  # 0.29 of 100 is 28.999999999999996 in floating point


def steps_to_epoch_end(cfg: TrainerConfig, batches: int, *, step: int) -> int:
    """Optimizer steps from ``step`` to the end of its epoch, or of the run, over ``batches`` global batches an epoch."""
    steps = cfg.steps_per_epoch(batches)
    return max(0, min(steps - step % steps, cfg.total_steps(batches) - step))


def batches_to_epoch_end(cfg: TrainerConfig, train: Loader[Raw], *, step: int) -> Iterator[Raw]:
    """What the loader yields from ``step`` to the end of its epoch, or of the run; its position is left anywhere."""
    batches = len(train.batch_sampler)
    epoch, done = divmod(step, cfg.steps_per_epoch(batches))
    train.batch_sampler.set_position(epoch, done * cfg.global_batch_size)
    yield from islice(train, steps_to_epoch_end(cfg, batches, step=step))


def validation_batches(cfg: TrainerConfig, validation: Mapping[str, Loader[Raw]]) -> Iterator[Raw]:
    """What the loaders yield in one validation; ``validation``: name of each set -> its loader."""
    for loader in validation.values():
        yield from islice(loader, limit_batches(len(loader.batch_sampler), cfg.limit_val_batches))


def number_of_validation_batches(cfg: TrainerConfig, validation: Mapping[str, Loader[Raw]]) -> int:
    """How many :func:`validation_batches` yields."""
    return sum(limit_batches(len(loader.batch_sampler), cfg.limit_val_batches) for loader in validation.values())
