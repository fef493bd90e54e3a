"""Fused accumulation of weight gradients into main_grad, and overlap of their communication."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from nemo_kto.device import device, kernels


def main_grad_of(weight: Tensor) -> Tensor | None:
    """The fp32 tensor in which the gradient of a weight is summed over the micro-batches; None where there is none.

    A backward pass that adds to it returns :func:`added_to_main_grad` for the weight.
    """
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    return main_grad if main_grad is not None and main_grad.dtype == torch.float32 else None


def added_to_main_grad(weight: Tensor) -> Tensor:
    """What a backward pass returns that has added its gradient to ``main_grad``: a gradient without values or memory.

    DistributedDataParallel waits for a gradient of each weight to know that it is complete. An empty sparse tensor will do,
    also where a weight is used twice (tied embeddings): autograd adds two of them up to a third, and a dense one, even if it
    only were a view of one number, would be written out in the size of the weight.
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]  # DistributedDataParallel must not add it again
    return torch.zeros(weight.shape, dtype=weight.dtype, layout=torch.sparse_coo, device=weight.device)


def add_products_to_main_grads(chunk: torch.nn.Module) -> None:
    """Let the linear layers of a chunk that is wrapped in DistributedDataParallel add their gradients in the product itself.

    Transformer Engine's layers can. megatron-core's own need a kernel of apex's on a GPU, which may not be compiled. On the
    CPU it is one call, for weights in fp32. The configuration's switch would be for all layers, of whichever kind.
    """
    if not device.on_gpu():
        layers.fused_weight_gradient_mlp_cuda = _CPUKernel
    modules: Iterator[Any] = chunk.modules()
    for module in modules:
        if isinstance(module, layers.ColumnParallelLinear | layers.RowParallelLinear):
            is_fp32 = module.weight is not None and module.weight.dtype == torch.float32
            module.gradient_accumulation_fusion = kernels.adds_products() if device.on_gpu() else is_fp32
        elif hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


class _CPUKernel:
    """What megatron-core calls for the product that is added."""

    @staticmethod
    def wgrad_gemm_accum_fp32(input_TI: Tensor, grad_output_TO: Tensor, main_grad_OI: Tensor) -> None:
        main_grad_OI.addmm_(grad_output_TO.t(), input_TI)


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
