"""Activations of MLPs for megatron-core's layers without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class SwiGLU(MegatronModule):
    """SwiGLU, silu(gate) * up; megatron-core's own saves silu(gate), writes one more tensor and concatenates gradients."""

    is_gelu = False

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """Map [..., 2 * f], the gate first, to [..., f]."""
        activated: Tensor = _Gated.apply(gate_and_up, self.is_gelu)  # type: ignore[no-untyped-call]
        return activated


class GeGLU(SwiGLU):
    """GeGLU activation, gelu(gate) * up, with gelu(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""

    is_gelu = True


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor, is_gelu: bool) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        ctx.is_gelu = is_gelu
        gate, up = gate_and_up.chunk(2, dim=-1)
        return _activate(gate, is_gelu).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gate_and_up,) = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, dim=-1)
        both_grads = torch.empty_like(gate_and_up)
        gate_grad, up_grad = both_grads.chunk(2, dim=-1)
        activated = _activate(gate, ctx.is_gelu)
        torch.mul(grads[0], activated, out=up_grad)
        torch.mul(grads[0], up, out=activated)  # now holds the gradient of the activated gate
        if ctx.is_gelu:
            torch.ops.aten.gelu_backward.grad_input(activated, gate, approximate="tanh", grad_input=gate_grad)
        else:
            torch.ops.aten.silu_backward.grad_input(activated, gate, grad_input=gate_grad)
        return both_grads, None


def _activate(gate: Tensor, is_gelu: bool) -> Tensor:
    return F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)


class SquaredReLU(MegatronModule):
    """relu(x)^2, without a gate (So et al. 2021, arXiv 2109.08668)."""

    def forward(self, values: Tensor) -> Tensor:
        return F.relu(values).square()


class ClampedSwiGLU(MegatronModule):
    """Clamped SwiGLU (arXiv 2508.10925): g sigmoid(alpha g) (u + 1), g = min(gate, limit), u = clamp(up, -limit, limit)."""

    def __init__(self, config: TransformerConfig, *, alpha: float, limit: float) -> None:
        super().__init__(config)
        self.alpha, self.limit = alpha, limit

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """Map [..., 2 * f], the gate first, to [..., f]."""
        activated: Tensor = _ClampedGated.apply(gate_and_up, self.alpha, self.limit)  # type: ignore[no-untyped-call]
        return activated


class _ClampedGated(torch.autograd.Function):
    """With s = sigmoid(alpha g): dg = s (1 + alpha g (1 - s)) (u + 1), du = g s; each is 0 where its input was clamped."""

    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        ctx.alpha, ctx.limit = alpha, limit
        gate, up = gate_and_up.chunk(2, dim=-1)
        gate = gate.clamp(max=limit)
        return torch.sigmoid(gate * alpha).mul_(gate).mul_(up.clamp(-limit, limit).add_(1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gate_and_up,) = ctx.saved_tensors
        alpha, limit = ctx.alpha, ctx.limit
        gate, up = gate_and_up.chunk(2, dim=-1)
        both_grads = torch.empty_like(gate_and_up)
        gate_grad, up_grad = both_grads.chunk(2, dim=-1)
        clamped = gate.clamp(max=limit)
        sigmoid = torch.sigmoid(clamped * alpha)
        torch.mul(grads[0], clamped, out=up_grad).mul_(sigmoid).masked_fill_(up.abs() > limit, 0.0)
        torch.mul(grads[0], up.clamp(-limit, limit).add_(1), out=gate_grad).mul_(sigmoid)
        slope = clamped.mul_(alpha).mul_(1 - sigmoid).add_(1)
        gate_grad.mul_(slope).masked_fill_(gate > limit, 0.0)
        return both_grads, None, None
