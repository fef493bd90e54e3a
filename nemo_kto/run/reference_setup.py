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

from nemo_kto.algorithms.duration import batches_to_epoch_end, steps_to_epoch_end, validation_batches, validation_sets
from nemo_kto.checkpoint.manager import load_weights_only, saved_adapters
from nemo_kto.checkpoint.sharded_state import get_rng_state, set_rng_state
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.data.batches.loader import every_example
from nemo_kto.device import device
from nemo_kto.distributed import state
from nemo_kto.distributed.gradients import finish_gathers
from nemo_kto.huggingface.peft import load_adapter, read_adapter_settings
from nemo_kto.model_files.checkpoint_files import is_checkpoint
from nemo_kto.model_files.model_folders import ModelSource
from nemo_kto.models.engine.engine import LogProbEngine
from nemo_kto.models.engine.reference import CachedReference, LiveReference, ReferenceCache, ReferencePolicy, SwappedWeights
from nemo_kto.models.engine.sequences import SequenceBatch
from nemo_kto.models.flops import Passes
from nemo_kto.models.gpt import build_gpt
from nemo_kto.models.lora.adapters import add_adapters, disable_adapters, merge_adapters, share_weights, zero_adapters
from nemo_kto.processes import signals
from nemo_kto.run.data import RunData
from nemo_kto.run.lifecycle import stop_run
from nemo_kto.run.policy import Policy, load_base_weights, load_policy_weights
from nemo_kto.run.samples import Sampler
from nemo_kto.telemetry.display import progress_bar
from nemo_kto.telemetry.watch import PhaseTimers, RunTimer, StopReason

# Keys in model.data that determine the rows: jobs that compute log-probs of the same rows take turns.
_KEYS_OF_ROWS = (
    "data_prefix", "splits_string", "fields", "labels", "json_columns", "drop", "seq_length", "truncation_mode",
)  # fmt: skip


class ReferenceSetup(NamedTuple):
    """The reference of a run."""

    policy: ReferencePolicy | None  # None if the loss needs no reference
    synced_weights: SwappedWeights | None = None  # moved towards the policy at intervals; None if they stay fixed
    # Computes the log-probs from a step to the end of its epoch; None if not "cached", or if no further epoch follows.
    precompute: Callable[[int], None] | None = None


def build_reference(
    run: ResolvedRun,
    policy: Policy,
    engine: LogProbEngine,
    *,
    data: RunData,
    timers: PhaseTimers,
    run_timer: RunTimer,
    on_gpu: bool,  # whether swapped weights stay in the memory of the GPU
    first_step: int,  # optimizer steps done before this run was resumed; 0 for a new run
    sampler: Sampler | None,  # takes samples of the reference
) -> ReferenceSetup:
    """Build the reference; before and afterwards the model holds the initial weights of the policy.

    If the reference is another model, its weights are loaded into the policy's model in between, to copy or evaluate them.

    Raises:
        UserError: the reference model does not exist or has another shape.
        Stopped: the run must stop before all log-probs are computed; those already computed are in the cache.
    """
    mode, other = run.reference.name, run.reference_model
    if mode == "none":
        if sampler is not None:
            sampler.before_training()
        return ReferenceSetup(None)
    if other is not None:
        load_model(policy, other)
    if mode == "cached":
        precomputation = Precomputation(
            run=run,
            cached=CachedReference(cache=_open_cache(run, policy, engine)),
            engine=engine,
            data=data,
            timers=timers,
            run_timer=run_timer,
            first_step=first_step,
        )
        setup = precomputation.before_training(policy, on_gpu=on_gpu)
    else:
        setup = _live_reference(run, policy, engine, timers, disables_adapters=mode == "adapter", on_gpu=on_gpu)
    if sampler is not None:
        sampler.before_training()  # while the model holds the weights of the reference
    if other is not None:
        load_policy_weights(policy)
    return setup


def load_model(policy: Policy, other: ModelSource) -> None:
    """Load another model, with its adapters merged, into the policy's model; raise UserError if it has another shape.

    The adapters of the policy are reset so that they have no effect.
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


def _live_reference(
    run: ResolvedRun, policy: Policy, engine: LogProbEngine, timers: PhaseTimers, *, disables_adapters: bool, on_gpu: bool
) -> ReferenceSetup:
    """Build a reference from the current weights of the model."""
    if disables_adapters and not run.files.has_adapters:
        without = partial(disable_adapters, policy.chunks)
        return ReferenceSetup(LiveReference(engine=engine, active=without, passes=Passes(disabled=1)))
    # Only parameters that differ from the policy's are swapped. Without another model, these are the trained ones: all
    # weights, or only the adapters, whose frozen base model is shared with the policy.
    all_differ = run.reference_model is not None
    moves = run.cfg.model.reference.sync_interval > 0
    weights = SwappedWeights(
        parameters=[each for chunk in policy.chunks for each in chunk.parameters() if all_differ or each.requires_grad],
        finish_gathers=partial(finish_gathers, policy.chunks),
        on_device=on_gpu,
        moves=moves,
        phase=timers.phase,
    )
    live = LiveReference(engine=engine, active=weights.active, passes=Passes(forward=1))
    return ReferenceSetup(live, weights if moves else None)


@contextlib.contextmanager
def _reloaded(policy: Policy, other: ModelSource | None, cache: ReferenceCache) -> Iterator[None]:
    """Load the reference weights from their files for the block, in which the policy weights are in host memory.

    The policy weights are restored exactly. Raises UserError if the files have changed since the start of the run.
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
    """

    run: ResolvedRun
    cached: CachedReference
    engine: LogProbEngine
    data: RunData
    timers: PhaseTimers
    run_timer: RunTimer
    first_step: int  # optimizer steps done before this run was resumed; 0 for a new run

    def before_training(self, policy: Policy, *, on_gpu: bool) -> ReferenceSetup:
        """Compute the log-probs for the epoch in which the run starts or is resumed, and for validation; collective.

        The model must hold the reference weights; call it before the first update of the policy. Raises Stopped if the run
        must stop before all log-probs are computed.
        """
        run, length, cache = self.run, self.run.length, self.cached.cache
        epoch_batches, number = len(self.data.train.batch_sampler), self._steps_to_epoch_end(self.first_step)
        has_later_epochs = self.first_step + number < length.total_steps(epoch_batches)
        train = batches_to_epoch_end(length, self.data.train, step=self.first_step)
        sees_all = length.steps_per_epoch(epoch_batches) == epoch_batches and not run.cfg.loss.definition.needs_z0
        if has_later_epochs and sees_all:
            loader = every_example(self.data.train)  # one pass over all examples gives the log-probs of all later epochs
            train, number = iter(loader), len(loader)
        validation = validation_sets(self.data.validation, limit=length.limit_val_batches)
        number += sum(each.batches for each in validation)
        rows = [getattr(run.cfg.model.data, key) for key in _KEYS_OF_ROWS]
        with self.timers.phase("reference"), cache.one_job(str(rows)), signals.deferred():
            known, batches = cache.size, chain(train, validation_batches(validation))
            reason = self._compute(batches, number, active=contextlib.nullcontext)
            if reason is not None:
                text = f"stopped by {reason.text} in the reference pass, with {cache.size} log-probs in {cache.folder}"
                stop_run(text, requeues=run.cfg.trainer.requeue)
        self.timers.report_and_reset()  # these phases are not part of a step
        if state.is_rank_zero():
            print(f"reference log-probs: {cache.size - known} sequences computed, in {cache.folder}", flush=True)
        if not has_later_epochs:
            return ReferenceSetup(self.cached)
        # A context that turns the model into the reference, also after updates of the policy.
        active: Callable[[], AbstractContextManager[None]] = partial(_reloaded, policy, run.reference_model, cache)
        if policy.adapters is not None and run.reference_model is None:
            live = _live_reference(run, policy, self.engine, self.timers, disables_adapters=True, on_gpu=on_gpu).policy
            assert isinstance(live, LiveReference)
            active = live.active
        return ReferenceSetup(self.cached, precompute=partial(self.at_epoch_start, active=active))

    def at_epoch_start(self, step: int, *, active: Callable[[], AbstractContextManager[None]]) -> None:
        """Compute the log-probs from ``step`` to the end of its epoch, or until the run must stop; collective.

        ``active`` returns a context in which the model is the reference.
        """
        if step == self.first_step:
            return
        with self.timers.phase("reference"):
            self.cached.cache.refresh()  # without a lock: a run cannot be stopped while it waits for another job
            batches = batches_to_epoch_end(self.run.length, self.data.train, step=step)
            self._compute(batches, self._steps_to_epoch_end(step), active=active)

    def _steps_to_epoch_end(self, step: int) -> int:
        return steps_to_epoch_end(self.run.length, len(self.data.train.batch_sampler), step=step)

    def _compute(
        self, batches: Iterator[Any], number: int, *, active: Callable[[], AbstractContextManager[None]]
    ) -> StopReason | None:
        """Compute the log-probs of ``number`` batches; return the reason if the run must stop first."""
        reasons: list[StopReason] = []

        def until_stopped() -> Iterator[Sequence[SequenceBatch]]:
            for batch in progress_bar(batches, total=number, title="reference", shown=state.is_rank_zero()):
                if (reason := self.run_timer.stop_reason()) is not None:
                    reasons.append(reason)
                    return
                yield self.run.cfg.recipe.sequences(batch)

        self.cached.precompute(until_stopped(), self.engine, active=active)
        return reasons[0] if reasons else None


def _open_cache(run: ResolvedRun, policy: Policy, engine: LogProbEngine) -> ReferenceCache:
    """Open the cache of log-probs of this reference; its settings and models determine the folder."""
    model, other = run.cfg.model, run.reference_model
    settings = {
        "precision": run.cfg.trainer.precision,
        "device": device.current_device().type,
        "mean over tokens": engine.average_log_probs,
        **{name: value for name in ("fp8", "quantize") if (value := getattr(model, name)) is not None},
    }
    own = [run.files.source, policy.base_model, run.files.adapter_folder]
    models = [*filter(None, own if other is None else [other.base, other.adapters])]
    return ReferenceCache(
        folder=Path(model.data.cache_dir), settings=settings, models=models, shared=model.data.cache_shared
    )
