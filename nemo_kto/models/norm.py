"""The norm on torch that megatron-core's layers accept where Transformer Engine is absent, sequence parallelism included."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_kto.parallel import device
from nemo_kto.parallel.main_grad import added_to_main_grad, main_grad_of


class _RMSNorm(torch.nn.RMSNorm):
    returns_residual = False  # read by megatron-core >= 0.18 of every norm

    def forward(self, x: Tensor) -> Tensor:
        """The norm over the last dimension. On the CPU torch has no kernel for it, and makes it of eight others."""
        if device.on_gpu() or x.dtype != torch.float32:
            return super().forward(x)
        normed: Tensor = _FewPasses.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return normed


class _FewPasses(torch.autograd.Function):
    """y = w x / rms(x), rms(x) = sqrt(mean(x^2) + eps): three passes over x forward, seven backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        inverse_rms = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_H, inverse_rms)
        ctx.main_grad_H = main_grad_of(weight_H)
        return (x * inverse_rms).mul_(weight_H)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight_H, inverse_rms = ctx.saved_tensors
        products_TH, inverse_rms_T = (grads[0] * x).reshape(-1, x.size(-1)), inverse_rms.flatten()
        weight_grad_H = None
        if ctx.needs_input_grad[1] and ctx.main_grad_H is None:
            weight_grad_H = products_TH.t().mv(inverse_rms_T)
        elif ctx.needs_input_grad[1]:
            ctx.main_grad_H.addmv_(products_TH.t(), inverse_rms_T)
            weight_grad_H = added_to_main_grad(weight_H)
        # dx = (w dy - x mean(w dy x) / rms(x)^2) / rms(x)
        pull_T = products_TH.mv(weight_H).mul_(inverse_rms_T.pow(3)).div_(x.size(-1))
        x_grad = (grads[0] * weight_H).mul_(inverse_rms).addcmul_(x, pull_T.view_as(inverse_rms), value=-1)
        return x_grad, weight_grad_H, None


class TorchNorm:
    """Builds an RMS norm; called as megatron-core calls its own norm builder.

    Under sequence parallelism every rank of a tensor-parallel group normalises its own part of the sequence, so the gradient
    of the weight is a partial sum. Its parameters carry ``sequence_parallel``, the mark by which megatron-core finds the
    gradients it must add up over the group.
    """

    def __new__(  # type: ignore[misc]  # a builder that reads like a class, as the layer spec expects
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> torch.nn.Module:
        """Build the norm.

        Args:
            config: gives the dtype of the parameters and sequence parallelism.
            hidden_size: size of the last dimension, over which the norm is taken.
            eps: added to the variance.

        Raises:
            ValueError: another norm is configured, or what torch's norm does not have.
        """
        if config.normalization != "RMSNorm":
            raise ValueError(f"normalization must be RMSNorm, got {config.normalization!r}")
        if config.layernorm_zero_centered_gamma:
            raise ValueError(
                "layernorm_zero_centered_gamma must be False without Transformer Engine; torch's norms scale by the weight"
            )
        norm = _RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype, device=device.current_device())
        norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
