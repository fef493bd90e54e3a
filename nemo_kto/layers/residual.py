"""Transformer layers that add the outputs of attention and MLP to the residual stream in ways that megatron-core lacks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from nemo_kto.layers.norm import TorchLayerNorm, TorchNorm

OutputAndBias = tuple[Tensor, Tensor | None]
Combine = Callable[[Tensor, Tensor], Tensor]  # output of attention or MLP, residual stream -> residual stream


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
    """Layer that normalises the outputs of attention and MLP before adding them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        sizes = {"hidden_size": self.config.hidden_size, "eps": self.config.layernorm_epsilon}
        self.post_attention_layernorm = TorchNorm(config=self.config, **sizes)
        self.post_mlp_layernorm = TorchNorm(config=self.config, **sizes)
        self._combine(
            lambda output, residual: residual + self.post_attention_layernorm(output),
            lambda output, residual: residual + self.post_mlp_layernorm(output),
        )


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
