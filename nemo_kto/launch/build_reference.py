"""From a configuration to the reference policy: how it is held, and its log-probs beforehand where they are cached."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nemo_kto.algorithms.batches import batches_of_run, number_of_batches
from nemo_kto.algorithms.dpo import TrainerConfig
from nemo_kto.checkpoint.reference_cache import CachedReference, ReferenceCache
from nemo_kto.launch.build_data import RunData
from nemo_kto.launch.build_policy import Policy, base_model, load_base_weights
from nemo_kto.launch.schema import RunConfig
from nemo_kto.models.lora import adapters_off
from nemo_kto.models.nlp.gpt.megatron_gpt_model import MegatronGPTModel
from nemo_kto.models.reference import LiveReference, MovingReference, ReferencePolicy, SwappedWeights
from nemo_kto.parallel import cpu, state
from nemo_kto.telemetry.progress import bar
from nemo_kto.telemetry.timers import PhaseTimers


class HeldReference(NamedTuple):
    """The reference of a run; ``moving`` where it follows the policy."""

    policy: ReferencePolicy | None
    moving: MovingReference | None = None


def choose_mode(cfg: RunConfig) -> tuple[str, str]:
    """How the reference is held (swap, adapter, cached or none), and why."""
    settings = cfg.model.reference
    if not cfg.loss.record.needs_reference:
        return "none", f"{cfg.loss.preference_loss} needs no reference"
    if settings.mode != "auto":
        return settings.mode, "as asked"
    if settings.sync_interval:
        return "swap", "it moves, so that its log-probs change"
    if cfg.model.peft.peft_scheme != "none" and settings.restore_from_path is None:
        return "adapter", "it is the model without what its adapters learn, and costs no memory to speak of"
    return "cached", "it stays as it is: one pass over the rows serves this run, its validations and later runs"


def hold_reference(cfg: RunConfig, policy: Policy, timers: PhaseTimers) -> HeldReference:
    """Hold the model's present weights, which are the reference's."""
    mode, why = choose_mode(cfg)
    if state.is_rank_zero():
        print(f"reference policy: {mode} ({why})", flush=True)
    if mode == "none":
        return HeldReference(None)
    if mode == "cached":
        return HeldReference(CachedReference(cache=_open_cache(cfg, policy)))
    if mode == "adapter" and not policy.adapters_came_trained:
        return HeldReference(LiveReference(active=partial(adapters_off, policy.chunks)))
    # Adapters that come trained are the reference: they are exchanged, and the base model, which is frozen, is not.
    other_base = cfg.model.reference.restore_from_path is not None
    parameters = [parameter for chunk in policy.chunks for parameter in chunk.parameters()]
    weights = SwappedWeights(
        parameters=[parameter for parameter in parameters if other_base or parameter.requires_grad], phase=timers.phase
    )
    moving = None
    if cfg.model.reference.sync_interval:
        settings = cfg.model.reference
        moving = MovingReference(weights=weights, interval=settings.sync_interval, share=settings.sync_alpha)
    return HeldReference(LiveReference(active=weights.active), moving)


def with_reference(
    cfg: RunConfig,
    policy: Policy,
    data: RunData,
    *,
    trainer_cfg: TrainerConfig,
    timers: PhaseTimers,
    build_model: Callable[[HeldReference], MegatronGPTModel],
) -> MegatronGPTModel:
    """The model with its reference, and with its weights those that training starts from.

    Where the reference is another model than the policy, its weights are loaded first, kept or asked, and then replaced.
    """
    other = cfg.model.reference.restore_from_path
    if other is not None and policy.adapters_came_trained:
        raise ValueError(
            f"model.reference.restore_from_path must be null where {policy.source} brings trained adapters, which are the "
            f"reference, got {other}; leave it out, or merge the adapters first: nemo-kto export"
        )
    if other is not None:
        load_base_weights(policy, Path(other))
    held = hold_reference(cfg, policy, timers)
    model = build_model(held)
    if isinstance(held.policy, CachedReference):
        _fill(held.policy, model, data, trainer_cfg)
        timers.report_and_reset()
    if other is not None:
        load_base_weights(policy, policy.source)
    return model


def _open_cache(cfg: RunConfig, policy: Policy) -> ReferenceCache:
    settings = {
        "precision": cfg.trainer.precision,
        "device": cpu.device().type,
        "mean over tokens": cfg.loss.preference_average_log_probs,
        "attention within documents": cfg.model.data.reset_attention_mask,
    }
    models = [Path(cfg.model.reference.restore_from_path or policy.source), base_model(policy.source)]
    if cfg.model.peft.restore_from_path is not None:
        models.append(Path(cfg.model.peft.restore_from_path))
    return ReferenceCache(folder=Path(cfg.model.data.cache_dir).expanduser(), settings=settings, models=models)


def _fill(reference: CachedReference, model: MegatronGPTModel, data: RunData, trainer_cfg: TrainerConfig) -> None:
    """Compute what the cache does not know of all rows of the run, forward only."""
    known = reference.cache.rows
    loaders: tuple[Any, Any] = (data.train, data.validation)
    total = number_of_batches(trainer_cfg, *loaders)
    batches = bar(batches_of_run(trainer_cfg, *loaders), total=total, title="reference", shown=state.is_rank_zero())
    with reference.filling():
        for number, batch in enumerate(batches, start=1):
            model.get_ref_policy_logprobs(data.collate_fn(batch))
            reference.after_batch(number)
    if state.is_rank_zero():
        new = reference.cache.rows - known
        print(f"reference log-probs: {new} rows computed, in {reference.cache.folder}", flush=True)
