from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_kto.models.activation import SwiGLU


def swiglu() -> SwiGLU:
    return SwiGLU(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2))


def test_values_are_those_of_the_two_halves() -> None:
    torch.manual_seed(0)
    gate_and_up = torch.randn(5, 2, 12)
    gate, up = gate_and_up.chunk(2, dim=-1)
    assert torch.equal(swiglu()(gate_and_up), F.silu(gate) * up)


def test_gradients_are_those_of_autograd_to_the_last_bit() -> None:
    torch.manual_seed(0)
    gate_and_up, grad = torch.randn(5, 2, 12, requires_grad=True), torch.randn(5, 2, 6)
    gate, up = gate_and_up.chunk(2, dim=-1)
    (expected,) = torch.autograd.grad(F.silu(gate) * up, gate_and_up, grad)
    (found,) = torch.autograd.grad(swiglu()(gate_and_up), gate_and_up, grad)
    assert torch.equal(found, expected)


def test_only_the_input_is_kept_for_the_backward_pass() -> None:
    kept: list[int] = []
    gate_and_up = torch.randn(5, 2, 12, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()), lambda _: None):
        swiglu()(gate_and_up)
    assert kept == [gate_and_up.data_ptr()]
