"""From a configuration to the policy: the model of this rank, its adapters, and its way out again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule

from nemo_kto.checkpoint.adapter import export_adapter, load_adapter, read_adapter_settings
from nemo_kto.checkpoint.distributed import (
    CHECKPOINTS,
    checkpoint_dtype,
    find_checkpoints,
    hugging_face_folder,
    load_weights_only,
    saved_adapters,
)
from nemo_kto.checkpoint.huggingface import export, load_weights
from nemo_kto.checkpoint.model_state import SavedAdapters
from nemo_kto.launch.schema import GPTConfig, PeftConfig
from nemo_kto.models.architecture import Architecture, read_architecture
from nemo_kto.models.gpt import build_gpt
from nemo_kto.models.lora import add_adapters, merge_adapters
from nemo_kto.models.lora_settings import LoRASettings
from nemo_kto.models.optimizer import wrap_data_parallel
from nemo_kto.parallel import state
from nemo_kto.telemetry.summary import adapter_lines, model_lines, table


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The model of this rank and what belongs to it.

    Attributes:
        source: where the weights come from: a Hugging Face folder or one of our checkpoints.
        chunks: model chunks, wrapped for data parallelism where they are trained.
        adapters: what is adapted; None where all weights are trained.
        adapter_folder: trained adapters to start from, in PEFT format; ``source`` may bring some as well.
    """

    source: Path
    architecture: Architecture
    chunks: Sequence[MegatronModule]
    adapters: LoRASettings | None
    adapter_folder: str | None = None

    @property
    def folder(self) -> Path:
        """Hugging Face folder with the configuration and the tokenizer."""
        return hugging_face_folder(self.source) or self.source

    @property
    def has_pretrained_adapters(self) -> bool:
        """True where the run starts from adapters that were there before; these are the reference too."""
        return self.adapter_folder is not None or (self.adapters is not None and _saved_adapters(self.source) is not None)

    @property
    def base_model(self) -> Path:
        """The model that adapters are put on: where the weights come from, or what those are themselves adapters of."""
        saved = _saved_adapters(self.source)
        return self.source.absolute() if saved is None else saved.base_model


def build_policy(cfg: GPTConfig, source: Path, *, dtype: torch.dtype) -> Policy:
    """The model at ``source`` (a Hugging Face folder or one of our checkpoints), on this rank's share of the layout.

    With adapters, these are all that is trained.
    """
    adapters = _adapter_settings(cfg.peft)
    architecture = read_architecture(hugging_face_folder(source) or source, tensor_parallel=cfg.tensor_model_parallel_size)
    gpt = build_gpt(
        architecture,
        params_dtype=dtype,
        pipeline_parallel=cfg.pipeline_model_parallel_size,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        sequence_parallel=cfg.sequence_parallel,
        recompute_granularity=cfg.activations_checkpoint_granularity,
        recompute_method=cfg.activations_checkpoint_method,
        recompute_num_layers=cfg.activations_checkpoint_num_layers,
        attn_mask_type=AttnMaskType.arbitrary if cfg.data.reset_attention_mask else AttnMaskType.causal,
        adaptable=adapters is not None,
    )
    if adapters is not None:
        add_adapters(gpt, adapters, architecture=architecture, seed=cfg.seed)
    policy = Policy(
        source=source,
        architecture=architecture,
        chunks=wrap_data_parallel([gpt], use_distributed_optimizer=cfg.optim.use_distributed_optimizer),
        adapters=adapters,
        adapter_folder=cfg.peft.restore_from_path,
    )
    _load_weights(policy)
    return policy


def _load_weights(policy: Policy) -> None:
    load_base_weights(policy, policy.source)
    if policy.adapter_folder is not None:
        load_adapter(policy.chunks, policy.architecture, policy.adapter_folder)
    elif policy.has_pretrained_adapters:
        load_weights_only(policy.source, policy.chunks)


def _adapter_settings(cfg: PeftConfig) -> LoRASettings | None:
    """What is to be adapted; adapters that are there already say it themselves."""
    if cfg.peft_scheme == "none":
        return None
    tuning = cfg.lora_tuning
    if cfg.restore_from_path is not None:
        return replace(read_adapter_settings(cfg.restore_from_path), dropout=tuning.adapter_dropout)
    return LoRASettings(
        rank=tuning.adapter_dim,
        alpha=tuning.alpha,
        dropout=tuning.adapter_dropout,
        target_modules=tuple(tuning.target_modules),
        layers=None if tuning.layer_selection is None else tuple(tuning.layer_selection),
    )


def _saved_adapters(source: Path) -> SavedAdapters | None:
    """The adapters of one of our checkpoints that holds nothing else; None for any other source."""
    return None if hugging_face_folder(source) is None else saved_adapters(source)


def load_base_weights(policy: Policy, source: Path) -> None:
    """Fill the model from a Hugging Face folder or one of our checkpoints of the same shape.

    Raises:
        ValueError: it is of another shape.
    """
    folder = hugging_face_folder(source) or source
    found = read_architecture(folder, tensor_parallel=policy.architecture.tensor_parallel)
    if found != policy.architecture:
        raise ValueError(
            f"the reference must be a model of the same shape as the policy in {policy.folder}, got {found} from {folder} "
            f"instead of {policy.architecture}"
        )
    saved = _saved_adapters(source)
    if saved is not None and policy.adapters is None:
        raise ValueError(
            f"{source} holds adapters alone, and model.peft.peft_scheme is none; set it to lora, or merge them into their "
            f"base model first: nemo-kto export {source} FOLDER"
        )
    if saved is not None:
        load_base_weights(policy, saved.base_model)
    elif folder == source:
        load_weights(policy.chunks, policy.architecture, folder)
    else:
        load_weights_only(source, policy.chunks)


def export_policy(policy: Policy, *, out: Path | None, adapter_out: Path | None, max_shard_size_gb: float = 5.0) -> None:
    """Write the model in Hugging Face format, and its adapters, if it has any, in PEFT's; every rank takes part.

    A folder that is None is left out. Adapters are merged into the weights that are written, and stay merged. No weight
    file is larger than ``max_shard_size_gb`` * 10^9 bytes.
    """
    chunks, architecture = policy.chunks, policy.architecture
    if policy.adapters is not None and adapter_out is not None:
        export_adapter(chunks, architecture, out=adapter_out, base_model=policy.base_model)
    if out is not None:
        if policy.adapters is not None:
            merge_adapters(chunks)
        export(chunks, architecture, source=policy.folder, out=out, max_shard_bytes=int(max_shard_size_gb * 1e9))


def export_checkpoint(checkpoint: Path, out: Path, *, adapter: bool = False) -> None:
    """Write one of our own checkpoints, or the newest of a run folder, in Hugging Face format, on this one process.

    With ``adapter`` the adapters are written, in PEFT format, instead of the model they are merged into.

    Raises:
        FileNotFoundError: there is no complete checkpoint.
        ValueError: ``adapter`` of a checkpoint without adapters.
    """
    if hugging_face_folder(checkpoint) is None:
        complete = find_checkpoints(checkpoint / CHECKPOINTS)
        if not complete:
            raise FileNotFoundError(f"{checkpoint} must be a checkpoint or a run folder with a complete one, but has none")
        checkpoint = complete[-1].folder
    saved = saved_adapters(checkpoint)
    if adapter and saved is None:
        raise ValueError(f"{checkpoint} must hold adapters for --adapter, but it holds a whole model; leave the flag out")
    state.init_distributed(layout=state.Layout(), seed=0)
    adapters = None if saved is None else saved.settings
    architecture = read_architecture(hugging_face_folder(checkpoint) or checkpoint, tensor_parallel=1)
    gpt = build_gpt(architecture, params_dtype=checkpoint_dtype(checkpoint), adaptable=adapters is not None)
    if adapters is not None:
        add_adapters(gpt, adapters, architecture=architecture, seed=0)
    policy = Policy(source=checkpoint, architecture=architecture, chunks=[gpt], adapters=adapters)
    _load_weights(policy)
    export_policy(policy, out=None if adapter else out, adapter_out=out if adapter else None)
    state.destroy()
    print(table(f"nemo-kto export: {checkpoint}", adapter_lines(out) if adapter else model_lines(out)), flush=True)
