"""Build, load and export the policy model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.lora import LoRASettings, adapts_experts, few_adapted, refused_by_peft
from nemo_kto.architecture.stages import ONE_STAGE, PipelineSplit
from nemo_kto.checkpoint.manager import checkpoint_dtype, load_weights_only, newest_checkpoint, saved_adapters
from nemo_kto.config.resolved import ModelFiles, ResolvedRun
from nemo_kto.config.saved_config import CONFIG_FILE
from nemo_kto.device import device
from nemo_kto.distributed import state
from nemo_kto.errors import UserError, error_of
from nemo_kto.huggingface.export_folder import check_target
from nemo_kto.huggingface.hf_weights import check_weights, export, export_bytes, load_weights
from nemo_kto.huggingface.peft import check_adapter, export_adapter, load_adapter
from nemo_kto.memory.micro_batches import micro_batch_limits
from nemo_kto.model_files.adapter_files import is_our_adapter, read_adapter_settings
from nemo_kto.model_files.checkpoint_files import CHECKPOINTS, INFO, check_checkpoint, is_checkpoint
from nemo_kto.model_files.companion_files import auto_class, copy_companions
from nemo_kto.model_files.model_folders import is_peft_folder, named_base, refuse_other_shape
from nemo_kto.model_files.safetensors_files import is_our_model
from nemo_kto.models.engine.optimizer import wrap_data_parallel
from nemo_kto.models.gpt import build_chunks, build_gpt
from nemo_kto.models.lora.adapters import add_adapters, merge_adapters
from nemo_kto.run.card import CardSources, write_card
from nemo_kto.telemetry.display import adapter_lines, model_lines, table
from nemo_kto.utils.files import read_json

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The policy model of this rank."""

    files: ModelFiles  # the model that it starts from
    chunks: Sequence[MegatronModule]  # wrapped for data parallelism if they are trained
    split: PipelineSplit = ONE_STAGE
    adapters: LoRASettings | None  # None if all weights are trained

    @property
    def architecture(self) -> Architecture:
        """Architecture with the padding of the layout."""
        return self.files.architecture

    @cached_property
    def weights_line(self) -> dict[str, str]:
        """Line of a report about the weights of its files, by its label; empty if each is trained as it is stored."""
        folder = self.files.original or self.files.own.base
        if is_checkpoint(folder):
            return {}
        weights = check_weights(self.architecture, folder)
        text = weights.describe("trained" if self.adapters is None else "of the base model")
        return {"weights": text} if text else {}

    @property
    def base_model(self) -> Path:
        """Base model of the adapters: the source itself or, if the source contains adapters, their base model."""
        return self.files.own.base.absolute()


def warn_of_adapters(run: ResolvedRun) -> None:
    """Log, on rank 0, that new adapters change few weights, or that peft will not load the exported ones."""
    adapters = run.adapters
    if adapters is None or not state.is_rank_zero():
        return
    if run.files.adapter_folder is None and (warning := few_adapted(run.architecture, adapters)):
        logger.warning(warning)
    if refusal := refused_by_peft(run.architecture.family, adapters):
        remedy = "load the merged model, or adapt other modules: model.peft.lora_tuning.target_modules=[all-linear]"
        logger.warning("%s, so that it will not load export.adapter_path; %s", refusal, remedy)


def build_policy(run: ResolvedRun) -> Policy:
    """Build this rank's part of the model and load its weights; if adapters are configured, only they are trained."""
    cfg, files, adapters = run.cfg.model, run.files, run.adapters
    if not files.is_checkpoint:
        check_weights(run.architecture, files.source)  # before memory is allocated for a model that may have other sizes
    chunks = build_chunks(
        run.architecture,
        params_dtype=run.dtype,
        split=run.split,
        context_parallel=cfg.context_parallel_size,
        sequence_parallel=cfg.sequence_parallel,
        recompute_granularity=cfg.activations_checkpoint_granularity,
        recompute_method=run.recompute_method,
        recompute_num_layers=run.recompute_num_layers,
        recompute_modules=run.recompute_modules,
        fp8=cfg.fp8,
        expert_parallel=cfg.expert_model_parallel_size,
        grouped_experts=not adapts_experts(run.architecture, adapters),
        share_prompts=micro_batch_limits(run).share_prompts,
    )
    if adapters is not None:
        for chunk in chunks:
            add_adapters(chunk, adapters, architecture=run.architecture, seed=cfg.seed)
    overlap = cfg.optim.overlap
    if overlap is None:
        overlap = device.on_gpu() and parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
    chunks = wrap_data_parallel(
        chunks,
        use_distributed_optimizer=cfg.optim.use_distributed_optimizer,
        overlap=overlap,
        reduce_in_fp32=cfg.optim.grad_reduce_in_fp32,
    )
    policy = Policy(files=files, chunks=chunks, split=run.split, adapters=adapters)
    load_policy_weights(policy)
    return policy


def load_policy_weights(policy: Policy) -> None:
    """Load the initial weights of the policy; new adapters keep their initial values."""
    files = policy.files
    try:
        base = files.own.base
    except UserError as error:
        raise UserError(f"the model {error}") from error
    load_base_weights(policy, base)
    if files.adapter_folder is not None:
        named = named_base(files.adapter_folder)
        if named is not None and named.resolve() != base.resolve() and state.is_rank_zero():
            text = "the adapters %s name %s as their base model, and are used with %s instead"
            logger.warning(text, files.adapter_folder, named, policy.base_model)
        load_adapter(policy.chunks, policy.architecture, files.adapter_folder)
    elif files.own.adapters is not None:
        load_weights_only(files.source, policy.chunks)


def load_base_weights(policy: Policy, base: Path) -> None:
    """Load a whole model, a Hugging Face folder or one of our checkpoints; raise UserError if it has another shape."""
    check_shape(policy.files, base)
    if is_checkpoint(base):
        load_weights_only(base, policy.chunks)
    else:
        with state.on_all_ranks(doing="loading the weights"):
            load_weights(policy.chunks, policy.architecture, base)


def check_shape(files: ModelFiles, base: Path) -> None:
    """Compare the configuration of a whole model with that of the policy; raise UserError with the values that differ."""
    ours, other = files.architecture, replace(files, source=base)
    if other.hf_folder == files.hf_folder:
        return
    found = other.architecture
    values = {each.name: (getattr(found, each.name), getattr(ours, each.name)) for each in fields(found)}
    differing = {name: pair for name, pair in values.items() if pair[0] != pair[1]}
    if "head_dim" in differing:
        differing.pop("rope", None)  # rope has one frequency per two channels of a head, so it differs as well
    try:
        refuse_other_shape(files.hf_folder, other.hf_folder, differing)
    except UserError as error:
        raise UserError(f"the reference {error}") from error


def check_sources(run: ResolvedRun) -> None:
    """Compare the tensors of all models and adapters in other formats than ours with the policy, by the headers of files.

    Raises UserError that lists the differences in all of them.
    """

    def check(folder: Path, *, is_base: bool) -> None:
        if is_base:
            check_shape(run.files, folder)
        if is_checkpoint(folder):
            return  # its files are those that this program has written, as their hashes show
        if is_base:
            check_weights(run.architecture, folder)
        else:
            check_adapter(run.architecture, read_adapter_settings(folder), folder)

    sources = [source for source in (run.files.initial, run.reference_model) if source is not None]
    folders = dict.fromkeys((source.base, True) for source in sources)
    folders |= dict.fromkeys((source.adapters, False) for source in sources if source.adapters is not None)
    wrong = [error_of(partial(check, folder, is_base=is_base)) for folder, is_base in folders]
    if any(wrong):
        raise UserError("\n".join(filter(None, wrong)))


def export_policy(
    policy: Policy,
    *,
    out: Path | None,
    adapter_out: Path | None,
    info: Mapping[str, Any],
    run_folder: Path | None,
    max_shard_size_gb: float = 5.0,
) -> None:
    """Write the model to ``out`` in Hugging Face format, and its adapters to ``adapter_out`` in PEFT format; collective.

    In the written model, adapters are merged into the weights; they stay merged in memory, except those of quantized
    weights, which are merged into the weights in the files of the base model. None skips an export.
    ``max_shard_size_gb`` is the maximum size of a weight file in 10^9 bytes. ``info`` is the trainer.json of the exported
    checkpoint, and ``run_folder`` the folder of its run, for the model cards.
    """
    chunks, architecture, source = policy.chunks, policy.architecture, policy.files.hf_folder

    refusal = None if policy.adapters is None else refused_by_peft(architecture.family, policy.adapters)

    def describe(folder: Path) -> None:
        if is_adapter := is_peft_folder(folder):
            copy_companions(source, folder, only_tokenizer=True)
        sources = CardSources(info=info, run=run_folder, original=source, adapters=is_adapter, refusal=refusal)
        write_card(folder, sources)

    if policy.adapters is not None and adapter_out is not None:
        export_adapter(chunks, architecture, out=adapter_out, base_model=policy.base_model, describe=describe)
    if out is not None:
        if policy.adapters is not None:
            merge_adapters(chunks)
        size = int(max_shard_size_gb * 1e9)
        export(
            chunks,
            architecture,
            source=source,
            out=out,
            max_shard_bytes=size,
            original=policy.files.original,
            base=None if architecture.base_format is None else policy.base_model,
            describe=describe,
        )


def export_checkpoint(checkpoint: Path, out: Path, *, adapter: bool = False) -> None:
    """Export a checkpoint, or the newest one of a run folder, to ``out`` in Hugging Face format, in a single process.

    With ``adapter``, write the adapters in PEFT format instead of the model with merged adapters. Raises UserError if there
    is no checkpoint, it is damaged or lacks the adapters, or ``out`` cannot be used.
    """
    if not is_checkpoint(checkpoint):
        newest = newest_checkpoint(checkpoint / CHECKPOINTS)
        if newest is None:
            message = f"{checkpoint} must be a checkpoint or a run folder with a complete one, but has none"
            raise UserError(f"{message}; correct the path")
        checkpoint = newest.folder
    check_checkpoint(checkpoint)
    saved = saved_adapters(checkpoint)
    if adapter and saved is None:
        raise UserError(f"{checkpoint} must contain adapters for --adapter, but it is a whole model; omit --adapter")
    base_format = None if saved is None else saved.base_format
    files, dtype = ModelFiles(source=checkpoint, base_format=base_format), checkpoint_dtype(checkpoint)
    architecture = files.architecture
    if adapter and saved is not None and (refusal := refused_by_peft(architecture.family, saved.settings)):
        text = f"{checkpoint} must have adapters that peft loads for --adapter, but {refusal}"
        raise UserError(f"{text}; omit --adapter, which merges them")
    need = 0 if adapter else export_bytes(architecture, dtype, files.original)
    check_target(out, is_ours=is_our_adapter if adapter else is_our_model, need=need)  # before the model is loaded
    state.init_distributed(layout=state.Layout(), seed=0)
    adapters = None if saved is None else saved.settings
    gpt = build_gpt(architecture, params_dtype=dtype, grouped_experts=not adapts_experts(architecture, adapters))
    if adapters is not None:
        add_adapters(gpt, adapters, architecture=architecture, seed=0)
    policy = Policy(files=files, chunks=[gpt], adapters=adapters)
    load_policy_weights(policy)
    run_folder = checkpoint.absolute().parent.parent
    export_policy(
        policy,
        out=None if adapter else out,
        adapter_out=out if adapter else None,
        info=read_json(checkpoint / INFO),
        run_folder=run_folder if (run_folder / CONFIG_FILE).is_file() else None,
    )
    state.destroy()
    loader = auto_class(out)
    lines = adapter_lines(out, auto_class=loader) if adapter else model_lines(out, auto_class=loader) | policy.weights_line
    print(table(f"nemo-kto export: {checkpoint}", lines), flush=True)
