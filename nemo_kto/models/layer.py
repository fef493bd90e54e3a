"""A transformer layer of megatron-core with norms where others have none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from nemo_kto.models.layers.norm import TorchNorm

OutputAndBias = tuple[Tensor, Tensor | None]


class PostNormLayer(TransformerLayer):
    """A layer that normalises what attention and MLP give before it is added to the residual stream.

    The norms before them are those of the layer spec, which may have none.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        sizes = {"hidden_size": self.config.hidden_size, "eps": self.config.layernorm_epsilon}
        self.post_attention_layernorm = TorchNorm(config=self.config, **sizes)
        self.post_mlp_layernorm = TorchNorm(config=self.config, **sizes)
        self.self_attn_bda = _normed_add(self.post_attention_layernorm)
        self.mlp_bda = _normed_add(self.post_mlp_layernorm)
        # megatron-core's is enable_grad, with which the norms would keep their inputs in evaluation
        self.bias_dropout_add_exec_handler = contextlib.nullcontext


def _normed_add(norm: nn.Module) -> Callable[[bool, bool], Callable[[OutputAndBias, Tensor, float], Tensor]]:
    """In the place of megatron-core's bias_dropout_add, with its arguments; there is no dropout in this project."""

    def add(output_and_bias: OutputAndBias, residual: Tensor, dropout: float) -> Tensor:
        output, bias = output_and_bias
        normed: Tensor = norm(output if bias is None else output + bias)
        return residual + normed

    return lambda training, fused: add
