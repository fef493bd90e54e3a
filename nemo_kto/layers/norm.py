"""Norms on torch with support for sequence parallelism, and layers that place norms as megatron-core cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from nemo_kto.device import device
from nemo_kto.distributed.gradients import added_to_main_grad, main_grad_of

OutputAndBias = tuple[Tensor, Tensor | None]
Combine = Callable[[Tensor, Tensor], Tensor]  # output of attention or MLP, residual stream -> residual stream


class TorchNorm(torch.nn.RMSNorm):
    """RMS norm with the call signature of megatron-core's norms.

    With sequence parallelism every rank of a tensor-parallel group normalises its own part of the sequence, so the gradient
    of the weight is a partial sum. The weight has the attribute ``sequence_parallel``, by which megatron-core selects the
    gradients that it sums over the group.
    """

    returns_residual = False  # megatron-core >= 0.18 reads it from every norm

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        """Build the norm over a last dimension of ``hidden_size``; ValueError if ``config.normalization`` is not RMSNorm."""
        if config.normalization != "RMSNorm":
            raise ValueError(f"normalization must be RMSNorm, got {config.normalization!r}")
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device.current_device())
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.zero_centered = config.layernorm_zero_centered_gamma  # True: the factor is 1 + weight

    def forward(self, x: Tensor) -> Tensor:
        if not device.on_gpu() and x.dtype == torch.float32:  # torch has no CPU kernel for it and combines eight others
            normed: Tensor = _CPURMSNorm.apply(x, self.weight, self.eps, self.zero_centered)  # type: ignore[no-untyped-call]
            return normed
        if not self.zero_centered:
            return super().forward(x)
        # as in transformers, 1 + w is not rounded to the dtype of the weight
        return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)


class _CPURMSNorm(torch.autograd.Function):
    """RMS norm on the CPU, w x / sqrt(mean(x^2) + eps), with three passes over x forward and seven backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float, zero_centered: bool) -> Tensor:
        inverse_rms = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_H, inverse_rms)
        ctx.main_grad_H, ctx.zero_centered = main_grad_of(weight_H), zero_centered
        return (x * inverse_rms).mul_(weight_H + 1 if zero_centered else weight_H)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight_H, inverse_rms = ctx.saved_tensors
        factor_H = weight_H + 1 if ctx.zero_centered else weight_H
        products_TH, inverse_rms_T = (grads[0] * x).reshape(-1, x.size(-1)), inverse_rms.flatten()
        weight_grad_H = None
        if ctx.needs_input_grad[1] and ctx.main_grad_H is None:
            weight_grad_H = products_TH.t().mv(inverse_rms_T)
        elif ctx.needs_input_grad[1]:
            ctx.main_grad_H.addmv_(products_TH.t(), inverse_rms_T)
            weight_grad_H = added_to_main_grad(weight_H)
        # dx = (w dy - x mean(w dy x) / rms(x)^2) / rms(x)
        grad_T = products_TH.mv(factor_H).mul_(inverse_rms_T.pow(3)).div_(x.size(-1))
        x_grad = (grads[0] * factor_H).mul_(inverse_rms).addcmul_(x, grad_T.view_as(inverse_rms), value=-1)
        return x_grad, weight_grad_H, None, None


class TorchLayerNorm(torch.nn.LayerNorm):
    """Layer norm without a bias, w (x - mean(x)) / sqrt(var(x) + eps), like :class:`TorchNorm` in all else."""

    returns_residual = False  # megatron-core >= 0.18 reads it from every norm

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, bias=False, dtype=config.params_dtype, device=device.current_device())
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) over the last dimension, computed in fp32 and without a weight."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)


class AllHeadsNorm(torch.nn.Module):
    """RMS norm over all heads of a token together, with the heads sharded over tensor-parallel ranks.

    Every rank holds the weight of all heads, each of ``hidden_size``, and uses the part for its own heads; megatron-core
    sums the gradients of modules named q_layernorm and k_layernorm over the tensor-parallel group. Padding heads, which
    ``padded_heads`` includes, are zero and stay zero; if there are fewer heads than ranks, several ranks hold the same.
    """

    returns_residual = False  # megatron-core >= 0.18 reads it from every norm

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, heads: int, padded_heads: int, **_: object
    ) -> None:
        super().__init__()
        self.eps, self.heads, self.padded_heads = eps, heads, padded_heads
        self.tensor_parallel = config.tensor_model_parallel_size
        ones = torch.ones(heads * hidden_size, dtype=config.params_dtype, device=device.current_device())
        self.weight = torch.nn.Parameter(ones)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x_sbhd: Tensor) -> Tensor:
        """Normalise this rank's heads [sequence, batch, heads, head size] by the root mean square over all ranks' heads."""
        group = parallel_state.get_tensor_model_parallel_group() if self.tensor_parallel > 1 else None
        local_heads, size = x_sbhd.shape[-2:]
        weight_hd = _own_heads(self.weight.view(-1, size), local_heads, self.padded_heads)
        copies = local_heads * self.tensor_parallel // self.padded_heads  # ranks that hold each head
        width = self.heads * size * copies
        normed: Tensor = _ShardedRMSNorm.apply(x_sbhd, weight_hd, width, self.eps, group)  # type: ignore[no-untyped-call]
        return normed


class HeadNorms(torch.nn.Module):
    """Layer norm of each head with weights of its own and no bias; the arguments and the weight are as in AllHeadsNorm."""

    returns_residual = False  # megatron-core >= 0.18 reads it from every norm

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, heads: int, padded_heads: int, **_: object
    ) -> None:
        super().__init__()
        self.eps, self.padded_heads = eps, padded_heads
        ones = torch.ones(heads, hidden_size, dtype=config.params_dtype, device=device.current_device())
        self.weight = torch.nn.Parameter(ones)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x_sbhd: Tensor) -> Tensor:
        """Normalise this rank's heads [sequence, batch, heads, head size] in fp32."""
        weight_hd = _own_heads(self.weight, x_sbhd.size(-2), self.padded_heads)
        return (F.layer_norm(x_sbhd.float(), x_sbhd.shape[-1:], eps=self.eps) * weight_hd.float()).to(x_sbhd.dtype)


def _own_heads(weight_hd: Tensor, local_heads: int, padded_heads: int) -> Tensor:
    """Return the rows of the weight for the heads of this tensor-parallel rank; zeros for padding heads."""
    first = parallel_state.get_tensor_model_parallel_rank() * padded_heads
    first //= parallel_state.get_tensor_model_parallel_world_size()
    missing = max(first + local_heads - len(weight_hd), 0)
    return F.pad(weight_hd, (0, 0, 0, missing))[first : first + local_heads]


class _ShardedRMSNorm(torch.autograd.Function):
    """RMS norm over all ranks in fp32: y = w x / rms(x), rms(x)^2 = (sum of squares of x over all ranks) / width + eps."""

    @staticmethod
    def forward(
        ctx: Any, x_sbhd: Tensor, weight_hd: Tensor, width: int, eps: float, group: dist.ProcessGroup | None
    ) -> Tensor:
        squares_sb11 = torch.linalg.vector_norm(x_sbhd.float(), dim=(-2, -1), keepdim=True).square_()
        inverse_rms = _all_reduce(squares_sb11, group).div_(width).add_(eps).rsqrt_()
        ctx.save_for_backward(x_sbhd, weight_hd, inverse_rms)
        ctx.width, ctx.group = width, group
        return (x_sbhd.float() * inverse_rms).mul_(weight_hd).to(x_sbhd.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x_sbhd, weight_hd, inverse_rms = ctx.saved_tensors
        grad, x = grads[0].float(), x_sbhd.float()
        weight_grad_hd = (grad * x).mul_(inverse_rms).sum((0, 1)).to(weight_hd.dtype)
        grad = grad * weight_hd
        # dx = w dy / rms(x) - x sum(w dy x) / (width rms(x)^3), with the sum over all ranks
        row_dot_sb11 = _all_reduce((grad * x).sum((-2, -1), keepdim=True), ctx.group)
        row_dot_sb11.mul_(inverse_rms.pow(3)).div_(ctx.width)
        return grad.mul_(inverse_rms).addcmul_(x, row_dot_sb11, value=-1).to(x_sbhd.dtype), weight_grad_hd, None, None, None


def _all_reduce(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(values, group=group)
    return values


class _CombiningLayer(TransformerLayer):
    """Transformer layer with its own functions in place of megatron-core's additions with dropout."""

    def _combine(self, after_attention: Combine, after_mlp: Combine) -> None:
        self.self_attn_bda, self.mlp_bda = _without_dropout(after_attention), _without_dropout(after_mlp)
        # megatron-core's handler is enable_grad, with which norms would save their inputs in evaluation, too
        self.bias_dropout_add_exec_handler = contextlib.nullcontext


def _without_dropout(combine: Combine) -> Callable[[bool, bool], Callable[[OutputAndBias, Tensor, float], Tensor]]:
    """Return a replacement for megatron-core's bias_dropout_add, with the same arguments but no dropout."""

    def add(output_and_bias: OutputAndBias, residual: Tensor, dropout: float) -> Tensor:
        output, bias = output_and_bias
        return combine(output if bias is None else output + bias, residual)

    return lambda training, fused: add


class PostNormLayer(_CombiningLayer):
    """Layer that normalises the outputs of attention and MLP before adding them.

    With ``scaled``, the sum is multiplied by a number of the layer, which is never trained.
    """

    def __init__(self, *args: Any, scaled: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        sizes = {"hidden_size": self.config.hidden_size, "eps": self.config.layernorm_epsilon}
        self.post_attention_layernorm = TorchNorm(config=self.config, **sizes)
        self.post_mlp_layernorm = TorchNorm(config=self.config, **sizes)
        self._combine(
            lambda output, residual: residual + self.post_attention_layernorm(output),
            lambda output, residual: self._scale(residual + self.post_mlp_layernorm(output)),
        )
        self.layer_scalar: torch.nn.Parameter | None = None
        if scaled:
            one = torch.ones(1, dtype=torch.float32, device=device.current_device())
            self.layer_scalar = torch.nn.Parameter(one, requires_grad=False)

    def _scale(self, hidden_sbH: Tensor) -> Tensor:
        return hidden_sbH if self.layer_scalar is None else hidden_sbH * self.layer_scalar.to(hidden_sbH.dtype)


class ScaledResidualLayer(_CombiningLayer):
    """Layer that multiplies the outputs of attention and MLP by a number before adding them."""

    def __init__(self, *args: Any, multiplier: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._combine(*[lambda output, residual: residual + output * multiplier] * 2)


class ParallelLayer(_CombiningLayer):
    """Layer whose attention and MLP have the same input: x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        sizes = {"hidden_size": self.config.hidden_size, "eps": self.config.layernorm_epsilon}
        self.shared_layernorm = TorchLayerNorm(config=self.config, **sizes)
        self._combine(*[lambda output, residual: output] * 2)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        normed = self.shared_layernorm(hidden_states)
        attended, context = self._forward_attention(normed, *args, **kwargs)
        return hidden_states + attended + self._forward_mlp(normed, padding_mask=kwargs.get("padding_mask")), context
