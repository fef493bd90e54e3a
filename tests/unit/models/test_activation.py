from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_kto.models.activation import GeGLU, SwiGLU

Activation = Callable[[torch.Tensor], torch.Tensor]
# ours, and what is done to the gate
KINDS = pytest.mark.parametrize(
    ("kind", "activation"), [(SwiGLU, F.silu), (GeGLU, partial(F.gelu, approximate="tanh"))], ids=["silu", "gelu"]
)


def gated(kind: type[SwiGLU | GeGLU]) -> SwiGLU | GeGLU:
    return kind(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2))


@KINDS
def test_values_are_those_of_the_two_halves(kind: type[SwiGLU | GeGLU], activation: Activation) -> None:
    torch.manual_seed(0)
    gate_and_up = torch.randn(5, 2, 12)
    gate, up = gate_and_up.chunk(2, dim=-1)
    assert torch.equal(gated(kind)(gate_and_up), activation(gate) * up)


@KINDS
def test_gradients_are_those_of_autograd_to_the_last_bit(kind: type[SwiGLU | GeGLU], activation: Activation) -> None:
    torch.manual_seed(0)
    gate_and_up, grad = torch.randn(5, 2, 12, requires_grad=True), torch.randn(5, 2, 6)
    gate, up = gate_and_up.chunk(2, dim=-1)
    (expected,) = torch.autograd.grad(activation(gate) * up, gate_and_up, grad)
    (found,) = torch.autograd.grad(gated(kind)(gate_and_up), gate_and_up, grad)
    assert torch.equal(found, expected)


def test_only_the_input_is_kept_for_the_backward_pass() -> None:
    kept: list[int] = []
    gate_and_up = torch.randn(5, 2, 12, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()), lambda _: None):
        gated(SwiGLU)(gate_and_up)
    assert kept == [gate_and_up.data_ptr()]
