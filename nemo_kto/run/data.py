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
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.config.schema import RunConfig
from nemo_kto.data.batches.dataset import Splits
from nemo_kto.data.batches.loader import GlobalBatchSampler, build_dataloader
from nemo_kto.data.rows.records import DataError
from nemo_kto.distributed import state
from nemo_kto.models.engine.sequences import MicroBatchLimits
from nemo_kto.planner.micro_batches import micro_batch_limits
from nemo_kto.run.rows import collate_settings, shares_of, source_settings
from nemo_kto.run.samples import SamplePrompts, build_prompts
from nemo_kto.telemetry.progress import progress_bar

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Datasets and loaders of a run."""

    train: Loader[Any]
    validation: Mapping[str, Loader[Any]]  # by the name of the set, as in ``Splits``
    splits: Splits[Any]
    collate_fn: Callable[[Any], Any]  # turns each item that a loader yields into a batch
    limits: MicroBatchLimits
    tokenizer: PreTrainedTokenizerBase
    samples: SamplePrompts | None  # None without samples


def build_data(
    run: ResolvedRun, tokenizer: PreTrainedTokenizerBase, *, data_parallel: tuple[int, int] | None = None
) -> RunData:
    """Read, tokenise and split the rows, build their loaders, and read the prompts of the samples; collective.

    The tokenised rows are cached. ``data_parallel``: data-parallel rank and size; None for those of this rank. Raises
    DataError if rows are invalid, or there are too few for training, and UserError if the prompts cannot be used.
    """
    cfg = run.cfg
    with state.main_process_first(doing="reading and tokenising the rows"):
        settings = source_settings(run, tokenizer) | {
            "progress": partial(progress_bar, shown=state.is_rank_zero()),
            "cache_verified": not state.is_first_of_machine(),  # by the first process of the machine
        }
        splits = cfg.recipe.build_splits(settings, cfg.data_options())
    if splits.train is None:
        raise DataError(f"model.data.data_prefix must give training rows, got none of {cfg.model.data.data_prefix}")
    rank, size = data_parallel or (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    if (wrong := too_few_rows(cfg, len(splits.train), data_parallel=size)) is not None:
        raise DataError(wrong)
    if state.is_rank_zero():
        _warn(cfg, splits)
    limits = micro_batch_limits(run)
    take, collate_fn = cfg.recipe.collation(
        collate_settings(cfg, tokenizer, multiple=limits.multiple), with_kl=cfg.loss.record.needs_z0
    )

    def loader(examples: Any, *, training: bool) -> Any:  # torch's type of batch_sampler lacks set_position
        return build_dataloader(
            dataset=examples,
            sampler=GlobalBatchSampler(
                num_examples=len(examples),
                global_batch_size=cfg.model.global_batch_size,
                seed=cfg.model.seed,
                shuffle=training,
                drop_last=training,
                needs_kl_examples=cfg.loss.record.needs_z0,
            ),
            rank=rank,
            size=size,
            take=take,
            shares=shares_of(run, training=training),
            num_workers=cfg.model.data.num_workers,
        )

    return RunData(
        train=loader(splits.train, training=True),
        validation={name: loader(examples, training=False) for name, examples in splits.validation.items()},
        splits=splits,
        collate_fn=collate_fn,
        limits=limits,
        tokenizer=tokenizer,
        samples=build_prompts(run, tokenizer, splits),
    )


def too_few_rows(cfg: RunConfig, rows: int, *, data_parallel: int) -> str | None:
    """Return why ``rows`` training rows are too few for a global batch, with a remedy; None if they suffice."""
    wanted = cfg.model.global_batch_size
    if rows >= wanted:
        return None
    step = (cfg.model.micro_batch_size or 1) * data_parallel
    largest = rows // step * step
    remedy = "train on more rows (model.data.data_prefix)"
    if largest > cfg.loss.record.needs_z0:
        remedy = f"set model.global_batch_size={largest}, or {remedy}"
    return f"model.global_batch_size must be at most the number of training rows, {rows}, got {wanted}; {remedy}"


def _warn(cfg: RunConfig, splits: Splits[Any]) -> None:
    warnings = [*splits.warnings]
    for name, examples in splits.in_use.items():
        warnings += examples.counts.warnings(name, seq_length=cfg.seq_length)
    warnings += cfg.recipe.warnings(cfg.loss, splits.train, lr=cfg.model.optim.lr)
    for warning in warnings:
        logger.warning(warning)
