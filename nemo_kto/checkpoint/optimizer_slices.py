"""Checkpoint format of megatron-core's distributed optimizer in which each rank writes and reads only its own slices.

The distributed optimizer cuts each parameter's flat values at arbitrary positions and gives every data-parallel rank one
slice. megatron-core's own layout-independent form ("fully_reshardable") first gathers all slices on every rank: 12 bytes for
each parameter of the model, in host memory. A torch checkpoint accepts rectangles of a tensor, and a slice of a flat tensor
consists of a few: the rest of a row, whole rows, and the beginning of a row. The slices are therefore written into the same
tensors under the same names, without communication between ranks, and checkpoints of both forms are read in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory, StateDict
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

STATES = ("param", "exp_avg", "exp_avg_sq")  # main weights and moments


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


def sharded_slices(optimizer: Any, model_state: ShardedStateDict, *, is_loading: bool) -> ShardedStateDict:
    """Return this rank's state of a DistributedOptimizer: parameter number -> state name -> rectangle number -> values."""
    entries = {
        id(entry.data): entry
        for entry in nested_values(model_state)
        if isinstance(entry, ShardedTensor | ShardedTensorFactory)
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
    for part, begin in _parts(entry):
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


def _parts(entry: ShardedTensor | ShardedTensorFactory) -> Iterator[tuple[ShardedTensor, int]]:
    """Yield a parameter's tensors in the checkpoint, such as gate and up projection, and where each starts in its values."""
    if isinstance(entry, ShardedTensor):
        yield entry, 0
        return
    without_values = torch.empty(entry.data.shape, dtype=entry.data.dtype, device="meta")
    for part in nested_values(entry.build_fn(entry.key, without_values, entry.replica_id, None)):
        assert part.data.is_contiguous(), f"{entry.key} must be cut along its first axis"
        yield part, int(part.data.storage_offset())
