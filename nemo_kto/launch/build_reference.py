"""From a configuration to the reference policy: how it is held, and its log-probs where they are computed beforehand."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

from nemo_kto.algorithms.duration import TrainerConfig, batches_of_run, number_of_batches
from nemo_kto.checkpoint.cached_reference import CachedReference
from nemo_kto.checkpoint.reference_cache import ReferenceCache
from nemo_kto.launch.build_data import RunData
from nemo_kto.launch.build_policy import Policy, load_base_weights
from nemo_kto.launch.schema import RunConfig
from nemo_kto.models.engine import LogProbEngine
from nemo_kto.models.lora import disable_adapters
from nemo_kto.models.reference import LiveReference, ReferencePolicy, SwappedWeights
from nemo_kto.parallel import device, state
from nemo_kto.telemetry.progress import progress_bar
from nemo_kto.telemetry.timers import PhaseTimers


class ReferenceSetup(NamedTuple):
    """The reference of a run, if it has one; ``synced_weights`` where it is moved towards the policy now and then."""

    policy: ReferencePolicy | None
    synced_weights: SwappedWeights | None = None


def choose_mode(cfg: RunConfig) -> tuple[str, str]:
    """How the reference is held (swap, adapter, cached or none), and why."""
    settings = cfg.model.reference
    if not cfg.loss.record.needs_reference:
        return "none", f"{cfg.loss.preference_loss} needs no reference"
    if settings.mode != "auto":
        return settings.mode, "set by the user"
    if settings.sync_interval:
        return "swap", "it is synced with the policy, so that its log-probs change"
    if cfg.model.peft.peft_scheme != "none" and settings.restore_from_path is None:
        return "adapter", "it is the model without what its adapters learn, and costs almost no memory"
    return "cached", "it does not change: one pass over the data serves this run, its validations and later runs"


def build_reference(
    cfg: RunConfig, policy: Policy, engine: LogProbEngine, data: RunData, trainer_cfg: TrainerConfig, timers: PhaseTimers
) -> ReferenceSetup:
    """The reference, and with it the weights that the policy starts from.

    Where the reference is another model, its weights are in the model while they are kept or evaluated.

    Raises:
        ValueError: there is another model, and the policy brings trained adapters, which are the reference.
    """
    mode, _ = choose_mode(cfg)
    if mode == "none":
        return ReferenceSetup(None)
    other = cfg.model.reference.restore_from_path
    if other is not None and policy.has_pretrained_adapters:
        raise ValueError(
            f"model.reference.restore_from_path must be null where {policy.source} brings trained adapters, which are the "
            f"reference, got {other}; leave it out, or merge the adapters first: nemo-kto export"
        )
    if other is not None:
        load_base_weights(policy, Path(other))
    if mode == "cached":
        cached = CachedReference(cache=_open_cache(cfg, policy, engine))
        _precompute(cached, cfg, engine, data, trainer_cfg)
        timers.report_and_reset()  # not the phases of a step
        setup = ReferenceSetup(cached)
    else:
        setup = _hold(cfg, policy, engine, timers, adapter=mode == "adapter")
    if other is not None:
        load_base_weights(policy, policy.source)
    return setup


def _hold(cfg: RunConfig, policy: Policy, engine: LogProbEngine, timers: PhaseTimers, *, adapter: bool) -> ReferenceSetup:
    """Hold the weights that the model has now."""
    if adapter and not policy.has_pretrained_adapters:
        return ReferenceSetup(LiveReference(engine=engine, active=partial(disable_adapters, policy.chunks)))
    # Trained adapters are the reference: they are swapped, and the base model, which is frozen, is not.
    other_base = cfg.model.reference.restore_from_path is not None
    parameters = [weight for chunk in policy.chunks for weight in chunk.parameters() if other_base or weight.requires_grad]
    weights = SwappedWeights(parameters=parameters, phase=timers.phase)
    live = LiveReference(engine=engine, active=weights.active)
    return ReferenceSetup(live, weights if cfg.model.reference.sync_interval else None)


def _precompute(
    reference: CachedReference, cfg: RunConfig, engine: LogProbEngine, data: RunData, trainer_cfg: TrainerConfig
) -> None:
    """Compute the log-probs of the run that the cache does not have; the model must be the reference."""
    cache, known = reference.cache, reference.cache.size
    batches = progress_bar(
        batches_of_run(trainer_cfg, data.train, data.validation),
        total=number_of_batches(trainer_cfg, data.train, data.validation),
        title="reference",
        shown=state.is_rank_zero(),
    )
    reference.precompute((cfg.recipe.sequences(data.collate_fn(batch)) for batch in batches), engine)
    if state.is_rank_zero():
        print(f"reference log-probs: {cache.size - known} sequences computed, in {cache.folder}", flush=True)


def _open_cache(cfg: RunConfig, policy: Policy, engine: LogProbEngine) -> ReferenceCache:
    settings = {
        "precision": cfg.trainer.precision,
        "device": device.current_device().type,
        "mean over tokens": engine.average_log_probs,
        "attention within documents": cfg.model.data.reset_attention_mask,
    }
    models = [cfg.model.reference.restore_from_path or policy.source, policy.base_model, policy.adapter_folder]
    folders = [Path(model) for model in models if model is not None]
    return ReferenceCache(folder=Path(cfg.model.data.cache_dir), settings=settings, models=folders)
