"""Values derived from the configuration: automatic choices, and settings that combine several keys."""

from __future__ import annotations

from dataclasses import replace

from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.architecture.stages import PipelineSplit
from nemo_kto.artifacts.adapter_files import read_adapter_settings
from nemo_kto.config.schema import GPTConfig, PeftConfig, RunConfig


def adapter_settings(cfg: PeftConfig) -> LoRASettings | None:
    """Return the LoRA settings from the configuration or from an existing adapter; None without adapters."""
    if cfg.peft_scheme == "none":
        return None
    tuning = cfg.lora_tuning
    if cfg.restore_from_path is not None:
        return replace(read_adapter_settings(cfg.restore_from_path), dropout=tuning.adapter_dropout)
    return LoRASettings(
        rank=tuning.adapter_dim,
        alpha=tuning.alpha,
        rslora=tuning.rslora,
        dora=tuning.dora,
        dropout=tuning.adapter_dropout,
        target_modules=tuple(tuning.target_modules),
        layers=None if tuning.layer_selection is None else tuple(tuning.layer_selection),
    )


def pipeline_split(cfg: GPTConfig) -> PipelineSplit:
    """Return how the layers are partitioned across pipeline stages."""
    return PipelineSplit(
        stages=cfg.pipeline_model_parallel_size,
        chunks=cfg.virtual_pipeline_model_parallel_size or 1,
        first=cfg.num_layers_in_first_pipeline_stage,
        last=cfg.num_layers_in_last_pipeline_stage,
        counts_embedding=cfg.account_for_embedding_in_pipeline_split,
        counts_loss=cfg.account_for_loss_in_pipeline_split,
    )


def recompute_modules(cfg: GPTConfig) -> tuple[str, ...]:
    """Return the modules of a layer that selective recomputation recomputes; by default the MLP.

    The activations of the MLP are the largest. megatron-core's default is the core attention, which is fused here and saves
    little, so that recomputing it would only be slower.
    """
    return tuple(cfg.recompute_modules or ("mlp",))


def choose_mode(cfg: RunConfig) -> tuple[str, str]:
    """Return the reference mode (swap, adapter, cached or none), and the reason for it."""
    settings = cfg.model.reference
    if not cfg.loss.record.needs_reference:
        return "none", f"{cfg.loss.preference_loss} needs no reference"
    by_epoch = has_new_kl_examples(cfg)
    if settings.mode != "auto":
        note = "; KL examples are evaluated when their epoch begins" if settings.mode == "cached" and by_epoch else ""
        return settings.mode, f"set by the user{note}"
    if settings.sync_interval:
        return "swap", "it is synced with the policy, so that its log-probs change"
    if cfg.model.peft.peft_scheme != "none" and settings.restore_from_path is None:
        return "adapter", "it is the model without what its adapters learn, and costs almost no memory"
    why = "it does not change: one pass over the data serves this run, its validations and later runs"
    if by_epoch:
        why = "it does not change: samples are evaluated once, and KL examples, new in each epoch, when their epoch begins"
    return "cached", why


def has_new_kl_examples(cfg: RunConfig) -> bool:
    """Return whether later epochs have sequences that the first lacks: KL examples, which are formed within a batch."""
    return cfg.loss.record.needs_z0 and cfg.loop.max_epochs > 1


def reference_passes(cfg: RunConfig) -> tuple[int, int]:
    """Return the number of passes per step in which the model itself serves as the reference.

    Returns:
        Passes with swapped weights, and passes with the adapters disabled.
    """
    mode, _ = choose_mode(cfg)
    # If training starts from existing adapters, the reference is the model with those, which are swapped in.
    is_bare = mode == "adapter" and cfg.model.peft.restore_from_path is None
    return int(mode in ("swap", "adapter") and not is_bare), int(is_bare)
