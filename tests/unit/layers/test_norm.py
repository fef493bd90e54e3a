from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_kto.layers.norm import TorchNorm


def config(**settings: Any) -> TransformerConfig:
    return TransformerConfig(
        **{"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "normalization": "RMSNorm", **settings}
    )


def norm_with_weight(zero_centered: bool = False) -> Any:
    norm: Any = TorchNorm(config(layernorm_zero_centered_gamma=zero_centered), hidden_size=8, eps=1e-2)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-1, 2, 8))
    return norm


@pytest.mark.parametrize("zero_centered", [False, True])
def test_gradients_equal_torch(zero_centered: bool) -> None:
    torch.manual_seed(0)
    norm, values, grad = norm_with_weight(zero_centered), torch.randn(3, 2, 8, requires_grad=True), torch.randn(3, 2, 8)
    exact_weight, exact_values = (each.detach().double().requires_grad_() for each in (norm.weight, values))
    exact = torch.nn.functional.rms_norm(exact_values, (8,), exact_weight + zero_centered, 1e-2)
    torch.testing.assert_close(norm(values), exact.float(), rtol=2e-6, atol=2e-6)
    found = torch.autograd.grad(norm(values), (values, norm.weight), grad)
    expected = torch.autograd.grad(exact, (exact_values, exact_weight), grad.double())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=2e-6, atol=2e-6)


def test_the_weight_gradient_is_added_to_main_grad() -> None:
    torch.manual_seed(0)
    norm, values = norm_with_weight(), torch.randn(3, 2, 8)
    norm(values).square().sum().backward()
    once, norm.weight.grad = norm.weight.grad, None
    norm.weight.main_grad = torch.ones(8)
    for _ in range(2):
        norm(values).square().sum().backward()
    assert norm.weight.grad.is_sparse  # and holds nothing: it says only that the gradient has arrived
    assert norm.weight.grad._nnz() == 0
    torch.testing.assert_close(norm.weight.main_grad, 1 + 2 * once)


def test_a_frozen_weight_gets_no_gradient() -> None:
    norm, values = norm_with_weight(), torch.randn(3, 2, 8, requires_grad=True)
    norm.weight.requires_grad_(False)
    norm.weight.main_grad = torch.zeros(8)
    norm(values).square().sum().backward()
    assert values.grad is not None
    assert not norm.weight.main_grad.any()


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_parameters_are_marked_for_sequence_parallelism(sequence_parallel: bool) -> None:
    dtypes = dict.fromkeys(("params_dtype", "pipeline_dtype"), torch.bfloat16)
    settings = config(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel, **dtypes)
    for parameter in TorchNorm(config=settings, hidden_size=4, eps=1e-6).parameters():
        assert getattr(parameter, "sequence_parallel") is sequence_parallel  # noqa: B009
        assert parameter.dtype == torch.bfloat16


def test_one_plus_the_weight_is_not_rounded_in_bf16() -> None:
    """1 + 2^-9 cannot be represented in bf16: it would be rounded to 1."""
    settings = config(layernorm_zero_centered_gamma=True, params_dtype=torch.bfloat16)
    norm: Any = TorchNorm(settings, hidden_size=64, eps=0.0)
    with torch.no_grad():
        norm.weight.fill_(2**-9)
    values = torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16()
    normed = values.float() / values.float().square().mean().sqrt()
    assert torch.equal(norm(values), (normed * (1 + 2**-9)).bfloat16())
    assert not torch.equal(norm(values), normed.bfloat16())
