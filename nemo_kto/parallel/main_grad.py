"""Gradients that are added where megatron-core's DistributedDataParallel keeps them, instead of being made first.

A gradient of its own costs a tensor of the size of the weight for each micro-batch: it is filled, and then read to be added.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

from nemo_kto.parallel import device


def main_grad_of(weight: Tensor) -> Tensor | None:
    """The fp32 tensor in which the gradient of a weight is summed over the micro-batches; None where there is none.

    A backward pass that adds to it returns no gradient for the weight. That is right as long as gradients are reduced after
    the last backward pass: DistributedDataParallel would wait for that gradient to begin earlier.
    """
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    return main_grad if main_grad is not None and main_grad.dtype == torch.float32 else None


def add_products_to_main_grads(chunk: torch.nn.Module) -> None:
    """Let the linear layers of a chunk that is wrapped in DistributedDataParallel add their gradients in the product itself.

    On a GPU that takes a kernel of apex's, which may not be compiled. On the CPU it is one call, for weights in fp32.
    """
    if device.on_gpu():
        return
    layers.fused_weight_gradient_mlp_cuda = _CPUKernel
    for module in chunk.modules():
        if isinstance(module, layers.ColumnParallelLinear | layers.RowParallelLinear):
            module.gradient_accumulation_fusion = module.weight is not None and module.weight.dtype == torch.float32


class _CPUKernel:
    """What megatron-core calls for the product that is added."""

    @staticmethod
    def wgrad_gemm_accum_fp32(input_TI: Tensor, grad_output_TO: Tensor, main_grad_OI: Tensor) -> None:
        main_grad_OI.addmm_(grad_output_TO.t(), input_TI)
