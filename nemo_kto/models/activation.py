"""The gated activation of megatron-core's layers without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


class SwiGLU(MegatronModule):
    """silu(gate) * up, for the place that a layer spec has for an activation.

    megatron-core's own writes one tensor more, keeps silu(gate) for the backward pass, and copies the two gradients there to
    put them side by side.
    """

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """[..., 2 * f], the gate first, to [..., f]."""
        activated: Tensor = _SwiGLU.apply(gate_and_up)  # type: ignore[no-untyped-call]
        return activated


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_and_up,) = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, dim=-1)
        both_grads = torch.empty_like(gate_and_up)
        gate_grad, up_grad = both_grads.chunk(2, dim=-1)
        activated = F.silu(gate)
        torch.mul(grads[0], activated, out=up_grad)
        torch.mul(grads[0], up, out=activated)  # from here on the gradient of the activated gate
        torch.ops.aten.silu_backward.grad_input(activated, gate, grad_input=gate_grad)
        return both_grads
