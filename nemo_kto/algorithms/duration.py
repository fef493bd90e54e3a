"""Run length, intervals of validation and checkpoints, and the batches that a run uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from itertools import islice
from typing import Any, TypeVar

from nemo_kto.algorithms.protocols import Loader

Raw = TypeVar("Raw")


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Run length, and intervals of validation, checkpoints and log lines.

    Attributes:
        max_epochs: passes over the training examples.
        max_steps: optimizer steps after which the run ends; -1 for no limit besides ``max_epochs``.
        val_check_interval: steps between validations; a float is a fraction of an epoch, 0 disables them.
        save_interval: steps between checkpoints; a float is a fraction of an epoch, 0 saves only at the end.
        limit_train_batches: global batches to use per epoch; a float is a fraction of the epoch.
        limit_val_batches: global batches to use of each validation set; a float is a fraction of the set, 0 disables
            validation.
        global_batch_size: examples per step over all ranks.
        val_before_training: also validate before the first step.
        log_every_n_steps: steps per log line.
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
        """Create a TrainerConfig from a mapping such as the section ``trainer.NAME`` of a configuration.

        Args:
            section: values of the attributes by name; may contain ``gradient_clip_val``, which is only compared with
                ``clip_grad``.
            global_batch_size: used if ``section`` does not contain it.
            clip_grad: norm to which the optimizer clips gradients; None if it does not clip.

        Raises:
            ValueError: a name is unknown or missing, or ``gradient_clip_val`` differs from ``clip_grad``.
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
        """Return the number of optimizer steps in an epoch of ``batches`` global batches."""
        return limit_batches(batches, self.limit_train_batches)

    def total_steps(self, batches: int) -> int:
        """Return the number of optimizer steps in the whole run, with ``batches`` global batches per epoch."""
        steps = self.steps_per_epoch(batches) * self.max_epochs
        return steps if self.max_steps < 0 else min(steps, self.max_steps)

    def what_ends(self, batches: int) -> tuple[str, tuple[str, ...]]:
        """Describe the limit that ends a run with ``batches`` global batches per epoch.

        Returns:
            The limit as text, and the names of the settings to raise for a longer run.
        """
        epochs = "one epoch" if self.max_epochs == 1 else f"{self.max_epochs} epochs"
        of_epochs = self.steps_per_epoch(batches) * self.max_epochs
        if self.max_steps < 0 or self.max_steps > of_epochs:
            return epochs, ("max_epochs",)
        if self.max_steps == of_epochs:
            return epochs, ("max_epochs", "max_steps")
        return f"max_steps={self.max_steps}", ("max_steps",)


def limit_batches(batches: int, limit: int | float) -> int:
    """Return the number of ``batches`` within a limit; a float is a fraction, at least one batch unless it is 0."""
    if isinstance(limit, float):
        return min(batches, max(1, fraction_of(batches, limit))) if limit > 0 else 0
    return min(batches, limit)


def interval_steps(interval: int | float, steps_per_epoch: int) -> int:
    """Return an interval in steps; a float is a fraction of an epoch, at least one step; 0 means never."""
    if isinstance(interval, float):
        return max(1, fraction_of(steps_per_epoch, interval)) if interval > 0 else 0
    return interval


def fraction_of(total: int, fraction: float) -> int:
    """Return ``fraction`` of ``total``, rounded down."""
    return int(total * fraction + 1e-9)  # 0.29 of 100 is 28.999999999999996 in floating point


def steps_to_epoch_end(cfg: TrainerConfig, batches: int, *, step: int) -> int:
    """Return the number of steps from ``step`` to the end of its epoch or of the run, with ``batches`` per epoch."""
    steps = cfg.steps_per_epoch(batches)
    return max(0, min(steps - step % steps, cfg.total_steps(batches) - step))


def batches_to_epoch_end(cfg: TrainerConfig, train: Loader[Raw], *, step: int) -> Iterator[Raw]:
    """Yield the items of the loader from ``step`` to the end of its epoch or of the run; the loader's position changes."""
    batches = len(train.batch_sampler)
    epoch, done = divmod(step, cfg.steps_per_epoch(batches))
    train.batch_sampler.set_position(epoch, done * cfg.global_batch_size)
    yield from islice(train, steps_to_epoch_end(cfg, batches, step=step))


def validation_batches(cfg: TrainerConfig, validation: Mapping[str, Loader[Raw]]) -> Iterator[Raw]:
    """Yield the items of one validation; ``validation`` maps the name of each set to its loader."""
    for loader in validation.values():
        yield from islice(loader, limit_batches(len(loader.batch_sampler), cfg.limit_val_batches))


def number_of_validation_batches(cfg: TrainerConfig, validation: Mapping[str, Loader[Raw]]) -> int:
    """Return the number of items that :func:`validation_batches` yields."""
    return sum(limit_batches(len(loader.batch_sampler), cfg.limit_val_batches) for loader in validation.values())
