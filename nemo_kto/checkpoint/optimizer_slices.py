"""The state of megatron-core's distributed optimizer in a checkpoint: each rank writes and reads only what it holds.

That optimizer cuts each parameter's flat values at any place and gives every data-parallel rank one piece. megatron-core's
own form that any layout can read ("fully_reshardable") gathers all pieces on every rank first: 12 bytes for each parameter
of the model, in host memory. A checkpoint of torch takes rectangles of a tensor, and a piece of a flat tensor is a few of
these: the rest of a row, whole rows, the beginning of a row. So the pieces go into the same tensors, under the same names,
without any exchange between ranks, and checkpoints of either form are read alike.
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
    """A rectangle of a tensor that is one piece of its flat values: from ``start`` on, of ``sizes`` at ``offsets``."""

    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def blocks(shape: tuple[int, ...], start: int, end: int) -> Iterator[Block]:
    """The rectangles that make up the flat values ``start`` to ``end`` of a tensor, in their order: 2 D - 1 at most."""
    if start >= end:
        return
    if len(shape) == 1:
        yield Block(start, (start,), (end - start,))
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # the whole rows
    if first > last:  # all within one row
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
    """What this rank holds of the optimizer's state: number of a parameter -> state -> number of a rectangle -> its values.

    Args:
        optimizer: megatron-core's DistributedOptimizer.
        model_state: of the model that it trains.
        is_loading: leave the values out, for the load to bring them.
    """
    forms = {
        id(form.data): form for form in nested_values(model_state) if isinstance(form, ShardedTensor | ShardedTensorFactory)
    }
    state: ShardedStateDict = {}
    for number, (parameter, start, end) in enumerate(_held(optimizer)):
        values = _values(optimizer, parameter)
        state[number] = {}
        for name in STATES:
            # an optimizer that has taken no step yet has no moments
            flat = values[name] if name in values else torch.zeros_like(values["param"])
            pieces = _pieces(forms[id(parameter)], f"optimizer.state.{name}.", flat, start, end, is_loading=is_loading)
            state[number][name] = dict(enumerate(pieces))
    return state


@torch.no_grad()
def load_slices(optimizer: Any, loaded: StateDict) -> None:
    """Put back what :func:`sharded_slices` gave the form of."""
    for number, (parameter, _, _) in enumerate(_held(optimizer)):
        states = loaded[number]
        for name, held in _values(optimizer, parameter).items():
            held.copy_(torch.cat([states[name][piece].flatten() for piece in sorted(states[name])]))


def _values(optimizer: Any, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Main weight and moments of the piece of a parameter, wherever they lie; no moments before the first step."""
    inner = optimizer.optimizer
    group, place = optimizer.model_param_group_index_map[parameter]
    piece = inner.param_groups[group]["params"][place]
    main = inner.param_to_inner_param[piece] if isinstance(inner, HybridDeviceOptimizer) else piece
    kept = {"param": main, **inner.state.get(piece, {})}
    return {name: kept[name].detach() for name in STATES if name in kept}


def _held(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
    """The parameters of which this rank has a piece, and where in the parameter's flat values it begins and ends."""
    for ranges in optimizer.gbuf_ranges:
        for buckets in ranges.values():
            for bucket in buckets:
                for parameter, its in bucket["param_map"].items():
                    yield parameter, its["param"].start, its["param"].end


def _pieces(
    form: ShardedTensor | ShardedTensorFactory, prefix: str, flat: torch.Tensor, start: int, end: int, *, is_loading: bool
) -> Iterator[ShardedTensor]:
    """The rectangles of the global tensors that the flat values from ``start`` to ``end`` of a parameter are."""
    for part, begin in _parts(form):
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
                axis_fragmentations=None,  # no regular grid
                replica_id=(*part.replica_id[:-1], 0),  # of the data-parallel ranks only this one has it
                allow_shape_mismatch=part.allow_shape_mismatch,
            )


def _parts(form: ShardedTensor | ShardedTensorFactory) -> Iterator[tuple[ShardedTensor, int]]:
    """What a parameter is in the checkpoint, such as gate and up projection, and where each begins in its flat values."""
    if isinstance(form, ShardedTensor):
        yield form, 0
        return
    without_values = torch.empty(form.data.shape, dtype=form.data.dtype, device="meta")
    for part in nested_values(form.build_fn(form.key, without_values, form.replica_id, None)):
        assert part.data.is_contiguous(), f"{form.key} must be cut along its first axis"
        yield part, int(part.data.storage_offset())
