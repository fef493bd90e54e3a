"""Communication of the data-parallel ranks while they compute: gradients are summed during the backward pass, a bucket of
weights at a time, and with the distributed optimizer the new weights are gathered during the next forward pass.

Between an optimizer step and that forward pass a rank has new values only of the weights it has updated itself. Whoever
reads or writes weights outside of the model calls :func:`finish_gathers` first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.module import MegatronModule


def schedule_reductions(chunks: Sequence[DistributedDataParallel]) -> None:
    """Tell megatron-core's schedules when gradients are summed: in the backward pass of the last micro-batch.

    Later pipeline stages have done theirs earlier, and wait with the sum until all are: it would hold up the first stage.
    """
    config = chunks[0].config
    no_sync, sync = [chunk.no_sync for chunk in chunks], [chunk.start_grad_sync for chunk in chunks]
    config.no_sync_func, config.grad_sync_func = (no_sync, sync) if len(chunks) > 1 else (no_sync[0], sync[0])


def expect_whole_weights(chunks: Iterable[DistributedDataParallel]) -> None:
    """Until the first step there is nothing to gather: every rank loads the whole weights."""
    for group in _gathering_groups(chunks):
        group.param_gather_dispatched = True


def finish_gathers(chunks: Iterable[torch.nn.Module]) -> None:
    """Make the weights whole on every rank; collective, unless they are. Chunks whose gathers do not overlap always are."""
    groups = _gathering_groups(chunks)
    for group in groups:
        if not group.param_gather_dispatched:
            group.start_param_sync()
    for group in groups:
        group.finish_param_sync(skip_next_bucket_dispatch=True)


def bucket_groups(chunk: MegatronModule) -> list[Any]:
    """megatron-core's groups of buckets, whose gradients travel together."""
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


def _gathering_groups(chunks: Iterable[torch.nn.Module]) -> list[Any]:
    wrapped = [chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel) and chunk.use_forward_hook]
    return [group for chunk in wrapped for group in bucket_groups(chunk)]
