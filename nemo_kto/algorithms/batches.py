"""Which batches a run will use, before it uses them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from nemo_kto.algorithms.dpo import TrainerConfig, limited


def batches_of_run(cfg: TrainerConfig, train_dataloader: Any, val_dataloader: Any | None) -> Iterator[Any]:
    """What the loaders will yield during a whole run from its first step on: every epoch, then the validation rows once.

    Args:
        cfg: how long the run is.
        train_dataloader: as the trainer takes it; its position is left anywhere.
        val_dataloader: likewise; None for no validation.
    """
    batches = len(train_dataloader.batch_sampler)
    steps, left = cfg.steps_per_epoch(batches), cfg.total_steps(batches)
    epoch = 0
    while left > 0:
        train_dataloader.batch_sampler.set_position(epoch, 0)
        yield from islice(train_dataloader, min(steps, left))
        left -= steps
        epoch += 1
    if val_dataloader is not None:
        yield from islice(val_dataloader, limited(len(val_dataloader.batch_sampler), cfg.limit_val_batches))


def number_of_batches(cfg: TrainerConfig, train_dataloader: Any, val_dataloader: Any | None) -> int:
    """How many :func:`batches_of_run` yields."""
    training = cfg.total_steps(len(train_dataloader.batch_sampler))
    if val_dataloader is None:
        return training
    return training + limited(len(val_dataloader.batch_sampler), cfg.limit_val_batches)
