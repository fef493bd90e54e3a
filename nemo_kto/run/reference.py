"""Build the reference policy in its mode, and precompute its log-probs if they are cached."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.utils import get_model_config

from nemo_kto.algorithms.duration import (
    TrainerConfig,
    batches_to_epoch_end,
    steps_to_epoch_end,
    validation_batches,
    validation_sets,
)
from nemo_kto.artifacts.checkpoint_files import is_checkpoint
from nemo_kto.artifacts.sources import ModelSource, find_source
from nemo_kto.checkpoint.distributed import load_weights_only, saved_adapters
from nemo_kto.checkpoint.model_state import get_rng_state, set_rng_state
from nemo_kto.config.choices import choose_mode
from nemo_kto.config.schema import RunConfig
from nemo_kto.data.batches.loader import every_example
from nemo_kto.device import device
from nemo_kto.distributed import state
from nemo_kto.distributed.gradients import finish_gathers
from nemo_kto.huggingface.adapter import load_adapter, read_adapter_settings
from nemo_kto.models.engine.cached_reference import CachedReference, ReferenceCache
from nemo_kto.models.engine.engine import LogProbEngine
from nemo_kto.models.engine.reference import LiveReference, ReferencePolicy, SwappedWeights
from nemo_kto.models.engine.sequences import SequenceBatch
from nemo_kto.models.gpt import build_gpt
from nemo_kto.models.lora.adapters import add_adapters, disable_adapters, merge_adapters, share_weights, zero_adapters
from nemo_kto.processes import signals
from nemo_kto.run.data import RunData
from nemo_kto.run.lifecycle import stop_run
from nemo_kto.run.policy import Policy, load_base_weights, load_policy_weights
from nemo_kto.telemetry.progress import progress_bar
from nemo_kto.telemetry.timers import PhaseTimers, RunTimer, StopReason


class ReferenceSetup(NamedTuple):
    """The reference of a run.

    Attributes:
        policy: the reference policy; None if the loss needs no reference.
        synced_weights: reference weights that are moved towards the policy at intervals; None if they stay fixed.
        precompute: compute the log-probs from a step to the end of its epoch; None if the mode is not "cached" or no further
            epoch follows.
    """

    policy: ReferencePolicy | None
    synced_weights: SwappedWeights | None = None
    precompute: Callable[[int], None] | None = None


def build_reference(
    cfg: RunConfig,
    policy: Policy,
    engine: LogProbEngine,
    data: RunData,
    trainer_cfg: TrainerConfig,
    timers: PhaseTimers,
    run_timer: RunTimer,
    *,
    first_step: int,
) -> ReferenceSetup:
    """Build the reference; afterwards the model holds the initial weights of the policy.

    If the reference is another model, its weights are loaded into the policy's model to copy or evaluate them, and the
    initial weights of the policy are loaded again at the end.

    Args:
        cfg: configuration of the run.
        policy: the policy with its initial weights.
        engine: runs the model.
        data: data of the run.
        trainer_cfg: run length.
        timers: measure the phases of a step.
        run_timer: decides when the run must stop.
        first_step: optimizer steps done before this run was resumed; 0 for a new run.

    Raises:
        UserError: the reference model does not exist or has another shape.
        Stopped: the run must stop before all log-probs are computed; those already computed are in the cache.
    """
    mode, _ = choose_mode(cfg)
    other = find_other(cfg, policy)
    if mode == "none":
        return ReferenceSetup(None)
    if other is not None:
        load_model(policy, other)
    if mode == "cached":
        cached = CachedReference(cache=_open_cache(cfg, policy, other, engine))
        precomputation = Precomputation(
            cfg=cfg,
            cached=cached,
            engine=engine,
            data=data,
            trainer_cfg=trainer_cfg,
            timers=timers,
            run_timer=run_timer,
            first_step=first_step,
        )
        precomputation.before_training()
        later = None
        if precomputation.has_later_epochs:
            active = _reference_again(cfg, policy, other, cached, engine, timers)
            later = partial(precomputation.at_epoch_start, active=active)
        setup = ReferenceSetup(cached, precompute=later)
    else:
        setup = _hold(cfg, policy, other, engine, timers, adapter=mode == "adapter")
    if other is not None:
        load_policy_weights(policy)
    return setup


def load_model(policy: Policy, other: ModelSource) -> None:
    """Load another model into the policy's model.

    The adapters of the other model are merged into the weights. The adapters of the policy are reset so that they have no
    effect.

    Raises:
        UserError: the other model has another shape.
    """
    load_base_weights(policy, other.base)
    zero_adapters(policy.chunks)
    if (adapters := other.adapters) is None:
        return
    saved = saved_adapters(adapters) if is_checkpoint(adapters) else None
    settings = read_adapter_settings(adapters) if saved is None else saved.settings
    for number, chunk in enumerate(policy.chunks):
        # fp32 even if the policy is bf16: adapters are small, and are then rounded only once, together with the weights
        carrier = build_gpt(
            policy.architecture,
            params_dtype=torch.float32,
            split=policy.split,
            chunk=number,
            pre_process=False,  # only layers have adapters
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
    """Return the configured reference model; None if none is set, or if it is the model from which the policy starts."""
    if (folder := cfg.model.reference.restore_from_path) is None:
        return None
    named, start = find_source(Path(folder), default_base=policy.base_model), policy.start
    return None if named.resolve() == start.resolve() else named


def _hold(
    cfg: RunConfig, policy: Policy, other: ModelSource | None, engine: LogProbEngine, timers: PhaseTimers, *, adapter: bool
) -> ReferenceSetup:
    """Build a reference from the current weights of the model."""
    if adapter and policy.start.adapters is None:
        without = partial(disable_adapters, policy.chunks)
        return ReferenceSetup(LiveReference(engine=engine, active=without, disables_adapters=True))
    # Only parameters that differ from the policy's are swapped. Without another model, these are the trained ones: all
    # weights, or only the adapters, whose frozen base model is shared with the policy.
    weights_of = [weight for chunk in policy.chunks for weight in chunk.parameters()]
    parameters = [weight for weight in weights_of if other is not None or weight.requires_grad]
    moves = cfg.model.reference.sync_interval > 0
    gathers = partial(finish_gathers, policy.chunks)
    weights = SwappedWeights(parameters=parameters, finish_gathers=gathers, moves=moves, phase=timers.phase)
    return ReferenceSetup(LiveReference(engine=engine, active=weights.active), weights if moves else None)


def _reference_again(
    cfg: RunConfig,
    policy: Policy,
    other: ModelSource | None,
    cached: CachedReference,
    engine: LogProbEngine,
    timers: PhaseTimers,
) -> Callable[[], AbstractContextManager[None]]:
    """Return a function whose context turns the model into the reference, also after updates of the policy.

    Call it before the first update of the policy.
    """
    if policy.adapters is not None and other is None:
        live = _hold(cfg, policy, None, engine, timers, adapter=True).policy
        assert isinstance(live, LiveReference)
        return live.active
    return partial(_reloaded, policy, other, cached.cache)


@contextlib.contextmanager
def _reloaded(policy: Policy, other: ModelSource | None, cache: ReferenceCache) -> Iterator[None]:
    """Load the reference weights from their files for the block, and restore the policy weights exactly afterwards.

    During the block, the policy weights of this rank are in host memory.

    Raises:
        UserError: the files have changed since the start of the run.
    """
    cache.check_models()
    finish_gathers(policy.chunks)
    weights = [weight for chunk in policy.chunks for weight in chunk.parameters()]
    kept, generators = device.copied_to_host(weights), get_rng_state()
    try:
        if other is None:
            load_policy_weights(policy)
        else:
            load_model(policy, other)
        yield
    finally:
        set_rng_state(generators)  # building modules has drawn random numbers
        with torch.no_grad():
            for weight, value in zip(weights, kept, strict=True):
                weight.copy_(value)


@dataclass(frozen=True, kw_only=True)
class Precomputation:
    """Precomputation of the reference log-probs of a run.

    The log-probs for the first epoch and for the validations are computed before training, those for each later epoch when
    it begins. Later epochs have the same examples as the first one, except for KL examples, which are formed within a batch,
    and for examples that ``limit_train_batches`` left out.

    Attributes:
        first_step: optimizer steps done before this run was resumed; 0 for a new run.
    """

    cfg: RunConfig
    cached: CachedReference
    engine: LogProbEngine
    data: RunData
    trainer_cfg: TrainerConfig
    timers: PhaseTimers
    run_timer: RunTimer
    first_step: int

    @property
    def has_later_epochs(self) -> bool:
        """Whether the run continues beyond the epoch in which it starts or is resumed."""
        batches = len(self.data.train.batch_sampler)
        return self.first_step + self._steps(self.first_step) < self.trainer_cfg.total_steps(batches)

    def before_training(self) -> None:
        """Compute the log-probs for the epoch in which the run starts or is resumed, and for validation; collective.

        The model must hold the reference weights.

        Raises:
            Stopped: the run must stop before all log-probs are computed.
        """
        length = self.trainer_cfg
        validation = validation_sets(self.data.validation, limit=length.limit_val_batches)
        train, number = batches_to_epoch_end(length, self.data.train, step=self.first_step), self._steps(self.first_step)
        if self._covers_later_epochs():
            loader = every_example(self.data.train)
            train, number = iter(loader), len(loader)
        number += sum(each.batches for each in validation)
        cache, settings = self.cached.cache, self.cfg.model.data
        rows = [settings.data_prefix, settings.splits_string, settings.fields, settings.seq_length, settings.truncation_mode]
        with self.timers.phase("reference"), cache.one_job(str(rows)), signals.deferred():
            known, batches = cache.size, chain(train, validation_batches(validation))
            reason = self._compute(batches, number, active=contextlib.nullcontext)
            if reason is not None:
                text = f"stopped by {reason.text} in the reference pass, with {cache.size} log-probs in {cache.folder}"
                stop_run(text, self.cfg)
        self.timers.report_and_reset()  # these phases are not part of a step
        if state.is_rank_zero():
            print(f"reference log-probs: {cache.size - known} sequences computed, in {cache.folder}", flush=True)

    def at_epoch_start(self, step: int, *, active: Callable[[], AbstractContextManager[None]]) -> None:
        """Compute the log-probs from ``step`` to the end of its epoch, or until the run must stop; collective.

        Args:
            step: optimizer steps done so far.
            active: return a context in which the model is the reference.
        """
        if step == self.first_step:
            return
        with self.timers.phase("reference"):
            self.cached.cache.refresh()  # without a lock: a run cannot be stopped while it waits for another job
            batches = batches_to_epoch_end(self.trainer_cfg, self.data.train, step=step)
            self._compute(batches, self._steps(step), active=active)

    def _steps(self, step: int) -> int:
        return steps_to_epoch_end(self.trainer_cfg, len(self.data.train.batch_sampler), step=step)

    def _covers_later_epochs(self) -> bool:
        """Return whether one pass over all examples gives the log-probs of all later epochs."""
        batches = len(self.data.train.batch_sampler)
        uses_all = self.trainer_cfg.steps_per_epoch(batches) == batches
        return self.has_later_epochs and uses_all and not self.cfg.loss.record.needs_z0

    def _compute(
        self, batches: Iterator[Any], number: int, *, active: Callable[[], AbstractContextManager[None]]
    ) -> StopReason | None:
        """Compute the log-probs of ``number`` batches; return the reason if the run must stop first, else None."""
        reasons: list[StopReason] = []

        def until_stopped() -> Iterator[Sequence[SequenceBatch]]:
            for batch in progress_bar(batches, total=number, title="reference", shown=state.is_rank_zero()):
                if (reason := self.run_timer.stop_reason()) is not None:
                    reasons.append(reason)
                    return
                yield self.cfg.recipe.sequences(self.data.collate_fn(batch))

        self.cached.precompute(until_stopped(), self.engine, active=active)
        return reasons[0] if reasons else None


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
