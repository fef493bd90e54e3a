"""Sharded state of weights, adapters and optimizer, and the random generators of a rank.

torch's AdamW counts its steps in a tensor in each parameter's state; the fused Adam of Transformer Engine (v2.9,
pytorch/optimizers/fused_adam.py) and that of apex count in an integer of each group, ``group["step"]``. Transformer Engine's
refuses a state that has more than moments and main weights. The counter is therefore stored separately: one integer, saved
by any of these optimizers and restored in the form of the one that loads it. The moments have the same names in all of them.
An optimizer that is partly offloaded to the host consists of several: torch's on the host and a fused one on the GPU.

The distributed optimizer cuts each parameter's flat values at arbitrary positions and gives every data-parallel rank one
slice. megatron-core's own layout-independent form ("fully_reshardable") first gathers all slices on every rank: 12 bytes for
each parameter of the model, in host memory. A torch checkpoint accepts rectangles of a tensor, and a slice of a flat tensor
consists of a few: the rest of a row, whole rows, and the beginning of a row. The slices are therefore written into the same
tensors under the same names, without communication between ranks, and checkpoints of both forms are read in the same way.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory, StateDict
from megatron.core.optimizer import MegatronOptimizer, distrib_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.device import device
from nemo_kto.distributed.gradients import finish_gathers
from nemo_kto.distributed.state import max_over_ranks
from nemo_kto.errors import UserError
from nemo_kto.model_files.checkpoint_files import adapter_settings
from nemo_kto.models.engine.optimizer import Bf16MomentsAdamW
from nemo_kto.models.engine.reference import SwappedWeights
from nemo_kto.models.lora.adapters import is_adapter

# Canonical tensors in the shapes of the weights, readable at any layout; of these a rank writes its slices.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
STATES = ("param", "exp_avg", "exp_avg_sq")  # main weights and moments


def get_rng_state() -> dict[str, Any]:
    """Return the states of this rank's random generators, as tensors and plain data."""
    numpy_state = np.random.get_state(legacy=False)
    return {
        "torch": torch.get_rng_state(),
        "device": device.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
        "python": random.getstate(),
        "numpy": json.dumps(numpy_state, default=np.ndarray.tolist),
    }


def set_rng_state(saved: Mapping[str, Any]) -> None:
    """Restore :func:`get_rng_state`; raise ValueError if the generators of model-parallel regions differ."""
    tracker = get_cuda_rng_tracker()
    found, expected = (
        {name: type(each) for name, each in dict(states).items()} for states in (saved["tracker"], tracker.get_states())
    )
    if found != expected:
        raise ValueError(f"tracker must contain the generators {', '.join(expected)}, got {', '.join(map(str, found))}")
    torch.set_rng_state(saved["torch"])
    device.set_rng_state(saved["device"])
    tracker.set_states(saved["tracker"])
    random.setstate(saved["python"])
    np.random.set_state(json.loads(saved["numpy"]))


@dataclass(frozen=True, kw_only=True)
class SavedAdapters:
    """The adapter entry of a checkpoint that holds only adapters."""

    base_model: Path  # source of the base model's weights: a Hugging Face folder or one of our own checkpoints
    settings: LoRASettings
    base_format: str | None = None  # format of the quantized weights of the base model during training


def dtype_name(chunks: Sequence[nn.Module]) -> str:
    """Return the dtype of a model's weights, such as "bfloat16"."""
    return str(next(chunks[0].parameters()).dtype).removeprefix("torch.")


def adapters_of(chunks: Sequence[nn.Module]) -> LoRASettings | None:
    """Return the LoRA settings of a model; None if its own weights are trained."""
    return unwrap_model(chunks[0]).adapters


def adapters_in(info: Mapping[str, Any]) -> SavedAdapters | None:
    """Return the adapter entry of a trainer.json; None if the checkpoint holds all weights of a model."""
    if (entry := info.get("adapters")) is None:
        return None
    base_model, base_format = Path(entry["base_model"]), entry.get("base_format")
    return SavedAdapters(base_model=base_model, settings=adapter_settings(entry), base_format=base_format)


def check_adapters(saved: SavedAdapters | None, chunks: Sequence[nn.Module]) -> None:
    """Raise UserError unless a model has the adapters of a checkpoint; their dropout may differ."""
    expected, found = _describe(None if saved is None else saved.settings), _describe(adapters_of(chunks))
    if found != expected:
        raise UserError(
            f"the model must have the adapters of the checkpoint ({expected}), got {found}; restore model.peft, or start a "
            "new run in another folder"
        )


def sharded_weights(chunks: Sequence[nn.Module], *, adapters: bool) -> ShardedStateDict:
    """Return the sharded state of the adapters, or of everything but the adapters: ``model0`` for the first chunk and so on.

    It holds only weights, so that it is the same for layers of megatron-core and of Transformer Engine. The extra fp8 state
    of these layers is left out: with the fp8 scaling used in this program it is empty.
    """
    finish_gathers(chunks)
    # If only some layers are adapted, they need entries of their own instead of parts of one entry for all layers.
    metadata = {"non_homogeneous_layers": True} if adapters else None
    states = [unwrap_model(chunk).sharded_state_dict(metadata=metadata) for chunk in chunks]
    return {
        f"model{number}": {name: value for name, value in state.items() if is_adapter(name) == adapters and _is_weight(name)}
        for number, state in enumerate(states)
    }


def load_weights(chunks: Sequence[nn.Module], loaded: StateDict, *, adapters: bool) -> None:
    """Load weights in the form of :func:`sharded_weights`; raise RuntimeError if some are missing or unexpected."""
    for number, chunk in enumerate(chunks):
        state = loaded.get(f"model{number}", {})  # a stage without adapters has none
        missing, unexpected = unwrap_model(chunk).load_state_dict(state, strict=False)
        missing = [name for name in missing if is_adapter(name) == adapters and _is_weight(name)]
        if missing or unexpected:
            raise RuntimeError(f"the weights do not fit the model: missing {missing}, unexpected {unexpected}")


def sharded_reference(chunks: Sequence[nn.Module], weights: SwappedWeights) -> ShardedStateDict:
    """Return the sharded state of a synced reference: the model's entries, with the reference's fp32 values.

    For a model with adapters these are the adapters, and also the base model if the reference has a different one.
    """
    base, adapters = (sharded_weights(chunks, adapters=adapters) for adapters in (False, True))
    reference: ShardedStateDict = {}
    for part, values in zip(base, _reference_values(chunks, weights), strict=True):
        state = {**base[part], **adapters[part]}
        entries = {name: entry for name, entry in state.items() if name in values}
        for name, entry in entries.items():
            entry.key, entry.data = f"reference.{entry.key}", values[name]
            if isinstance(entry, ShardedTensor):
                entry.dtype = values[name].dtype
        reference[part.replace("model", "reference")] = entries
    return reference


def load_reference(chunks: Sequence[nn.Module], weights: SwappedWeights, loaded: StateDict) -> None:
    """Load reference weights in the form of :func:`sharded_reference`."""
    for number, values in enumerate(_reference_values(chunks, weights)):
        for name, loaded_values in loaded.get(f"reference{number}", {}).items():
            values[name].copy_(loaded_values)
    weights.round_values()


def _reference_values(chunks: Sequence[nn.Module], weights: SwappedWeights) -> Iterator[dict[str, Tensor]]:
    values_of = {id(parameter): values for parameter, values in zip(weights.parameters, weights.values, strict=True)}
    for chunk in chunks:
        named = unwrap_model(chunk).named_parameters()
        yield {name: values_of[id(parameter)] for name, parameter in named if id(parameter) in values_of}


def _is_weight(name: str) -> bool:
    """Return False for the fp8 entries that Transformer Engine, and megatron-core for its sake, add to a state_dict."""
    return not name.endswith("._extra_state")


def _describe(settings: LoRASettings | None) -> str:
    if settings is None:
        return "none"
    layers = "all layers" if settings.layers is None else f"layers {', '.join(map(str, settings.layers))}"
    kind = "DoRA of " if settings.dora else ""
    modules = ", ".join(settings.modules) + ("" if settings.experts else " without routed experts")
    return f"{kind}rank {settings.rank}, {settings.scale_text}, {modules} of {layers}"


def optimizer_state(optimizer: MegatronOptimizer, weights: ShardedStateDict, *, is_loading: bool) -> ShardedStateDict:
    """Return the sharded state to save or, with ``is_loading``, to load into; a missing state is initialised first."""
    step = _adam_step(optimizer)
    with contextlib.ExitStack() as stack:
        for part in _parts(optimizer):
            if is_loading and not part.optimizer.state:
                if isinstance(part.optimizer, Bf16MomentsAdamW):
                    part.optimizer.create_states()
                elif hasattr(part, "_init_optimizer_states_with_dummy_values"):
                    part._init_optimizer_states_with_dummy_values()  # a step, with gradients of zero
            if is_distributed(part):
                stack.enter_context(_patched(part, step))
        sharded = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=_METADATA)
    _drop_classes(sharded)
    return {"optimizer": sharded, "adam_step": step}


def load_optimizer_state(optimizer: MegatronOptimizer, loaded: StateDict) -> None:
    """Restore the moments, main weights and counters that :func:`optimizer_state` saved.

    Learning rates, betas, eps and weight decay stay those of ``optimizer``: a resumed run may change them. Raises ValueError
    if the saved step counter is not an integer of at least 0.
    """
    step = loaded["adam_step"]
    if type(step) is not int or step < 0:
        raise ValueError(f"adam_step must be an integer of at least 0, got {step!r}")
    parts = _parts(optimizer)
    states = [loaded["optimizer"]] if len(parts) == 1 else [loaded["optimizer"][number] for number in range(len(parts))]
    for part, state in zip(parts, states, strict=True):
        # megatron-core would look for Adam's counters among the saved tensors, so the tensors are loaded separately
        tensors = state.pop("param_state", None)
        inner = state.get("optimizer", state)
        _keep_current_settings(inner["param_groups"], part.param_groups)
        for group in inner["param_groups"]:
            group["step"] = step
        if "state" in inner:  # megatron-core copies common_step to the state of every parameter
            inner["state"].pop("common_step", None)
            if _is_torch_adam(part.optimizer):
                inner["state"]["common_step"] = torch.tensor(float(step))
        part.load_state_dict(state)
        if tensors is not None:
            load_slices(part, tensors)
        _set_counters(part.optimizer, step)


def load_schedule(scheduler: OptimizerParamScheduler, saved: Mapping[str, Any], *, step: int) -> None:
    """Restore the learning rate schedule as it was after ``step`` steps; raise ValueError if its values are invalid."""
    for name, value in saved.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} of the schedule must be finite, got {value}")
    if type(saved["num_steps"]) is not int or not 0 <= saved["num_steps"] <= step:
        raise ValueError(f"num_steps of the schedule must be an integer from 0 to {step}, got {saved['num_steps']!r}")
    scheduler.load_state_dict(dict(saved))


def _keep_current_settings(saved: Sequence[dict[str, object]], current: Sequence[Mapping[str, object]]) -> None:
    """Overwrite the settings of saved groups before loading: megatron-core 0.19 also matches groups by learning rate."""

    def kind(group: Mapping[str, object]) -> tuple[object, ...]:
        return tuple(group.get(name) for name in ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr"))

    settings = {kind(group): {name: group[name] for name in group if name not in ("params", "step")} for group in current}
    for group in saved:
        group.update(settings[kind(group)])


def is_distributed(optimizer: MegatronOptimizer) -> bool:
    """Return True if the state is sharded over the data-parallel ranks, which is stored in another form."""
    return any(hasattr(part, "load_parameter_state_from_fully_reshardable") for part in _parts(optimizer))


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _adams(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    return list(optimizer.sub_optimizers) if isinstance(optimizer, HybridDeviceOptimizer) else [optimizer]


def _is_torch_adam(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.Adam)  # AdamW is a subclass


def _set_counters(optimizer: torch.optim.Optimizer, step: int) -> None:
    if isinstance(optimizer, HybridDeviceOptimizer):
        for group in optimizer.param_groups:  # a counter in these groups would overwrite the inner optimizers' at every step
            group.pop("step", None)
    for adam in _adams(optimizer):
        if _is_torch_adam(adam):
            for group in adam.param_groups:
                for parameter in group["params"]:
                    # One tensor each: megatron-core gives all parameters the same tensor, which each would then increment.
                    # torch's fused kernel reads it on the device.
                    where = parameter.device if group["fused"] else "cpu"
                    if parameter in adam.state:
                        adam.state[parameter]["step"] = torch.tensor(float(step), device=where)
        else:
            for group in adam.param_groups:
                group["step"] = step


def _adam_step(optimizer: MegatronOptimizer) -> int:
    """Return Adam's step count, the maximum over all ranks: a pipeline stage with nothing to train has no counter."""
    step = 0
    for adam in (adam for part in _parts(optimizer) for adam in _adams(part.optimizer)):
        counters = adam.state.values() if _is_torch_adam(adam) else adam.param_groups
        step = max([step, *(int(counter["step"]) for counter in counters if "step" in counter)])
    return max_over_ranks(step)


def _drop_classes(state: StateDict) -> None:
    """Drop the optimizer classes that megatron-core stores with the settings of a group, to keep a checkpoint plain data."""
    if "param_groups" in state:
        for group in state["param_groups"]:
            for name in [name for name, value in group.items() if isinstance(value, type)]:
                del group[name]
    for inner in state.values():
        if isinstance(inner, dict):
            _drop_classes(inner)


@contextlib.contextmanager
def _patched(part: MegatronOptimizer, step: int) -> Iterator[None]:
    """Make a distributed optimizer return its state as slices, in the dtypes in which it is stored."""

    def slices(weights: ShardedStateDict, is_loading: bool, _: object) -> ShardedStateDict:
        return sharded_slices(part, weights, is_loading=is_loading)

    inner = part.optimizer
    part.sharded_param_state_fully_reshardable = slices
    # megatron-core collects garbage after gathering large tensors; with slices this would only stall training
    distrib_optimizer.gc = SimpleNamespace(collect=lambda: 0)
    # Transformer Engine's optimizer would make fp32 copies of all bf16 moments, which the distributed optimizer discards: it
    # needs only the settings of the groups
    inner.state_dict = functools.partial(torch.optim.Optimizer.state_dict, inner)
    # The distributed optimizer reads a step counter from each torch Adam, and from an offloaded optimizer, whose state is
    # empty before the first step and on a stage that has nothing to train. state_dict leaves keys that are not tensors
    # unchanged.
    is_empty = not inner.state and (_is_torch_adam(inner) or isinstance(inner, HybridDeviceOptimizer))
    if is_empty:
        inner.state["placeholder"] = {"step": torch.tensor(float(step))}
    try:
        yield
    finally:
        if is_empty:
            del inner.state["placeholder"]
        del inner.state_dict
        distrib_optimizer.gc = gc
        del part.sharded_param_state_fully_reshardable


class Block(NamedTuple):
    """A rectangle of a tensor, contiguous in its flat values: it begins at ``start`` and has ``sizes`` at ``offsets``."""

    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def blocks(shape: tuple[int, ...], start: int, end: int) -> Iterator[Block]:
    """Yield the rectangles that cover the flat values ``start`` to ``end`` of a tensor, in order: at most 2 D - 1."""
    if start >= end:
        return
    if len(shape) == 1:
        yield Block(start, (start,), (end - start,))
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # range of the whole rows
    if first > last:  # the slice is within one row
        yield from _of_row(shape, last, start, end)
        return
    yield from _of_row(shape, first - 1, start, first * row)
    if first < last:
        yield Block(first * row, (first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _of_row(shape, last, last * row, end)


def _of_row(shape: tuple[int, ...], number: int, start: int, end: int) -> Iterator[Block]:
    begin = number * math.prod(shape[1:])
    for inner in blocks(shape[1:], start - begin, end - begin):
        yield Block(begin + inner.start, (number, *inner.offsets), (1, *inner.sizes))


def sharded_slices(optimizer: Any, weights: ShardedStateDict, *, is_loading: bool) -> ShardedStateDict:
    """Return this rank's state of a DistributedOptimizer: parameter number -> state name -> rectangle number -> values."""
    entries = {
        id(entry.data): entry for entry in nested_values(weights) if isinstance(entry, ShardedTensor | ShardedTensorFactory)
    }
    state: ShardedStateDict = {}
    for number, (parameter, start, end) in enumerate(_local_slices(optimizer)):
        values = _values(optimizer, parameter)
        state[number] = {}
        for name in STATES:
            # an optimizer that has taken no step yet has no moments
            flat = values[name] if name in values else torch.zeros_like(values["param"])
            pieces = _pieces(entries[id(parameter)], f"optimizer.state.{name}.", flat, start, end, is_loading=is_loading)
            state[number][name] = dict(enumerate(pieces))
            for piece in state[number][name].values():  # every optimizer instance holds this slice
                piece.replica_id = (*piece.replica_id[:-1], optimizer.distributed_optimizer_instance_id)
    return state


@torch.no_grad()
def load_slices(optimizer: Any, loaded: StateDict) -> None:
    """Load optimizer values in the form of :func:`sharded_slices`."""
    for index, (parameter, _, _) in enumerate(_local_slices(optimizer)):
        states = loaded[index]
        for name, values in _values(optimizer, parameter).items():
            values.copy_(torch.cat([states[name][number].flatten() for number in sorted(states[name])]))


def _values(optimizer: Any, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Return main weight and moments of a parameter's slice, on the host or the device; no moments before the first step."""
    inner = optimizer.optimizer
    group, index = optimizer.model_param_group_index_map[parameter]
    shard = inner.param_groups[group]["params"][index]
    main = inner.param_to_inner_param[shard] if isinstance(inner, HybridDeviceOptimizer) else shard
    values = {"param": main, **inner.state.get(shard, {})}
    return {name: values[name].detach() for name in STATES if name in values}


def _local_slices(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
    """Yield each parameter of which this rank has a slice, with the slice's start and end in the parameter's flat values."""
    for ranges in optimizer.gbuf_ranges:
        for buckets in ranges.values():
            for bucket in buckets:
                for parameter, shard in bucket["param_map"].items():
                    yield parameter, shard["param"].start, shard["param"].end


def _pieces(
    entry: ShardedTensor | ShardedTensorFactory, prefix: str, flat: torch.Tensor, start: int, end: int, *, is_loading: bool
) -> Iterator[ShardedTensor]:
    """Yield the rectangles that cover the flat values ``start`` to ``end`` of a parameter."""
    for part, begin in _tensors_of(entry):
        shape = (1,) * part.prepend_axis_num + tuple(part.local_shape)
        length = math.prod(shape)
        for block in blocks(shape, max(start - begin, 0), min(end - begin, length)):
            at = begin + block.start - start
            values = flat[at : at + math.prod(block.sizes)].view(block.sizes)
            yield ShardedTensor(
                key=f"{prefix}{part.key}",
                data=None if is_loading else values,
                dtype=flat.dtype,
                local_shape=block.sizes,
                global_shape=part.global_shape,
                global_offset=tuple(own + inner for own, inner in zip(part.global_offset, block.offsets, strict=True)),
                axis_fragmentations=None,  # the rectangles form no regular grid
                replica_id=part.replica_id,
                allow_shape_mismatch=part.allow_shape_mismatch,
            )


def _tensors_of(entry: ShardedTensor | ShardedTensorFactory) -> Iterator[tuple[ShardedTensor, int]]:
    """Yield a parameter's tensors in the checkpoint, such as gate and up projection, and where each starts in its values."""
    if isinstance(entry, ShardedTensor):
        yield entry, 0
        return
    without_values = torch.empty(entry.data.shape, dtype=entry.data.dtype, device="meta")
    for part in nested_values(entry.build_fn(entry.key, without_values, entry.replica_id, None)):
        assert part.data.is_contiguous(), f"{entry.key} must be cut along its first axis"
        yield part, int(part.data.storage_offset())
