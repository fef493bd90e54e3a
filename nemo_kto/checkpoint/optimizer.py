"""Saving and loading of the optimizer's state, with Adam's step counters, which megatron-core does not convert.

torch's AdamW counts its steps in a tensor in each parameter's state; the fused Adam of Transformer Engine (v2.9,
pytorch/optimizers/fused_adam.py) and that of apex count in an integer of each group, ``group["step"]``. Transformer Engine's
refuses a state that has more than moments and main weights. The counter is therefore stored separately: one integer, saved
by any of these optimizers and restored in the form of the one that loads it. The moments have the same names in all of them.
An optimizer that is partly offloaded to the host consists of several: torch's on the host and a fused one on the GPU.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict
from megatron.core.optimizer import MegatronOptimizer, distrib_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from nemo_kto.checkpoint.optimizer_slices import load_slices, sharded_slices
from nemo_kto.device import device

# Canonical tensors in the shapes of the weights, readable at any layout; optimizer_slices decides what a rank writes.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def optimizer_state(optimizer: MegatronOptimizer, model_state: ShardedStateDict, *, is_loading: bool) -> ShardedStateDict:
    """Return the optimizer's sharded state, either to save or as the form to load into.

    With ``is_loading``, an optimizer without a state gets one first, which the load overwrites.
    """
    step = _adam_step(optimizer)
    parts = _parts(optimizer)
    with contextlib.ExitStack() as stack:
        for part in parts:
            if is_loading and hasattr(part, "_init_optimizer_states_with_dummy_values") and not part.optimizer.state:
                part._init_optimizer_states_with_dummy_values()
            if is_distributed(part):
                stack.enter_context(_counter_of_nothing(part.optimizer, step))
                stack.enter_context(_as_it_is(part.optimizer))
                stack.enter_context(_in_slices(part))
        sharded = optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=_METADATA)
    _leave_classes_out(sharded)
    return {"optimizer": sharded, "adam_step": step}


def load_optimizer_state(optimizer: MegatronOptimizer, loaded: StateDict) -> None:
    """Restore the moments, main weights and counters that :func:`optimizer_state` saved.

    Learning rates, betas, eps and weight decay stay those of ``optimizer``: a resumed run may change them.

    Raises:
        ValueError: the saved step counter is not an integer of at least 0.
    """
    if type(loaded["adam_step"]) is not int or loaded["adam_step"] < 0:
        raise ValueError(f"adam_step must be an integer of at least 0, got {loaded['adam_step']!r}")
    parts = _parts(optimizer)
    states = [loaded["optimizer"]] if len(parts) == 1 else [loaded["optimizer"][number] for number in range(len(parts))]
    for part, its_state in zip(parts, states, strict=True):
        # megatron-core would look for Adam's counters among the saved tensors, so the tensors are loaded separately
        tensors = its_state.pop("param_state", None)
        inner = its_state.get("optimizer", its_state)
        _take_over_settings(inner["param_groups"], part.param_groups)
        _put_back_counters(inner, loaded["adam_step"], of_torch=_is_torchs(part.optimizer))
        part.load_state_dict(its_state)
        if tensors is not None:
            load_slices(part, tensors)
        _set_counters(part.optimizer, loaded["adam_step"])


def load_schedule(scheduler: OptimizerParamScheduler, saved: Mapping[str, Any], *, step: int) -> None:
    """Restore the learning rate schedule as it was after ``step`` steps.

    Raises:
        ValueError: a value is not finite, or the schedule's step count is not an integer from 0 to ``step``.
    """
    for name, value in saved.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} of the schedule must be finite, got {value}")
    if type(saved["num_steps"]) is not int or not 0 <= saved["num_steps"] <= step:
        raise ValueError(f"num_steps of the schedule must be an integer from 0 to {step}, got {saved['num_steps']!r}")
    scheduler.load_state_dict(dict(saved))


def _take_over_settings(saved: Sequence[dict[str, object]], now: Sequence[Mapping[str, object]]) -> None:
    """Give saved parameter groups the settings of the current ones: everything but the parameters and the step counter.

    This happens before the groups are loaded, because megatron-core 0.19 also matches groups by their learning rates.
    """

    def kind(group: Mapping[str, object]) -> tuple[object, ...]:
        return tuple(group.get(name) for name in ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr"))

    settings = {kind(group): {name: group[name] for name in group if name not in ("params", "step")} for group in now}
    for group in saved:
        group.update(settings[kind(group)])


def _put_back_counters(state: StateDict, step: int, *, of_torch: bool) -> None:
    """Put the step count into a state to be loaded, in the place where the loading optimizer reads it."""
    for group in state["param_groups"]:
        group["step"] = step
    if "state" in state:  # megatron-core copies common_step to the state of every parameter
        state["state"].pop("common_step", None)
        if of_torch:
            state["state"]["common_step"] = torch.tensor(float(step))


def is_distributed(optimizer: MegatronOptimizer) -> bool:
    """Return True if the state is sharded over the data-parallel ranks, which is stored in another form."""
    return any(hasattr(part, "load_parameter_state_from_fully_reshardable") for part in _parts(optimizer))


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _adams(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizer, or the optimizers that a hybrid one consists of."""
    return list(optimizer.sub_optimizers) if isinstance(optimizer, HybridDeviceOptimizer) else [optimizer]


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.Adam)  # AdamW is a subclass


def _set_counters(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set the step count of each Adam after a load."""
    if isinstance(optimizer, HybridDeviceOptimizer):
        for group in optimizer.param_groups:  # a counter in these groups would overwrite the inner optimizers' at every step
            group.pop("step", None)
    for adam in _adams(optimizer):
        if _is_torchs(adam):
            for kept in adam.state.values():
                # one tensor each: megatron-core gives all parameters the same tensor, which each would then increment
                kept["step"] = torch.tensor(float(step))
        else:
            for group in adam.param_groups:
                group["step"] = step


def _adam_step(optimizer: MegatronOptimizer) -> int:
    """Return the steps that Adam has counted: torch's counts per parameter, others per group.

    The maximum over all ranks is taken, because a pipeline stage with nothing to train has no counter.
    """
    mine = 0
    for adam in (adam for part in _parts(optimizer) for adam in _adams(part.optimizer)):
        counted = adam.state.values() if _is_torchs(adam) else adam.param_groups
        mine = max([mine, *(int(kept["step"]) for kept in counted if "step" in kept)])
    box = torch.tensor(mine, device=device.current_device())
    torch.distributed.all_reduce(box, torch.distributed.ReduceOp.MAX)
    return int(box)


def _leave_classes_out(state: StateDict) -> None:
    """Drop the optimizer classes that megatron-core stores with the settings of a group: a checkpoint is plain data."""
    if "param_groups" in state:
        for group in state["param_groups"]:
            for name in [name for name, value in group.items() if isinstance(value, type)]:
                del group[name]
    for inner in state.values():
        if isinstance(inner, dict):
            _leave_classes_out(inner)


@contextlib.contextmanager
def _in_slices(part: MegatronOptimizer) -> Iterator[None]:
    """Make the distributed optimizer return its state as slices instead of its own form.

    For its own form megatron-core runs the garbage collector afterwards, because it has gathered large tensors. With slices
    this would only stall training, so it is disabled.
    """

    def of_part(model_state: ShardedStateDict, is_loading: bool, _: object) -> ShardedStateDict:
        return sharded_slices(part, model_state, is_loading=is_loading)

    part.sharded_param_state_fully_reshardable = of_part
    distrib_optimizer.gc = SimpleNamespace(collect=lambda: 0)
    try:
        yield
    finally:
        distrib_optimizer.gc = gc
        del part.sharded_param_state_fully_reshardable


@contextlib.contextmanager
def _as_it_is(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Make an optimizer return its state in the dtypes in which it is held.

    Transformer Engine's would make fp32 copies of all bf16 moments, and the distributed optimizer, which needs only the
    settings of the groups, would discard them.
    """
    optimizer.state_dict = functools.partial(torch.optim.Optimizer.state_dict, optimizer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del optimizer.state_dict


@contextlib.contextmanager
def _counter_of_nothing(optimizer: torch.optim.Optimizer, step: int) -> Iterator[None]:
    """Give an empty torch Adam a placeholder step counter, because the distributed optimizer reads one from each.

    Adam's state is empty on a stage that has nothing to train, and before the first step.
    """
    nothing = isinstance(optimizer, torch.optim.Adam) and not optimizer.state
    if nothing:
        # a string as key instead of a parameter: state_dict leaves keys that are no tensors unchanged
        optimizer.state["nothing"] = {"step": torch.tensor(float(step))}  # type: ignore[index]
    try:
        yield
    finally:
        if nothing:
            del optimizer.state["nothing"]  # type: ignore[arg-type]
