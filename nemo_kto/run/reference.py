"""From a configuration to the reference policy: its mode, and its log-probs where they are precomputed."""

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
    number_of_validation_batches,
    steps_to_epoch_end,
    validation_batches,
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
from nemo_kto.run.lifecycle import leave
from nemo_kto.run.policy import Policy, load_base_weights, load_policy_weights
from nemo_kto.telemetry.progress import progress_bar
from nemo_kto.telemetry.timers import PhaseTimers, RunTimer, StopReason


class ReferenceSetup(NamedTuple):
    """The reference of a run.

    Attributes:
        policy: None where the loss needs no reference.
        synced_weights: those that are moved towards the policy now and then, if any are.
        precompute: computes the log-probs from a step to the end of its epoch, where some are left for later epochs.
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
    """The reference, and with it the weights that the policy starts from.

    Where the reference is another model, its weights are in the model while they are kept or evaluated.

    Args:
        first_step: optimizer steps that were done before this start.

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


def _reference_again(
    cfg: RunConfig,
    policy: Policy,
    other: ModelSource | None,
    cached: CachedReference,
    engine: LogProbEngine,
    timers: PhaseTimers,
) -> Callable[[], AbstractContextManager[None]]:
    """A context in which the model is the reference, after the policy has moved; call while it has not."""
    if policy.adapters is not None and other is None:
        live = _hold(cfg, policy, None, engine, timers, adapter=True).policy
        assert isinstance(live, LiveReference)
        return live.active
    return partial(_reloaded, policy, other, cached.cache)


@contextlib.contextmanager
def _reloaded(policy: Policy, other: ModelSource | None, cache: ReferenceCache) -> Iterator[None]:
    """Within the block the model has the reference's weights, read from their files; afterwards the policy's, bit for bit.

    The policy's weights of this rank are in host memory meanwhile.

    Raises:
        UserError: the files are not those that the run was started with.
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
        set_rng_state(generators)  # as if nothing had been built
        with torch.no_grad():
            for weight, value in zip(weights, kept, strict=True):
                weight.copy_(value)


@dataclass(frozen=True, kw_only=True)
class Precomputation:
    """Computes the reference log-probs of a run: of its first epoch and its validations before training, of others later.

    The examples of later epochs are those of the first, but for KL examples, which are formed within a batch, and for those
    that ``limit_train_batches`` left out.

    Attributes:
        first_step: steps that were done before this start.
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
        """Whether this start goes beyond its first epoch."""
        batches = len(self.data.train.batch_sampler)
        return self.first_step + self._steps(self.first_step) < self.trainer_cfg.total_steps(batches)

    def before_training(self) -> None:
        """Those of the epoch that the run begins with or resumes in, and of the validation examples; collective.

        The model must be the reference.

        Raises:
            Stopped: the run must stop before all are computed.
        """
        length, validation = self.trainer_cfg, self.data.validation
        train, number = batches_to_epoch_end(length, self.data.train, step=self.first_step), self._steps(self.first_step)
        if self._covers_later_epochs():
            loader = every_example(self.data.train)
            train, number = iter(loader), len(loader)
        number += number_of_validation_batches(length, validation)
        cache, settings = self.cached.cache, self.cfg.model.data
        rows = [settings.data_prefix, settings.splits_string, settings.fields, settings.seq_length, settings.truncation_mode]
        with self.timers.phase("reference"), cache.one_job(str(rows)), signals.deferred():
            known, batches = cache.size, chain(train, validation_batches(length, validation))
            reason = self._compute(batches, number, active=contextlib.nullcontext)
            if reason is not None:
                text = f"stopped by {reason.text} in the reference pass, with {cache.size} log-probs in {cache.folder}"
                leave(text, self.cfg)
        self.timers.report_and_reset()  # not the phases of a step
        if state.is_rank_zero():
            print(f"reference log-probs: {cache.size - known} sequences computed, in {cache.folder}", flush=True)

    def at_epoch_start(self, step: int, *, active: Callable[[], AbstractContextManager[None]]) -> None:
        """Those from ``step`` to the end of its epoch; collective. Where the run must stop, the rest is left out.

        Args:
            step: optimizer steps done.
            active: gives a context in which the model is the reference.
        """
        if step == self.first_step:
            return
        with self.timers.phase("reference"):
            self.cached.cache.refresh()  # without a lock: a run that waits for another job's cannot be stopped
            batches = batches_to_epoch_end(self.trainer_cfg, self.data.train, step=step)
            self._compute(batches, self._steps(step), active=active)

    def _steps(self, step: int) -> int:
        return steps_to_epoch_end(self.trainer_cfg, len(self.data.train.batch_sampler), step=step)

    def _covers_later_epochs(self) -> bool:
        """Whether all that later epochs need is known once each example has been evaluated."""
        batches = len(self.data.train.batch_sampler)
        uses_all = self.trainer_cfg.steps_per_epoch(batches) == batches
        return self.has_later_epochs and uses_all and not self.cfg.loss.record.needs_z0

    def _compute(
        self, batches: Iterator[Any], number: int, *, active: Callable[[], AbstractContextManager[None]]
    ) -> StopReason | None:
        """Why the run must stop; None if it need not, and all log-probs of the ``number`` of batches are computed."""
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
