"""From a configuration to the rows of a run, in loaders that yield global batches."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from nemo_kto.data.balance import balance_warning, balanced_weights, one_class_warning
from nemo_kto.data.collate import dpo_custom_collate
from nemo_kto.data.dataset import KTODataset, build_dpo_splits, build_kto_splits
from nemo_kto.data.loader import build_dpo_dataloader, build_kto_dataloader
from nemo_kto.data.records import DataError
from nemo_kto.data.sampler import GlobalBatchSampler
from nemo_kto.launch.schema import RunConfig
from nemo_kto.parallel import cpu, state
from nemo_kto.recipes.kto import KTOLossConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The rows of a run.

    Attributes:
        train: loader of the training rows.
        validation: loader of the validation rows; None where there are none.
        train_rows: the training rows themselves.
        collate_fn: turns what the loaders yield into a batch.
    """

    train: DataLoader[Any]
    validation: DataLoader[Any] | None
    train_rows: Any
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
        "cache_dir": Path(data.cache_dir).expanduser(),
        "seed": cfg.model.seed,
    }
    build_splits: Callable[..., Any] = build_kto_splits
    if not isinstance(cfg.loss, KTOLossConfig):
        rewards = cfg.data_options()
        build_splits = partial(
            build_dpo_splits,
            default_chosen_reward=rewards["default_chosen_reward"],
            default_rejected_reward=rewards["default_rejected_reward"],
        )
    with state.main_process_first():
        splits = build_splits(**source)
    if splits.train is None:
        raise DataError(f"model.data.data_prefix must give training rows, got none for splits_string={data.splits_string!r}")
    loader = partial(_loader, cfg, tokenizer)
    collate_fn: Callable[[Any], Any] = _as_it_is  # KL pairs are formed over the global batch, so that loader collates itself
    if not isinstance(cfg.loss, KTOLossConfig):
        collate_fn = partial(dpo_custom_collate, **_collate_options(cfg, tokenizer))
    return RunData(
        train=loader(splits.train, training=True),
        validation=None if splits.validation is None else loader(splits.validation, training=False),
        train_rows=splits.train,
        collate_fn=collate_fn,
    )


def loss_weights(cfg: RunConfig, rows: KTODataset) -> tuple[float, float]:
    """Weights of desirable and undesirable rows; says so where they do not balance, or balances them."""
    kto, desirable = cfg.loss, rows.desirable_count()
    assert isinstance(kto, KTOLossConfig)
    undesirable = len(rows) - desirable
    weights = kto.desirable_loss_weight, kto.undesirable_loss_weight
    warnings = [one_class_warning(desirable, undesirable, cfg.model.optim.lr)]
    if kto.auto_balance:
        given, weights = weights, balanced_weights(desirable, undesirable, *weights)
        if state.is_rank_zero() and weights != given:
            print(f"loss weights, balanced: desirable {weights[0]:.4g}, undesirable {weights[1]:.4g}", flush=True)
    else:
        warnings.append(balance_warning(desirable, undesirable, *weights))
    for warning in filter(None, warnings if state.is_rank_zero() else ()):
        logger.warning(warning)
    return weights


def _as_it_is(batch: Any) -> Any:
    return batch


def _collate_options(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    data = cfg.model.data
    return {
        "eos_id": tokenizer.eos_token_id,
        "seq_length": data.seq_length,
        "pad_to_multiple": cfg.model.tensor_model_parallel_size if cfg.model.sequence_parallel else 1,
        "reset_attention_mask": data.reset_attention_mask,
        "eod_mask_loss": data.eod_mask_loss,
    }


def _loader(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase, rows: Dataset[Any], *, training: bool) -> DataLoader[Any]:
    with_kl = cfg.loss.record.needs_z0
    sampler = GlobalBatchSampler(
        num_rows=len(rows),  # type: ignore[arg-type]  # torch's Dataset declares no length
        global_batch_size=cfg.model.global_batch_size,
        seed=cfg.model.seed,
        shuffle=training,
        drop_last=training,
        with_pairs=with_kl,
    )
    shared: dict[str, Any] = {
        "dataset": rows,
        "sampler": sampler,
        "rank": state.data_parallel_rank(),
        "size": state.data_parallel_size(),
        "num_workers": cfg.model.data.num_workers,
    }
    if not isinstance(cfg.loss, KTOLossConfig):
        return build_dpo_dataloader(**shared)
    options = _collate_options(cfg, tokenizer)
    return build_kto_dataloader(**shared, **options, with_kl=with_kl, pin_memory=cpu.on_gpu())
