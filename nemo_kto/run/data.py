"""Build the datasets and loaders of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core import parallel_state
from transformers import PreTrainedTokenizerBase

from nemo_kto.algorithms.protocols import Loader
from nemo_kto.config.schema import RunConfig
from nemo_kto.data.batches.dataset import Splits
from nemo_kto.data.batches.loader import build_dataloader
from nemo_kto.data.batches.sampler import GlobalBatchSampler
from nemo_kto.data.rows.records import DataError
from nemo_kto.distributed import state
from nemo_kto.run.rows import collate_settings, shares_of, source_settings, too_few_rows
from nemo_kto.telemetry.progress import progress_bar

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Datasets and loaders of a run.

    Attributes:
        train: loader of the training examples.
        validation: loader of each validation set by name, as in ``Splits``.
        splits: the datasets.
        collate_fn: turns each item that a loader yields into a batch.
    """

    train: Loader[Any]
    validation: Mapping[str, Loader[Any]]
    splits: Splits[Any]
    collate_fn: Callable[[Any], Any]


def build_data(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase) -> RunData:
    """Read, tokenise and split the rows, and build their loaders; the tokenised rows are cached.

    Raises:
        DataError: some rows are invalid, or there are too few training rows.
    """
    with state.main_process_first(doing="reading and tokenising the rows"):
        settings = source_settings(cfg, tokenizer) | {
            "progress": partial(progress_bar, shown=state.is_rank_zero()),
            "cache_verified": not state.is_first_of_machine(),  # by the first process of the machine
        }
        splits = cfg.recipe.build_splits(settings, cfg.data_options())
    if splits.train is None:
        raise DataError(f"model.data.data_prefix must give training rows, got none of {cfg.model.data.data_prefix}")
    data_parallel = parallel_state.get_data_parallel_world_size()
    if (wrong := too_few_rows(cfg, len(splits.train), data_parallel=data_parallel)) is not None:
        raise DataError(wrong)
    if state.is_rank_zero():
        _warn(cfg, splits, rows=len(splits.train))
    take, collate_fn = cfg.recipe.collation(collate_settings(cfg, tokenizer), with_kl=cfg.loss.record.needs_z0)
    return RunData(
        train=_loader(cfg, splits.train, take, training=True),
        validation={name: _loader(cfg, each, take, training=False) for name, each in splits.validation.items()},
        splits=splits,
        collate_fn=collate_fn,
    )


def _warn(cfg: RunConfig, splits: Splits[Any], *, rows: int) -> None:
    """Log warnings about the data; ``rows`` is the number of training rows."""
    for warning in splits.warnings:
        logger.warning(warning)
    for name, examples in splits.in_use.items():
        for warning in examples.counts.warnings(name, seq_length=cfg.model.data.seq_length):
            logger.warning(warning)
    batch = cfg.model.global_batch_size
    if left_out := rows % batch:
        text = f"train: each epoch leaves out {left_out} of {rows} rows, others each time, which fill no global batch"
        logger.warning(f"{text} (model.global_batch_size={batch})")


def _loader(cfg: RunConfig, examples: Any, take: Callable[..., Any], *, training: bool) -> Loader[Any]:
    sampler = GlobalBatchSampler(
        num_examples=len(examples),
        global_batch_size=cfg.model.global_batch_size,
        seed=cfg.model.seed,
        shuffle=training,
        drop_last=training,
        needs_kl_examples=cfg.loss.record.needs_z0,
    )
    loader: Any = build_dataloader(  # torch's type of batch_sampler lacks set_position
        dataset=examples,
        sampler=sampler,
        rank=parallel_state.get_data_parallel_rank(),
        size=parallel_state.get_data_parallel_world_size(),
        take=take,
        shares=shares_of(cfg, training=training),
        num_workers=cfg.model.data.num_workers,
    )
    return loader
