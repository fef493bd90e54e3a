"""Fused accumulation of weight gradients into main_grad, and overlap of their communication."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from nemo_kto.device import kernels


def main_grad_of(weight: Tensor) -> Tensor | None:
    """Return the fp32 tensor that accumulates the gradient of a weight over the micro-batches; None if there is none.

    A backward pass that adds to it must return :func:`added_to_main_grad` for the weight. To a sum in bf16 a micro-batch
    should add once: the backward pass returns a gradient, which DistributedDataParallel adds.
    """
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    return main_grad if main_grad is not None and main_grad.dtype == torch.float32 else None


def added_to_main_grad(weight: Tensor) -> Tensor:
    """Return a placeholder gradient for a backward pass that has added its gradient to ``main_grad``.

    DistributedDataParallel waits for a gradient of each weight. An empty sparse tensor suffices and takes no memory, also if
    a weight is used twice (tied embeddings): autograd adds two of them to a third empty one. A dense placeholder, even a
    view of a single number, would be written out in the size of the weight.
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]  # DistributedDataParallel must not add it again
    return torch.zeros(weight.shape, dtype=weight.dtype, layout=torch.sparse_coo, device=weight.device)


def add_products_to_main_grads(chunk: torch.nn.Module, *, reduce_in_fp32: bool = True) -> None:
    """Make the linear layers of a chunk accumulate weight gradients into main_grad inside the matrix product.

    Transformer Engine's layers support it. megatron-core's own layers call a kernel of apex, which ``device.patches``
    replaces where it is not installed. megatron-core's configuration option is not used, because it would apply to layers of
    every kind. A sum in the dtype of the weight (``reduce_in_fp32`` is False) needs no special product.
    """
    modules: Iterator[Any] = chunk.modules()
    for module in modules:
        if isinstance(module, layers.ColumnParallelLinear | layers.RowParallelLinear):
            module.gradient_accumulation_fusion = module.weight is not None and (
                not reduce_in_fp32 or kernels.adds_products(module.weight.dtype)
            )
        elif hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def schedule_reductions(chunks: Sequence[DistributedDataParallel]) -> None:
    """Make megatron-core's schedules reduce gradients in the backward pass of the last micro-batch.

    Later pipeline stages finish their backward passes earlier, and delay the reduction until all stages have finished,
    because it would hold up the first stage.
    """

    def start(chunk: DistributedDataParallel, *_: object) -> None:
        chunk.start_grad_sync()
        if chunk.ddp_config.num_distributed_optimizer_instances > 1:
            # megatron-core has no handle then, and would reduce again in finish_grad_sync in what it takes for the first
            # batch: on these stages every batch, because no gradient is counted
            for group in bucket_groups(chunk):
                group.is_first_batch = False

    config = chunks[0].config
    no_sync, sync = [chunk.no_sync for chunk in chunks], [partial(start, chunk) for chunk in chunks]
    config.no_sync_func, config.grad_sync_func = (no_sync, sync) if len(chunks) > 1 else (no_sync[0], sync[0])


def expect_whole_weights(chunks: Iterable[DistributedDataParallel]) -> None:
    """Mark the weights as gathered: until the first step every rank has the whole weights, as it loaded them."""
    for group in _gathering_groups(chunks):
        group.param_gather_dispatched = True


def finish_gathers(chunks: Iterable[torch.nn.Module]) -> None:
    """Complete pending all-gathers, so that every rank has the whole weights; collective, unless it has them already."""
    groups = _gathering_groups(chunks)
    for group in groups:
        if not group.param_gather_dispatched:
            group.start_param_sync()
    for group in groups:
        group.finish_param_sync(skip_next_bucket_dispatch=True)


def bucket_groups(chunk: MegatronModule) -> list[Any]:
    """Return megatron-core's bucket groups (gradients communicated together), those of experts last."""
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


def _gathering_groups(chunks: Iterable[torch.nn.Module]) -> list[Any]:
    wrapped = [chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel) and chunk.use_forward_hook]
    return [group for chunk in wrapped for group in bucket_groups(chunk)]
