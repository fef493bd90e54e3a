"""Tokenizer, settings of rows and batches, and shards of a run.

megatron-core is not imported: `nemo-kto data preview` and `nemo-kto check` use these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_kto.config.resolved import ModelFiles, ResolvedRun
from nemo_kto.config.schema import RunConfig
from nemo_kto.data.batches.dataset import SplitCounts
from nemo_kto.data.batches.loader import SequenceCost, by_cost, by_prompt, every_nth
from nemo_kto.data.tokens.chat_template import load_tokenizer
from nemo_kto.device.precision import PRECISIONS
from nemo_kto.errors import UserError
from nemo_kto.memory.micro_batches import micro_batch_limits
from nemo_kto.models.flops import ModelFlops, Passes

# Keys of model.data that are arguments of ``build_splits`` under the same names.
_SOURCE_KEYS = (
    "data_prefix", "splits_string", "fields", "labels", "json_columns", "drop", "truncation_mode", "apply_chat_template",
    "cache_shared", "preprocess_workers",
)  # fmt: skip


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


def source_settings(run: ResolvedRun, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the arguments of ``data.batches.dataset.build_splits``, except for the kind of the examples."""
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


def counted_rows(run: ResolvedRun, counts: SplitCounts) -> ResolvedRun:
    """Return the run with the mean number of tokens of its training rows, from which the size of micro-batches follows."""
    return run.with_row_tokens(counts.tokens / counts.rows)


def split_text(unit: str, counts: SplitCounts) -> str:
    """Describe the rows of a split; ``unit`` is rows or pairs."""
    kinds = ", ".join(f"{count:,} {name}" for name, count in counts.classes.items())
    cut = {"prompts": counts.cut_prompts, "responses": counts.cut_responses}
    truncated = " and ".join(f"{count:,} {what}" for what, count in cut.items() if count)
    rows = f"{counts.rows:,} {unit}" + (f" ({kinds})" if kinds else "")
    return f"{rows}, {counts.tokens:,} tokens, {truncated or 'none'} truncated"


def collate_settings(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase, *, multiple: int) -> dict[str, Any]:
    """Return the keyword arguments of the collate functions in ``data.batches.collate``."""
    return {
        "eos_id": tokenizer.eos_token_id,
        "seq_length": cfg.seq_length,
        "pad_to_multiple": multiple,
        "reset_attention_mask": cfg.model.data.reset_attention_mask,
        "eod_mask_loss": cfg.model.data.eod_mask_loss,
    }


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
