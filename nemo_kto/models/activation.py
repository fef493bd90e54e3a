"""The gated activations of megatron-core's layers without Transformer Engine."""

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
        activated: Tensor = _Gated.apply(gate_and_up, False)  # type: ignore[no-untyped-call]
        return activated


class GeGLU(MegatronModule):
    """gelu(gate) * up in the same way, with gelu(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """[..., 2 * f], the gate first, to [..., f]."""
        activated: Tensor = _Gated.apply(gate_and_up, True)  # type: ignore[no-untyped-call]
        return activated


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor, is_gelu: bool) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        ctx.is_gelu = is_gelu
        gate, up = gate_and_up.chunk(2, dim=-1)
        return _activated(gate, is_gelu).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gate_and_up,) = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, dim=-1)
        both_grads = torch.empty_like(gate_and_up)
        gate_grad, up_grad = both_grads.chunk(2, dim=-1)
        activated = _activated(gate, ctx.is_gelu)
        torch.mul(grads[0], activated, out=up_grad)
        torch.mul(grads[0], up, out=activated)  # from here on the gradient of the activated gate
        if ctx.is_gelu:
            torch.ops.aten.gelu_backward.grad_input(activated, gate, approximate="tanh", grad_input=gate_grad)
        else:
            torch.ops.aten.silu_backward.grad_input(activated, gate, grad_input=gate_grad)
        return both_grads, None


def _activated(gate: Tensor, is_gelu: bool) -> Tensor:
    return F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)
