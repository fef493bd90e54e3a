"""Arguments for datasets, collate functions and micro-batches, from a configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from nemo_kto.config.resolved import ModelFiles, ResolvedRun
from nemo_kto.config.schema import RunConfig
from nemo_kto.data.batches.dataset import SplitCounts
from nemo_kto.data.batches.loader import SequenceCost, by_cost, by_prompt, every_nth
from nemo_kto.data.tokens.chat import load_tokenizer
from nemo_kto.device import device
from nemo_kto.device.precision import PRECISIONS
from nemo_kto.errors import UserError
from nemo_kto.models.engine.sequences import MicroBatchLimits, width_multiple
from nemo_kto.models.flops import ModelFlops, Passes

# Default number of tokens per micro-batch and rank. On a GPU, small micro-batches waste time on kernel launches and gradient
# accumulation; ``planner.micro_batches`` derives the number, and this one is for a run that was not planned. A CPU has no
# launch overhead, and in larger micro-batches the sequences differ more in length, so that padding costs as much as is
# gained.
_GPU_TOKENS, _CPU_TOKENS = 8192, 512


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
        "data_prefix": data.data_prefix,
        "splits_string": data.splits_string,
        "fields": data.fields,
        "labels": data.labels,
        "json_columns": data.json_columns,
        "min_validation_rows": 2 if cfg.loss.record.needs_z0 else 1,  # KL examples are formed within a batch
        "tokenizer": tokenizer,
        "vocab_size": model_vocab_size(run.files),
        "seq_length": cfg.seq_length,
        "truncation_mode": data.truncation_mode,
        "apply_chat_template": data.apply_chat_template,
        "cache_dir": Path(data.cache_dir),
        "cache_shared": data.cache_shared,
        "preprocess_workers": data.preprocess_workers,
        "seed": cfg.model.seed,
    }


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


def multiple_of(run: ResolvedRun, *, on_gpu: bool | None = None) -> int:
    """Return :func:`width_multiple` for the layout of a run."""
    model = run.cfg.model
    return width_multiple(
        tensor_parallel=model.tensor_model_parallel_size,
        sequence_parallel=model.sequence_parallel,
        context_parallel=model.context_parallel_size,
        fp8=model.fp8 is not None,
        on_gpu=on_gpu,
    )


def micro_batch_limits(run: ResolvedRun, *, on_gpu: bool | None = None) -> MicroBatchLimits:
    """Return the configured limits of a micro-batch, or the defaults for the device.

    ``on_gpu`` is None for the device of this rank; the planner passes a value, because a plan may be for another machine.
    """
    packed, multiple = packing_of(run, on_gpu=on_gpu).is_on, multiple_of(run, on_gpu=on_gpu)
    model, on_gpu = run.cfg.model, device.on_gpu() if on_gpu is None else on_gpu
    prompts, tokens = model.micro_batch_size, model.micro_batch_tokens
    if prompts is None and tokens is None:
        tokens = run.micro_batch_tokens or (_GPU_TOKENS if on_gpu else _CPU_TOKENS) * model.context_parallel_size
    return MicroBatchLimits(
        prompts=prompts,
        tokens=tokens,
        multiple=multiple,
        packed=packed,
        context_parallel=model.context_parallel_size,
        group=run.split.group,
        share_prompts=_shares_prompts(run.cfg, on_gpu=on_gpu),
    )


class Packing(NamedTuple):
    """Whether sequences are packed, and why."""

    is_on: bool
    reason: str


def packing_of(run: ResolvedRun, *, on_gpu: bool | None = None) -> Packing:
    """Return the value of model.data.packing; ``on_gpu`` as for :func:`micro_batch_limits`.

    ``auto`` packs on GPUs if one kernel computes the attention of a whole pack. A plan assumes that the machine has such a
    kernel, which Transformer Engine and newer versions of torch contain; a rank looks for it.
    """
    model, here = run.cfg.model, on_gpu is None
    if model.data.packing != "auto":
        return Packing(model.data.packing, "set by the user")
    if not (device.on_gpu() if on_gpu is None else on_gpu):
        return Packing(False, "no GPU")
    if model.micro_batch_size is not None:
        return Packing(False, "model.micro_batch_size is set")
    if model.data.reset_attention_mask:
        return Packing(False, "model.data.reset_attention_mask is set")
    if PRECISIONS[run.cfg.trainer.precision] == "32":
        return Packing(False, "fp32")
    if run.architecture.attends_in_blocks:
        return Packing(False, "a soft cap or sinks in the attention")
    windows = any(window is not None for window in run.architecture.windows)
    if model.context_parallel_size > 1 and (windows or run.architecture.unsupported_by_te):
        return Packing(False, "context parallelism with layers that Transformer Engine cannot pack")
    if here and not _attends_in_one_kernel(run):
        return Packing(False, "neither Transformer Engine nor torch 2.11 is installed")
    return Packing(True, "the default on GPUs")


def _attends_in_one_kernel(run: ResolvedRun) -> bool:
    """Return whether this machine has a kernel for the attention of a pack; context parallelism needs Transformer Engine."""
    from nemo_kto.device.kernels import uses_transformer_engine, varlen_attention  # not for a plan: imports megatron-core

    if uses_transformer_engine(run.dtype) and not run.architecture.unsupported_by_te:
        return True
    return run.cfg.model.context_parallel_size == 1 and varlen_attention(run.dtype) is not None


def _shares_prompts(cfg: RunConfig, *, on_gpu: bool) -> bool:
    """Return the value of model.data.share_prompts; auto is true where shared prompts are supported and tested."""
    if cfg.model.data.share_prompts == "auto":
        return not (on_gpu or cfg.model.context_parallel_size > 1 or cfg.model.data.reset_attention_mask)
    return cfg.model.data.share_prompts


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
    ahead = int(training and cfg.loss.record.looks_ahead)
    costs = cfg.recipe.costs(
        cost=cost(Passes(forward + 1 + ahead, disabled, backward=int(training))),
        kl_cost=cost(Passes(forward + 1, disabled)) if cfg.loss.record.needs_z0 else None,
        reference_cost=cost(Passes(forward, disabled) if PRECISIONS[cfg.trainer.precision] == "32" else Passes()),
        seq_length=cfg.seq_length,
        share_prompts=limits.share_prompts,
    )
    shares = partial(by_cost, costs=costs) if limits.packed else every_nth
    return partial(by_prompt, costs=costs, otherwise=shares) if limits.share_prompts else shares
