"""Data of a run: datasets and loaders, and the prompts of its samples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core import parallel_state
from transformers import PreTrainedTokenizerBase

from nemo_kto.algorithms.protocols import Loader
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.config.schema import RunConfig
from nemo_kto.data.batches.dataset import Splits
from nemo_kto.data.batches.loader import GlobalBatchSampler, build_dataloader
from nemo_kto.data.rows.prompts import read_prompts
from nemo_kto.data.rows.reader import RowErrors
from nemo_kto.data.rows.records import DataError, PromptRecord, RowError
from nemo_kto.data.tokens.chat_template import RecordEncoder
from nemo_kto.distributed import state
from nemo_kto.errors import UserError
from nemo_kto.memory.micro_batches import multiple_of
from nemo_kto.models.engine.generation import Decoding
from nemo_kto.records.run_record import first_date
from nemo_kto.run.row_counts import collate_settings, model_vocab_size, shares_of, source_settings
from nemo_kto.telemetry.progress import progress_bar

logger = logging.getLogger(__name__)

_PROMPTS, _MAX_NEW_TOKENS = "exp_manager.samples.prompts", "exp_manager.samples.max_new_tokens"


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Datasets and loaders of a run."""

    train: Loader[Any]
    validation: Mapping[str, Loader[Any]]  # by the name of the set, as in ``Splits``
    splits: Splits[Any]
    collate_fn: Callable[[Any], Any]  # turns each item that a loader yields into a batch
    tokenizer: PreTrainedTokenizerBase
    samples: SamplePrompts | None  # None without samples
    date: datetime  # for chat templates that write one


def build_data(
    run: ResolvedRun, tokenizer: PreTrainedTokenizerBase, *, data_parallel: tuple[int, int] | None = None
) -> RunData:
    """Read, tokenise and split the rows, build their loaders, and read the prompts of the samples; collective.

    The tokenised rows are cached. ``data_parallel``: data-parallel rank and size; None for those of this rank. Raises
    DataError if rows are invalid, or there are too few for training, and UserError if the prompts cannot be used.
    """
    cfg = run.cfg
    date = state.from_rank_zero(lambda: template_date(run), doing="reading the date of the run")
    with state.main_process_first(doing="reading and tokenising the rows"):
        settings = source_settings(run, tokenizer) | {
            "progress": partial(progress_bar, shown=state.is_rank_zero()),
            "date": date,
            "cache_verified": not state.is_first_of_machine(),  # by the first process of the machine
        }
        splits = cfg.recipe.build_splits(settings, cfg.data_options())
    if splits.train is None:
        raise DataError(f"model.data.data_prefix must give training rows, got none of {cfg.model.data.data_prefix}")
    rank, size = data_parallel or (parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size())
    if (wrong := too_few_rows(cfg, len(splits.train), data_parallel=size)) is not None:
        raise DataError(wrong)
    of_sets = [examples.counts.warnings(name, seq_length=cfg.seq_length) for name, examples in splits.in_use.items()]
    of_loss = cfg.recipe.warnings(cfg.loss, splits.train, lr=cfg.model.optim.lr)
    for warning in chain(splits.warnings, *of_sets, of_loss) if state.is_rank_zero() else ():
        logger.warning(warning)
    take, collate_fn = cfg.recipe.collation(
        collate_settings(cfg, tokenizer, multiple=multiple_of(run)) | cfg.loss.collate_options(),
        with_kl=cfg.loss.definition.needs_z0,
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
                needs_kl_examples=cfg.loss.definition.needs_z0,
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
        tokenizer=tokenizer,
        samples=build_prompts(run, tokenizer, splits, date=date),
        date=date,
    )


def template_date(run: ResolvedRun) -> datetime:
    """Return the date for chat templates that write one: that of the run's first start, so that its rows stay the same."""
    return first_date(run.folder) if run.cfg.exp_manager.resume_if_exists else datetime.now()


def too_few_rows(cfg: RunConfig, rows: int, *, data_parallel: int) -> str | None:
    """Return why ``rows`` training rows are too few for a global batch, with a remedy; None if they suffice."""
    wanted = cfg.model.global_batch_size
    if rows >= wanted:
        return None
    step = (cfg.model.micro_batch_size or 1) * data_parallel
    largest = rows // step * step
    remedy = "train on more rows (model.data.data_prefix)"
    if largest > cfg.loss.definition.needs_z0:
        remedy = f"set model.global_batch_size={largest}, or {remedy}"
    return f"model.global_batch_size must be at most the number of training rows, {rows}, got {wanted}; {remedy}"


class Prompt(NamedTuple):
    """Prompt of a sample."""

    ids: list[int]
    text: str  # as the model gets it, or the last message of the user
    messages: list[Mapping[str, Any]] | None  # None for a prompt that was not read as messages


class SamplePrompts(NamedTuple):
    """Prompts that the model answers, and the decoding of the answers."""

    prompts: list[Prompt]
    decoding: Decoding


def build_prompts(
    run: ResolvedRun, tokenizer: PreTrainedTokenizerBase, splits: Splits[Any], *, date: datetime
) -> SamplePrompts | None:
    """Return the prompts of the samples, from the validation rows and from the file; None without samples. Collective.

    Raises UserError if a prompt cannot be used, or has too many tokens for the configured length of the answers.
    """
    settings = run.cfg.exp_manager.samples
    if not settings.enabled:
        return None

    def build() -> SamplePrompts:
        encoder = RecordEncoder(
            tokenizer=tokenizer,
            vocab_size=model_vocab_size(run.files),
            apply_chat_template=run.cfg.model.data.apply_chat_template,
            date=date,
        )
        found = [
            Prompt(ids, tokenizer.decode(ids), None)
            for examples in splits.validation.values()
            for ids in _of_examples(run, examples)
        ]
        if settings.prompts is not None:
            found += _of_file(run, Path(settings.prompts), encoder)
        decoding = Decoding(
            stop_ids=encoder.stop_ids(),
            max_new_tokens=settings.max_new_tokens,
            seq_length=run.cfg.seq_length,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            seed=settings.seed,
        )
        return SamplePrompts(found, decoding)

    return state.from_rank_zero(build, doing="reading the prompts of the samples")


def _of_examples(run: ResolvedRun, examples: Any) -> list[list[int]]:
    """Return the first ``count`` distinct prompts of a validation set that leave room for an answer."""
    settings, room = run.cfg.exp_manager.samples, _room(run)
    found = dict[tuple[int, ...], None]()
    for place in range(len(examples) if settings.count else 0):
        ids = tuple(map(int, examples[place].prompt_ids))
        if len(ids) <= room:
            found[ids] = None
        if len(found) == settings.count:
            break
    if settings.count and not found:
        text = f"must leave room for the prompt of a validation row, got {settings.max_new_tokens}"
        raise UserError(f"{_MAX_NEW_TOKENS} {text} of model.data.seq_length={run.cfg.seq_length}; lower it")
    return [list(ids) for ids in found]


def _of_file(run: ResolvedRun, file: Path, encoder: RecordEncoder) -> Iterator[Prompt]:
    """Yield the prompts of a file; UserError if any of them cannot be used."""
    broken, room = RowErrors(), _room(run)
    try:
        records = read_prompts(file, run.cfg.model.data.json_columns)
        encoded = encoder.encode_prompts(records)
        for record, ids in zip(records, encoded, strict=True):
            if isinstance(ids, RowError):
                broken.add(file, record.line, str(ids))
            elif len(ids) > room:
                text = f"a prompt must have at most model.data.seq_length - {_MAX_NEW_TOKENS} = {room} tokens"
                broken.add(file, record.line, f"{text}, got {len(ids)}; shorten it, or allow fewer new tokens")
        broken.raise_if_any()
    except DataError as error:
        raise UserError(f"{_PROMPTS} cannot be used: {error}") from error
    yield from (_prompt(record, ids) for record, ids in zip(records, encoded, strict=True) if isinstance(ids, list))


def _prompt(record: PromptRecord, ids: list[int]) -> Prompt:
    if isinstance(record.prompt, str):
        return Prompt(ids, record.prompt, None)
    of_user = [message for message in record.prompt if message["role"] == "user"] or record.prompt
    return Prompt(ids, str(of_user[-1].get("content")), list(record.prompt))


def _room(run: ResolvedRun) -> int:
    """Return the maximum number of tokens of a prompt."""
    return run.cfg.seq_length - run.cfg.exp_manager.samples.max_new_tokens
