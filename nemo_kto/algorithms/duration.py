"""Run length, intervals of validation and checkpoints, and the batches that a run uses for training and validation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from itertools import islice
from typing import Any, TypeVar

from nemo_kto.algorithms.protocols import Loader
from nemo_kto.data.rows.data_sources import UNNAMED

Raw = TypeVar("Raw")
ValidationLoaders = Loader[Any] | Mapping[str, Loader[Any]] | None


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Run length, and intervals of validation, checkpoints and log lines.

    Intervals are in steps, or as floats in epochs; limits are in global batches, or as floats fractions of the data set.
    """

    max_epochs: int
    max_steps: int  # -1 for no limit besides max_epochs
    val_check_interval: int | float  # 0 disables validation
    save_interval: int | float  # 0 saves only at the end
    limit_train_batches: int | float  # per epoch
    limit_val_batches: int | float  # for each validation set; 0 disables validation
    global_batch_size: int  # examples per step over all ranks
    val_before_training: bool = False
    log_every_n_steps: int = 1

    @classmethod
    def of(
        cls, section: Mapping[str, Any], *, global_batch_size: int | None = None, clip_grad: float | None = None
    ) -> TrainerConfig:
        """Create a TrainerConfig from a mapping such as the section ``trainer.NAME`` of a configuration.

        ``gradient_clip_val`` in the section is only compared with ``clip_grad``, the norm to which the optimizer clips
        gradients (None: it does not clip). ``global_batch_size`` is a default for the section.

        Raises:
            ValueError: a name is unknown or missing, or ``gradient_clip_val`` differs from ``clip_grad``.
        """
        clip_val = section.get("gradient_clip_val", clip_grad)
        if clip_grad is not None and clip_val != clip_grad:
            raise ValueError(f"gradient_clip_val must equal clip_grad={clip_grad} of the optimizer, got {clip_val}")
        given = {str(name): value for name, value in section.items() if name != "gradient_clip_val"}
        if global_batch_size is not None:
            given.setdefault("global_batch_size", global_batch_size)
        known = [each.name for each in fields(cls)]
        required = {each.name for each in fields(cls) if each.default is MISSING}
        problems = {"unknown": sorted(given.keys() - set(known)), "missing": sorted(required - given.keys())}
        if any(problems.values()):
            texts = [f"{problem}: {', '.join(names)}" for problem, names in problems.items() if names]
            raise ValueError(f"cfg must have the keys {', '.join(known)}; got {'; '.join(texts)}")
        return cls(**given)

    def steps_per_epoch(self, batches: int) -> int:
        """Return the number of optimizer steps in an epoch of ``batches`` global batches."""
        return limit_batches(batches, self.limit_train_batches)

    def total_steps(self, batches: int) -> int:
        """Return the number of optimizer steps in the whole run, with ``batches`` global batches per epoch."""
        steps = self.steps_per_epoch(batches) * self.max_epochs
        return steps if self.max_steps < 0 else min(steps, self.max_steps)

    def what_ends(self, batches: int) -> tuple[str, tuple[str, ...]]:
        """Return the limit that ends a run, as text, and the names of the settings to raise for a longer run."""
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


@dataclass(frozen=True, kw_only=True, eq=False)
class ValidationSet:
    """A validation set with its own metrics."""

    name: str  # prefix of the names of its metrics; empty for an unnamed set
    loader: Loader[Any]
    batches: int  # number of batches to use per validation


def validation_sets(loaders: ValidationLoaders, *, limit: int | float) -> tuple[ValidationSet, ...]:
    """Return the validation sets in order, without empty ones.

    ``loaders`` is the loader of one unnamed set, a mapping from the names of several sets to their loaders, or None for no
    validation. ``limit`` applies to each set as in :func:`limit_batches`.
    """
    named = loaders if isinstance(loaders, Mapping) else {} if loaders is None else {UNNAMED: loaders}
    sets = (
        ValidationSet(name=name, loader=loader, batches=limit_batches(len(loader.batch_sampler), limit))
        for name, loader in named.items()
    )
    return tuple(each for each in sets if each.batches)


def validation_batches(sets: Iterable[ValidationSet]) -> Iterator[Any]:
    for each in sets:
        yield from islice(each.loader, each.batches)
