"""Values derived from the configuration: automatic choices, and settings that combine several keys."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from hydra.utils import instantiate

from nemo_kto.algorithms.callbacks import Callback
from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.architecture.stages import PipelineSplit
from nemo_kto.artifacts.adapter_files import read_adapter_settings
from nemo_kto.config.schema import GPTConfig, PeftConfig, RunConfig
from nemo_kto.errors import UserError, import_object


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
        return "swap", "the reference is synced with the policy, so that its log-probs change"
    if cfg.model.peft.peft_scheme != "none" and settings.restore_from_path is None:
        return "adapter", "the model with its adapters disabled, which needs almost no memory"
    kl_examples = ", those of new KL examples when their epoch begins" if by_epoch else ""
    return "cached", f"the reference does not change: its log-probs are computed once{kl_examples}"


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


def find_callback(spec: str | Mapping[str, object]) -> Callable[[], Callback]:
    """Return a factory for a user-defined callback of ``trainer.callbacks``.

    Args:
        spec: the path package.module.NAME, or a mapping with this path under _target_ and with keyword arguments.

    Raises:
        UserError: If the class does not exist, is not a Callback, or does not accept these arguments.
    """
    settings = {"_target_": spec} if isinstance(spec, str) else dict(spec)
    path, arguments = str(settings.get("_target_")), {name: settings[name] for name in settings if not name.startswith("_")}
    found = import_object(path)
    if not (isinstance(found, type) and issubclass(found, Callback)):
        raise UserError(f"must name subclasses of {Callback.__module__}.{Callback.__name__}, got {path}")
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as error:
        raise UserError(f"must have the arguments that {path} takes, got {arguments}: {error}") from error
    return partial(instantiate, settings)
