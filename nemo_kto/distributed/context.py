"""Context parallelism: what the ranks that share a sequence tell each other."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor


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
