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


def sum_over_data_parallel(sums: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sums (0-d, the same names on every rank) that every pipeline stage knows, added over all copies of the model.

    Returns:
        name -> 0-d float64 tensor on the device (counts stay exact to 2**53).
    """
    (packed,) = device.upload([torch.stack([value.detach().double() for value in sums.values()])])
    dist.all_reduce(packed, group=parallel_state.get_data_parallel_group())
    return dict(zip(sums, packed.unbind(), strict=True))


def global_sums(sums: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sums over the global batch, on every rank, of what only the last pipeline stage knows; earlier stages give zeros.

    Args and Returns: as of :func:`sum_over_data_parallel`.
    """
    packed = torch.stack(list(sum_over_data_parallel(sums).values()))
    dist.all_reduce(packed, group=parallel_state.get_pipeline_model_parallel_group())
    return dict(zip(sums, packed.unbind(), strict=True))


def to_host(values: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Values (0-d float64, on the device) as numbers, in one message: the host waits for the device once."""
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))


def gather_over_data_parallel(rows_NC: torch.Tensor) -> tuple[torch.Tensor, slice]:
    """Rows of all copies of the model, one copy after the other, and where this copy's lie; on the device; collective.

    Copies with fewer rows than others have rows of zeros after them, so that a column must say which rows there are.
    """
    longest = largest_over_data_parallel(len(rows_NC))
    padded = torch.zeros(longest, rows_NC.shape[1], dtype=rows_NC.dtype, device=device.current_device())
    padded[: len(rows_NC)] = rows_NC
    group = parallel_state.get_data_parallel_group()
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, padded, group=group)
    start = longest * dist.get_rank(group)
    return torch.cat(parts), slice(start, start + len(rows_NC))


def largest_over_data_parallel(count: int) -> int:
    """The largest of the counts of all copies of the model, on every rank; collective."""
    box = torch.full((), count, device=device.current_device())  # filled there: nothing is copied
    dist.all_reduce(box, op=dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
    return int(box.item())


def ranks_where(answer: torch.Tensor) -> list[int]:
    """The ranks of the world that answer True (0-d, on the device), on every rank."""
    answers = torch.zeros(dist.get_world_size(), dtype=torch.int32, device=device.current_device())
    answers[dist.get_rank()] = answer
    dist.all_reduce(answers)
    return [rank for rank, said_yes in enumerate(answers.tolist()) if said_yes]


def from_last_stage(values: torch.Tensor) -> torch.Tensor:
    """``values`` of the last pipeline stage, on every stage; earlier stages pass a tensor of the same shape."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1 and values.numel():
        group = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(values, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return values


def gather_shares(share: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all ranks, [first size * ranks, ...], in the order of the ranks. Differentiable.

    Each rank has used the whole, so that the gradient of a share is the sum over the ranks (a reduce-scatter).
    """
    gathered: Tensor = gather_from_sequence_parallel_region(share, tensor_parallel_output_grad=True, group=group)
    return gathered


def sum_over_context_parallel(values: Tensor) -> Tensor:
    """The sum over the ranks that share a sequence, on each of them. Differentiable.

    All ranks make the same loss of the same sum, so that the gradient of a rank's own part is that of the sum, and
    the gradients of the weights, summed over these ranks, are those of one loss.
    """
    total: Tensor = reduce_from_tensor_model_parallel_region(values, group=parallel_state.get_context_parallel_group())
    return total


def leads_context_parallel() -> bool:
    """Whether this rank is the one that counts what all ranks of its context-parallel group have."""
    return int(parallel_state.get_context_parallel_rank()) == 0
