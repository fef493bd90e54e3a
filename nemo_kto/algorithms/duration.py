"""Length of a run: steps, intervals, early stopping and skipped steps; the batches for training and validation."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import islice
from typing import Any, TypeVar

from nemo_kto.algorithms.protocols import Loader
from nemo_kto.data.rows.data_sources import UNNAMED
from nemo_kto.errors import UserError

logger = logging.getLogger(__name__)

_MAX_NAMED = 8  # maximum number of rows, and of ranks, in a message
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
        gradients (None: it does not clip). ``global_batch_size`` is a default for the section. Raises ValueError if a name
        is unknown or missing, or ``gradient_clip_val`` differs from ``clip_grad``.
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


@dataclass(kw_only=True, eq=False)
class BestValidation:
    """The best value of a validation metric so far, on which all ranks agree."""

    monitor: str  # validation metric, as val_NAME
    mode: str  # "min" or "max": whether smaller or larger values are better
    min_delta: float = 0.0  # a change counts as an improvement only if it is larger than this
    reduce_max: Callable[[int], int] | None = None  # maximum over all ranks, so that they agree; None for a single rank

    def __post_init__(self) -> None:
        self.best: float | None = None
        self.best_step = 0
        self.waited = 0  # validations since the best one
        self.is_finite = True

    def update(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Evaluate a validation after ``step``, unless it lacks the metric. Collective if ``reduce_max`` is set."""
        value = metrics.get(self.monitor.removeprefix("val_"))
        if value is None:  # such as the AUC of a single class
            return
        improved = True
        if self.best is not None:
            gain = self.best - value if self.mode == "min" else value - self.best
            improved = gain > self.min_delta
        status = 2 if not math.isfinite(value) else int(not improved)
        if self.reduce_max is not None:
            status = self.reduce_max(status)
        self.is_finite = status < 2
        if status == 0:
            self.best, self.best_step, self.waited = value, step, 0
        else:
            self.waited += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run."""
        return {name: getattr(self, name) for name in ("monitor", "mode", "best", "best_step", "waited", "is_finite")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`; a state of another metric or mode is ignored."""
        if (state.get("monitor"), state.get("mode")) == (self.monitor, self.mode):
            self.best, self.best_step = state["best"], state["best_step"]
            self.waited, self.is_finite = state["waited"], state["is_finite"]


@dataclass(kw_only=True, eq=False)
class EarlyStopping(BestValidation):
    """Counter of validations without improvement, as in Lightning's EarlyStopping; a non-finite value also ends the run."""

    patience: int  # number of consecutive validations without improvement that ends the run

    def update(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Evaluate a validation after ``step``; UserError if it lacks the metric. Collective if ``reduce_max`` is set."""
        if self.monitor.removeprefix("val_") not in metrics:
            raise UserError(
                "exp_manager.checkpoint_callback_params.monitor must be a validation metric for early stopping, got "
                f"{self.monitor}; choose one of {', '.join(f'val_{name}' for name in metrics)}"
            )
        super().update(metrics, step=step)

    @property
    def reason(self) -> str | None:
        """Reason for ending the run, as text; None if it continues."""
        if not self.is_finite:
            return f"{self.monitor} is not finite"
        if self.best is None or self.waited < self.patience:
            return None
        more = f" by more than {self.min_delta:g}" if self.min_delta else ""
        last = "validation" if self.waited == 1 else f"{self.waited} validations"
        best = f"it was {self.best:.4f} at step {self.best_step}"
        return f"{self.monitor} has not improved{more} in the last {last}; {best}"


@dataclass(kw_only=True, eq=False)
class SkippedSteps:
    """Counter of skipped steps, which reports each of them and ends the run after too many consecutive ones."""

    max_in_a_row: int = 1  # number of consecutive skipped steps that ends the run
    name_rows: Callable[[Sequence[int]], Sequence[str]] | None = None  # sources of examples by index: "rows.jsonl:3"
    last_checkpoint: Callable[[], str] | None = None  # describes the newest complete checkpoint; all ranks call it
    logs: bool = True  # whether this rank logs skipped steps

    def __post_init__(self) -> None:
        self.total = 0
        self.in_a_row = 0

    def applied(self) -> None:
        self.in_a_row = 0

    def skip(self, reason: str, *, step: int, ranks: Sequence[int], examples: Sequence[int]) -> None:
        """Record a skipped step, counted from 1, with a reason such as "the loss is nan".

        ``ranks`` are those whose own values were not finite, empty if only the values reduced over all ranks are not;
        ``examples`` are the indices of the examples of the global batch. Raises UserError, which names this step, if too
        many consecutive steps were skipped.
        """
        self.total += 1
        self.in_a_row += 1
        text = f"step {step}: {reason}"
        if ranks:
            text += f" on {_some(ranks, 'rank')}"
        if self.name_rows is not None:
            text += f"; rows of this global batch: {_some(self.name_rows(examples))}"
        if self.in_a_row < self.max_in_a_row:
            if self.logs:
                logger.warning(f"{text}; step skipped, {self.in_a_row} in a row")
            return
        skipped = "1 step" if self.in_a_row == 1 else f"{self.in_a_row} steps in a row"
        raise UserError(f"{text}; {skipped} skipped (trainer.max_skipped_steps={self.max_in_a_row}){self.advice}")

    @property
    def advice(self) -> str:
        """End of a message about non-finite values: the last good checkpoint and what to do."""
        known = "" if self.last_checkpoint is None else f"; last good checkpoint: {self.last_checkpoint()}"
        return f"{known}; lower model.optim.lr, or check these rows"


def _some(items: Sequence[object], noun: str = "") -> str:
    """Join the first items as text, followed by the number of omitted ones."""
    named = ", ".join(str(item) for item in items[:_MAX_NAMED])
    more = f" and {len(items) - _MAX_NAMED} more" if len(items) > _MAX_NAMED else ""
    return f"{noun}{'s' * (len(items) != 1)} {named}{more}" if noun else f"{named}{more}"
