"""Reductions over the data-parallel group and exchanges between context-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from nemo_kto.device import device
from nemo_kto.distributed.state import max_over_ranks


def sum_over_data_parallel(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sum 0-d tensors known on every pipeline stage over the data-parallel group, in float64 on the device; collective.

    Each may be on the device or on the host.
    """
    packed = torch.stack(device.upload([value.detach().double() for value in sums.values()]))
    dist.all_reduce(packed, group=parallel_state.get_data_parallel_group())
    return dict(zip(sums, packed.unbind(), strict=True))


def global_sums(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sum 0-d tensors of the last pipeline stage over the global batch, on every rank; others pass zeros. Collective."""
    packed = torch.stack(list(sum_over_data_parallel(sums).values()))
    dist.all_reduce(packed, group=parallel_state.get_pipeline_model_parallel_group())
    return dict(zip(sums, packed.unbind(), strict=True))


def to_host(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Convert 0-d float64 device tensors to floats in one transfer, so that the host waits for the device once."""
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))


def gather_over_data_parallel(rows_NC: Tensor) -> tuple[Tensor, slice]:
    """Gather the rows of all data-parallel ranks in their order, on the device; collective.

    Ranks with fewer rows are padded with zeros, so a column must mark the actual rows. Also returns the slice of this
    rank's own rows.
    """
    group = parallel_state.get_data_parallel_group()
    longest = max_over_ranks(len(rows_NC), group=group)
    padded = torch.zeros(longest, rows_NC.shape[1], dtype=rows_NC.dtype, device=device.current_device())
    padded[: len(rows_NC)] = rows_NC
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, padded, group=group)
    start = longest * dist.get_rank(group)
    return torch.cat(parts), slice(start, start + len(rows_NC))


def ranks_where(flag: Tensor) -> list[int]:
    """Return the world ranks whose ``flag`` (0-d bool, on the device) is True; collective."""
    flags = torch.zeros(dist.get_world_size(), dtype=torch.int32, device=device.current_device())
    flags[dist.get_rank()] = flag
    dist.all_reduce(flags)
    return [rank for rank, is_set in enumerate(flags.tolist()) if is_set]


def from_last_stage(values: Tensor) -> Tensor:
    """Broadcast ``values`` of the last pipeline stage to tensors of the same shape on every stage, in place; collective."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1 and values.numel():
        group = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(values, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return values


def gather_shares(share: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """All-gather the shards of all ranks along the first dimension, in the order of the ranks. Differentiable.

    The gradient of a shard is summed over the ranks (a reduce-scatter), because every rank uses the whole tensor.
    """
    gathered: Tensor = gather_from_sequence_parallel_region(share, tensor_parallel_output_grad=True, group=group)
    return gathered


def sum_over_context_parallel(values: Tensor) -> Tensor:
    """Sum values over the context-parallel group, on each of its ranks. Differentiable.

    All ranks compute the same loss from the same sum. The gradient of a rank's own part is therefore the gradient of the
    sum, and the gradients of the weights, summed over these ranks, are those of one loss.
    """
    total: Tensor = reduce_from_tensor_model_parallel_region(values, group=parallel_state.get_context_parallel_group())
    return total


def leads_context_parallel() -> bool:
    """Return whether this is the rank of its context-parallel group that counts values which all its ranks have."""
    return int(parallel_state.get_context_parallel_rank()) == 0
