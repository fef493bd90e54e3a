"""Transformer layer of megatron-core with norms after attention and MLP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from nemo_kto.models.layers.norm import TorchNorm

OutputAndBias = tuple[Tensor, Tensor | None]


class PostNormLayer(TransformerLayer):
    """Transformer layer that normalises the outputs of attention and MLP before adding them to the residual stream.

    The norms before attention and MLP come from the layer spec, which may have none.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        sizes = {"hidden_size": self.config.hidden_size, "eps": self.config.layernorm_epsilon}
        self.post_attention_layernorm = TorchNorm(config=self.config, **sizes)
        self.post_mlp_layernorm = TorchNorm(config=self.config, **sizes)
        self.self_attn_bda = _normed_add(self.post_attention_layernorm)
        self.mlp_bda = _normed_add(self.post_mlp_layernorm)
        # megatron-core's handler is enable_grad, with which the norms would save their inputs in evaluation, too
        self.bias_dropout_add_exec_handler = contextlib.nullcontext


def _normed_add(norm: nn.Module) -> Callable[[bool, bool], Callable[[OutputAndBias, Tensor, float], Tensor]]:
    """Return a replacement for megatron-core's bias_dropout_add, with the same arguments but no dropout."""

    def add(output_and_bias: OutputAndBias, residual: Tensor, dropout: float) -> Tensor:
        output, bias = output_and_bias
        normed: Tensor = norm(output if bias is None else output + bias)
        return residual + normed

    return lambda training, fused: add
