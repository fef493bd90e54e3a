"""From a configuration to the reference policy: how it is held, and its log-probs where they are computed beforehand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from megatron.core.utils import get_model_config

from nemo_kto.algorithms.duration import TrainerConfig, batches_of_run, number_of_batches
from nemo_kto.checkpoint.adapter import load_adapter, read_adapter_settings
from nemo_kto.checkpoint.cached_reference import CachedReference
from nemo_kto.checkpoint.checkpoint_files import is_checkpoint
from nemo_kto.checkpoint.distributed import load_weights_only, saved_adapters
from nemo_kto.checkpoint.reference_cache import ReferenceCache
from nemo_kto.checkpoint.sources import ModelSource, find_source
from nemo_kto.launch.build_data import RunData
from nemo_kto.launch.build_policy import Policy, load_base_weights, load_policy_weights
from nemo_kto.launch.choices import choose_mode
from nemo_kto.launch.leave import leave
from nemo_kto.launch.schema import RunConfig
from nemo_kto.models.engine import LogProbEngine
from nemo_kto.models.gpt import build_gpt
from nemo_kto.models.lora import add_adapters, disable_adapters, merge_adapters, share_weights, zero_adapters
from nemo_kto.models.reference import LiveReference, ReferencePolicy, SwappedWeights
from nemo_kto.models.sequences import SequenceBatch
from nemo_kto.parallel import device, signals, state
from nemo_kto.parallel.overlap import finish_gathers
from nemo_kto.telemetry.progress import progress_bar
from nemo_kto.telemetry.timers import PhaseTimers, RunTimer, StopReason


class ReferenceSetup(NamedTuple):
    """The reference of a run, if it has one; ``synced_weights`` where it is moved towards the policy now and then."""

    policy: ReferencePolicy | None
    synced_weights: SwappedWeights | None = None


def build_reference(
    cfg: RunConfig,
    policy: Policy,
    engine: LogProbEngine,
    data: RunData,
    trainer_cfg: TrainerConfig,
    timers: PhaseTimers,
    run_timer: RunTimer,
) -> ReferenceSetup:
    """The reference, and with it the weights that the policy starts from.

    Where the reference is another model, its weights are in the model while they are kept or evaluated.

    Raises:
        UserError: there is another model, which is not there or of another shape.
        Stopped: the run must stop before all log-probs are computed; those that are, are in the cache.
    """
    mode, _ = choose_mode(cfg)
    other = find_other(cfg, policy)
    if mode == "none":
        return ReferenceSetup(None)
    if other is not None:
        load_model(policy, other)
    if mode == "cached":
        cached = CachedReference(cache=_open_cache(cfg, policy, other, engine))
        with timers.phase("reference"):
            _precompute(cached, cfg, engine, data, trainer_cfg, run_timer)
        timers.report_and_reset()  # not the phases of a step
        setup = ReferenceSetup(cached)
    else:
        setup = _hold(cfg, policy, other, engine, timers, adapter=mode == "adapter")
    if other is not None:
        load_policy_weights(policy)
    return setup


def load_model(policy: Policy, other: ModelSource) -> None:
    """Fill the policy's model with another one: its adapters become part of the weights, and the policy's own add nothing.

    Raises:
        UserError: it is of another shape.
    """
    load_base_weights(policy, other.base)
    zero_adapters(policy.chunks)
    if (adapters := other.adapters) is None:
        return
    saved = saved_adapters(adapters) if is_checkpoint(adapters) else None
    settings = read_adapter_settings(adapters) if saved is None else saved.settings
    for number, chunk in enumerate(policy.chunks):
        # fp32, whatever the policy is: adapters are small beside their weights, and are rounded once with them
        carrier = build_gpt(
            policy.architecture,
            params_dtype=torch.float32,
            split=policy.split,
            chunk=number,
            pre_process=False,  # nothing outside of the layers is adapted
            post_process=False,
            expert_parallel=get_model_config(chunk).expert_model_parallel_size,
            empty=True,
        )
        add_adapters(carrier, settings, architecture=policy.architecture, seed=0)
        share_weights(carrier, chunk)
        if saved is None:
            load_adapter([carrier], policy.architecture, adapters)
        else:
            load_weights_only(adapters, [carrier])
        merge_adapters([carrier])


def find_other(cfg: RunConfig, policy: Policy) -> ModelSource | None:
    """What the configuration names as the reference; None where that is what the policy starts from."""
    if (folder := cfg.model.reference.restore_from_path) is None:
        return None
    named, start = find_source(Path(folder), default_base=policy.base_model), policy.start
    return None if named.resolve() == start.resolve() else named


def _hold(
    cfg: RunConfig, policy: Policy, other: ModelSource | None, engine: LogProbEngine, timers: PhaseTimers, *, adapter: bool
) -> ReferenceSetup:
    """Hold the weights that the model has now."""
    if adapter and policy.start.adapters is None:
        without = partial(disable_adapters, policy.chunks)
        return ReferenceSetup(LiveReference(engine=engine, active=without, disables_adapters=True))
    # Trained adapters are the reference: they are swapped, and the base model, which is frozen, is not.
    weights_of = [weight for chunk in policy.chunks for weight in chunk.parameters()]
    parameters = [weight for weight in weights_of if other is not None or weight.requires_grad]
    moves = cfg.model.reference.sync_interval > 0
    gathers = partial(finish_gathers, policy.chunks)
    weights = SwappedWeights(parameters=parameters, finish_gathers=gathers, moves=moves, phase=timers.phase)
    return ReferenceSetup(LiveReference(engine=engine, active=weights.active), weights if moves else None)


def _precompute(
    reference: CachedReference,
    cfg: RunConfig,
    engine: LogProbEngine,
    data: RunData,
    trainer_cfg: TrainerConfig,
    run_timer: RunTimer,
) -> None:
    """Compute the log-probs of the run that the cache does not have; the model must be the reference."""
    cache, settings = reference.cache, cfg.model.data
    rows = [settings.data_prefix, settings.splits_string, settings.fields, settings.seq_length, settings.truncation_mode]
    reasons: list[StopReason] = []

    def until_stopped() -> Iterator[Sequence[SequenceBatch]]:
        for batch in batches:
            if (reason := run_timer.stop_reason()) is not None:
                reasons.append(reason)
                return
            yield cfg.recipe.sequences(data.collate_fn(batch))

    with cache.one_job(str(rows)), signals.deferred():
        known = cache.size
        batches = progress_bar(
            batches_of_run(trainer_cfg, data.train, data.validation),
            total=number_of_batches(trainer_cfg, data.train, data.validation),
            title="reference",
            shown=state.is_rank_zero(),
        )
        reference.precompute(until_stopped(), engine)
        if reasons:
            leave(f"stopped by {reasons[0].text} in the reference pass, with {cache.size} log-probs in {cache.folder}", cfg)
    if state.is_rank_zero():
        print(f"reference log-probs: {cache.size - known} sequences computed, in {cache.folder}", flush=True)


def _open_cache(cfg: RunConfig, policy: Policy, other: ModelSource | None, engine: LogProbEngine) -> ReferenceCache:
    settings = {
        "precision": cfg.trainer.precision,
        "device": device.current_device().type,
        "mean over tokens": engine.average_log_probs,
        "attention within documents": cfg.model.data.reset_attention_mask,
        **({} if cfg.model.fp8 is None else {"fp8": cfg.model.fp8}),
    }
    models = [policy.source, policy.base_model, policy.adapter_folder] if other is None else [other.base, other.adapters]
    folders = [Path(model) for model in models if model is not None]
    data = cfg.model.data
    return ReferenceCache(folder=Path(data.cache_dir), settings=settings, models=folders, shared=data.cache_shared)
