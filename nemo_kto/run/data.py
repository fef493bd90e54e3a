"""Data of a run: tokenizer, settings of rows and batches, datasets and loaders.

megatron-core is not imported: `nemo-kto data preview` and `nemo-kto check` use these functions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_kto.algorithms.protocols import Loader
from nemo_kto.config.learning_rates import lr_warning
from nemo_kto.config.resolved import ModelFiles, ResolvedRun
from nemo_kto.config.schema import RunConfig
from nemo_kto.data.batches.dataset import SplitCounts
from nemo_kto.data.batches.loader import GlobalBatchSampler, SequenceCost, build_dataloader, by_cost, by_prompt, every_nth
from nemo_kto.data.batches.splits import Splits
from nemo_kto.data.rows.data_sources import validation_split
from nemo_kto.data.rows.records import DataError
from nemo_kto.data.tokens.chat_template import load_tokenizer
from nemo_kto.device.precision import PRECISIONS
from nemo_kto.errors import UserError, plural
from nemo_kto.memory.micro_batches import micro_batch_limits, multiple_of
from nemo_kto.models.flops import ModelFlops, Passes
from nemo_kto.records.run_record import first_date
from nemo_kto.telemetry.display import progress_bar
from nemo_kto.utils.intervals import MIN_VALIDATION_ROWS

logger = logging.getLogger(__name__)

# Keys of model.data that are arguments of ``build_splits`` under the same names.
_SOURCE_KEYS = (
    "data_prefix", "splits_string", "fields", "labels", "json_columns", "drop", "truncation_mode", "apply_chat_template",
    "cache_shared", "preprocess_workers",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Datasets and loaders of a run."""

    train: Loader[Any]
    validation: Mapping[str, Loader[Any]]  # by the name of the set, as in ``Splits``
    splits: Splits[Any]
    tokenizer: PreTrainedTokenizerBase
    date: datetime  # for chat templates that write one


def model_tokenizer(files: ModelFiles) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, and check that the model's embedding has a row for each of its tokens."""
    return load_tokenizer(files.hf_folder, vocab_size=model_vocab_size(files))


def model_vocab_size(files: ModelFiles) -> int | None:
    """Return the number of rows of the model's embedding.

    None if the folder contains no readable model configuration, because a tokenizer is enough to count tokens.
    """
    try:
        return files.architecture.vocab_size
    except UserError:
        return None


def template_date(run: ResolvedRun) -> datetime:
    """Return the date for chat templates that write one: that of the run's first start, so that its rows stay the same."""
    return first_date(run.folder) if run.cfg.exp_manager.resume_if_exists else datetime.now()


def source_settings(run: ResolvedRun, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the arguments of ``data.batches.splits.build_splits``, except for the kind of the examples."""
    cfg, data = run.cfg, run.cfg.model.data
    return {
        **{key: getattr(data, key) for key in _SOURCE_KEYS},
        "min_validation_rows": 2 if cfg.loss.definition.needs_z0 else 1,  # KL examples are formed within a batch
        "tokenizer": tokenizer,
        "vocab_size": model_vocab_size(run.files),
        "seq_length": cfg.seq_length,
        "cache_dir": Path(data.cache_dir),
        "seed": cfg.model.seed,
    }


def read_splits(
    run: ResolvedRun, tokenizer: PreTrainedTokenizerBase, *, date: datetime, shows_progress: bool, cache_verified: bool
) -> Splits[Any]:
    """Read, tokenise and split the rows; the tokenised rows are cached.

    Raises DataError if rows are invalid, or there are none for training.
    """
    cfg = run.cfg
    settings = source_settings(run, tokenizer) | {
        "progress": partial(progress_bar, shown=shows_progress),
        "date": date,
        "cache_verified": cache_verified,
    }
    splits: Splits[Any] = cfg.recipe.build_splits(settings, cfg.data_options())
    return splits


def check_number_of_rows(cfg: RunConfig, rows: int, *, data_parallel: int) -> None:
    """Raise DataError, with a remedy, if there are too few training rows for a global batch."""
    wanted = cfg.model.global_batch_size
    if not rows:
        raise DataError(f"model.data.data_prefix must give training rows, got none of {cfg.model.data.data_prefix}")
    if rows >= wanted:
        return
    step = (cfg.model.micro_batch_size or 1) * data_parallel
    largest = rows // step * step
    remedy = "train on more rows (model.data.data_prefix)"
    if largest > cfg.loss.definition.needs_z0:
        remedy = f"set model.global_batch_size={largest}, or {remedy}"
    raise DataError(f"model.global_batch_size must be at most the number of training rows, {rows}, got {wanted}; {remedy}")


def check_validation_rows(cfg: RunConfig, data: RunData) -> None:
    """Raise UserError if something that needs validation rows is configured, such as early stopping, and there are none."""
    samples = cfg.exp_manager.samples
    needs = {
        "export.which": (cfg.export.enabled and cfg.export.which == "best", "best", "last"),
        "exp_manager.create_early_stopping_callback": (cfg.exp_manager.create_early_stopping_callback, "true", "false"),
        "exp_manager.samples.count": (bool(samples.count), samples.count, 0),
        "exp_manager.samples.prompts": (samples.prompts is not None, samples.prompts, "null"),
    }
    for key, (is_needed, value, without) in needs.items():
        if is_needed and not data.validation:
            text = f"must leave rows for validation with {key}={value}, got none from {cfg.model.data.splits_string}"
            raise UserError(f'model.data.splits_string {text}; e.g. "90,10", or set {key}={without}')


def log_warnings(cfg: RunConfig, splits: Splits[Any]) -> None:
    """Log the warnings about the learning rate, the rows of each split, and the loss with these rows."""
    of_sets = [examples.counts.warnings(name, seq_length=cfg.seq_length) for name, examples in splits.in_use.items()]
    of_loss = cfg.loss.warnings(splits.train, lr=cfg.model.optim.lr)
    of_lr = filter(None, [lr_warning(cfg.model.optim.lr, cfg.model.peft.peft_scheme)])
    small = {name: len(examples) for name, examples in splits.validation.items() if len(examples) < MIN_VALIDATION_ROWS}
    of_size = [
        f"{validation_split(name)}: {plural(count, 'row')} are too few to judge a model or choose a checkpoint by, at least "
        f"{MIN_VALIDATION_ROWS} are needed; raise the second number of model.data.splits_string, or add rows"
        for name, count in small.items()
    ]
    for warning in chain(of_lr, splits.warnings, of_size, *of_sets, of_loss):
        logger.warning(warning)


def build_data(
    run: ResolvedRun, splits: Splits[Any], *, tokenizer: PreTrainedTokenizerBase, date: datetime, rank: int, size: int
) -> RunData:
    """Build the loaders of the splits for a data-parallel ``rank`` of ``size`` ranks."""
    cfg = run.cfg
    options = collate_settings(cfg, tokenizer, multiple=multiple_of(run)) | cfg.loss.collate_options()

    def loader(examples: Any, *, training: bool) -> Any:  # torch's type of batch_sampler lacks set_position
        return build_dataloader(
            dataset=examples,
            sampler=GlobalBatchSampler(
                num_examples=len(examples),
                global_batch_size=cfg.model.global_batch_size,
                seed=cfg.model.seed,
                shuffle=training,
                drop_last=training,
                needs_kl_examples=cfg.loss.definition.needs_z0,
            ),
            rank=rank,
            size=size,
            collate=partial(cfg.recipe.collate, **options),
            shares=shares_of(run, training=training),
            num_workers=cfg.model.data.num_workers,
        )

    return RunData(
        train=loader(splits.train, training=True),
        validation={name: loader(examples, training=False) for name, examples in splits.validation.items()},
        splits=splits,
        tokenizer=tokenizer,
        date=date,
    )


def collate_settings(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase, *, multiple: int) -> dict[str, Any]:
    """Return the keyword arguments of the collate functions in ``data.batches.collate``."""
    return {"eos_id": tokenizer.eos_token_id, "seq_length": cfg.seq_length, "pad_to_multiple": multiple}


def shares_of(run: ResolvedRun, *, training: bool) -> Callable[..., list[list[int]]]:
    """Return the function that distributes the examples of a global batch over the data-parallel ranks.

    With packed sequences, or with shared prompts, the ranks get about equal cost, otherwise about equal numbers of examples.
    """
    cfg, limits = run.cfg, micro_batch_limits(run)
    if not limits.packed and not limits.share_prompts:
        return every_nth
    flops = ModelFlops.of_model(run.architecture, adapters=run.adapters)

    def cost(passes: Passes) -> SequenceCost:
        return flops.of_passes(passes).of_tokens

    forward, disabled = run.reference_passes
    ahead = int(training and cfg.loss.definition.looks_ahead)
    costs = cfg.recipe.costs(
        cost=cost(Passes(forward + 1 + ahead, disabled, backward=int(training))),
        kl_cost=cost(Passes(forward + 1, disabled)) if cfg.loss.definition.needs_z0 else None,
        reference_cost=cost(Passes(forward, disabled) if PRECISIONS[cfg.trainer.precision] == "32" else Passes()),
        seq_length=cfg.seq_length,
        share_prompts=limits.share_prompts,
    )
    shares = partial(by_cost, costs=costs) if limits.packed else every_nth
    return partial(by_prompt, costs=costs, otherwise=shares) if limits.share_prompts else shares


def split_text(unit: str, counts: SplitCounts) -> str:
    """Describe the rows of a split; ``unit`` is rows or pairs."""
    kinds = ", ".join(f"{count:,} {name}" for name, count in counts.classes.items())
    cut = {"prompts": counts.cut_prompts, "responses": counts.cut_responses}
    truncated = " and ".join(f"{count:,} {what}" for what, count in cut.items() if count)
    rows = f"{counts.rows:,} {unit}" + (f" ({kinds})" if kinds else "")
    return f"{rows}, {counts.tokens:,} tokens, {truncated or 'none'} truncated"
