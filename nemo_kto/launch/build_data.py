"""From a configuration to the examples of a run, in loaders that yield global batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from transformers import PreTrainedTokenizerBase

from nemo_kto.algorithms.protocols import Loader
from nemo_kto.data.loader import build_dataloader
from nemo_kto.data.records import DataError
from nemo_kto.data.sampler import GlobalBatchSampler
from nemo_kto.launch.schema import RunConfig
from nemo_kto.parallel import device, state


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The loaders of a run, the examples themselves, and what turns what the loaders yield into a batch."""

    train: Loader[Any]
    validation: Loader[Any] | None
    examples: Any
    validation_examples: Any | None
    collate_fn: Callable[[Any], Any]


def build_data(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase) -> RunData:
    """Read, tokenise (once) and split the rows.

    Raises:
        DataError: rows cannot be used, or there are none to train on.
    """
    data = cfg.model.data
    source = {
        "data_prefix": data.data_prefix,
        "splits_string": data.splits_string,
        "tokenizer": tokenizer,
        "seq_length": data.seq_length,
        "truncation_mode": data.truncation_mode,
        "cache_dir": Path(data.cache_dir),
        "seed": cfg.model.seed,
    }
    collate = {
        "eos_id": tokenizer.eos_token_id,
        "seq_length": data.seq_length,
        "pad_to_multiple": cfg.model.tensor_model_parallel_size if cfg.model.sequence_parallel else 1,
        "reset_attention_mask": data.reset_attention_mask,
        "eod_mask_loss": data.eod_mask_loss,
    }
    with state.main_process_first():
        splits = cfg.recipe.build_splits(source, cfg.data_options())
    if splits.train is None:
        raise DataError(f"model.data.data_prefix must give training rows, got none for splits_string={data.splits_string!r}")
    take, collate_fn = cfg.recipe.collation(cfg.loss.record, collate)
    return RunData(
        train=_loader(cfg, splits.train, take, training=True),
        validation=None if splits.validation is None else _loader(cfg, splits.validation, take, training=False),
        examples=splits.train,
        validation_examples=splits.validation,
        collate_fn=collate_fn,
    )


def _loader(cfg: RunConfig, examples: Any, take: Callable[..., Any], *, training: bool) -> Loader[Any]:
    sampler = GlobalBatchSampler(
        num_examples=len(examples),
        global_batch_size=cfg.model.global_batch_size,
        seed=cfg.model.seed,
        shuffle=training,
        drop_last=training,
        needs_kl_examples=cfg.loss.record.needs_z0,
    )
    loader: Any = build_dataloader(  # torch does not type what its sampler can do
        dataset=examples,
        sampler=sampler,
        rank=parallel_state.get_data_parallel_rank(),
        size=parallel_state.get_data_parallel_world_size(),
        take=take,
        num_workers=cfg.model.data.num_workers,
        pin_memory=device.on_gpu(),
    )
    return loader
