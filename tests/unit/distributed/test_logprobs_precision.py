"""Token log-probs of a model in bf16 against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nemo_kto.device import device
from nemo_kto.distributed import logprobs
from nemo_kto.distributed.logprobs import vocab_parallel_logprobs

TOKENS, HIDDEN, VOCAB, CHUNK = 100, 576, 8000, 64


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden, weight, target, arriving gradient), the first two in bf16; logits have a standard deviation of about 2."""
    draw = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(TOKENS, HIDDEN, generator=draw).bfloat16()
    weight_VH = (torch.randn(VOCAB, HIDDEN, generator=draw) * 2 / math.sqrt(HIDDEN)).bfloat16()
    target_T, arriving_T = torch.randint(0, VOCAB, (TOKENS,), generator=draw), torch.randn(TOKENS, generator=draw)
    hidden_TH, weight_VH, target_T, arriving_T = (
        tensor.to(device.current_device()) for tensor in (hidden_TH, weight_VH, target_T, arriving_T)
    )
    return hidden_TH, weight_VH, target_T, arriving_T


def in_float64(hidden_TH: torch.Tensor, weight_VH: torch.Tensor, target_T: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(hidden_TH.double() @ weight_VH.double().t(), dim=1)[torch.arange(TOKENS), target_T]


def token_logprobs(
    hidden_TH: torch.Tensor, weight_VH: torch.Tensor, target_T: torch.Tensor, *, summands: int = 2
) -> torch.Tensor:
    return vocab_parallel_logprobs(
        hidden_TH, weight_VH, target_T, vocab_size=VOCAB, group=None, chunk_size=CHUNK, summands=summands
    )


def relative_error(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.double() - true).norm() / true.norm())


def test_token_log_probs_are_not_rounded_to_bf16() -> None:
    hidden_TH, weight_VH, target_T, _ = problem()
    error_T = token_logprobs(hidden_TH, weight_VH, target_T).double() - in_float64(hidden_TH, weight_VH, target_T)
    assert error_T.abs().max() < 1e-5  # rounded to bf16: 0.03


def test_the_log_ratio_of_slightly_moved_weights() -> None:
    """100 tokens of weights that one small step has moved: the rounding of single tokens must not swamp their difference."""
    hidden_TH, weight_VH, target_T, _ = problem()
    step_VH = 1e-3 * torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    moved_VH = (weight_VH + step_VH.to(weight_VH.device) / math.sqrt(HIDDEN)).bfloat16()
    before_T, after_T = (token_logprobs(hidden_TH, weight, target_T).double() for weight in (weight_VH, moved_VH))
    true = in_float64(hidden_TH, moved_VH, target_T).sum() - in_float64(hidden_TH, weight_VH, target_T).sum()
    assert float(after_T.sum() - before_T.sum()) == pytest.approx(float(true), abs=1e-4)


# Relative error of the gradients of hidden states and weight, both in fp32, if that of the logits has been rounded to bf16
# (docs/internals/numerics.md). As two summands, and in fp32 as on a CPU, it adds less than 1e-5.
ERROR_OF_ONE_SUMMAND = 1.23e-3


@pytest.mark.parametrize("summands", [1, 2])
@pytest.mark.parametrize("has_main_grad", [False, True], ids=["bf16_grad", "main_grad"])
def test_gradients_are_rounded_once(has_main_grad: bool, summands: int) -> None:
    """A gradient is rounded to bf16 if it is handed on in bf16, and not at all if it is added to an fp32 ``main_grad``.

    With one summand the gradient of the logits has been rounded before.
    """
    hidden_TH, weight_VH, target_T, arriving_T = problem()
    hidden, weight = (tensor.double().requires_grad_() for tensor in (hidden_TH, weight_VH))
    true_hidden_grad, true_weight_grad = torch.autograd.grad(
        in_float64(hidden, weight, target_T), (hidden, weight), arriving_T.double()
    )
    hidden_TH.requires_grad_(), weight_VH.requires_grad_()
    if has_main_grad:
        weight_VH.main_grad = torch.zeros(VOCAB, HIDDEN, device=weight_VH.device)  # type: ignore[attr-defined]
    token_logprobs(hidden_TH, weight_VH, target_T, summands=summands).backward(arriving_T)
    error = ERROR_OF_ONE_SUMMAND if summands == 1 and logprobs._multiplies_to_fp32(hidden_TH) else 0.0

    def rounded(true: torch.Tensor) -> Any:
        return pytest.approx(math.hypot(relative_error(true.bfloat16(), true), error), rel=0.02)

    assert hidden_TH.grad is not None
    assert relative_error(hidden_TH.grad, true_hidden_grad) == rounded(true_hidden_grad)
    if has_main_grad:
        found = relative_error(weight_VH.main_grad, true_weight_grad)  # type: ignore[attr-defined]
        assert found == pytest.approx(error, rel=0.02, abs=0.0 if error else 1e-5)
    else:
        assert weight_VH.grad is not None
        assert relative_error(weight_VH.grad, true_weight_grad) == rounded(true_weight_grad)


@pytest.mark.parametrize("split", [logprobs.summands_, logprobs.summands_by_bits])
def test_two_bf16_terms_represent_16_bits(split: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    """The gradient of the logits takes part in the products of a GPU in this form."""
    values = torch.randn(7, 1000, generator=torch.Generator().manual_seed(2)) * torch.logspace(-9, 0, 1000)
    values[0, :4] = torch.tensor([0.0, -0.0, 1.0, 3.0e38])
    summands = split(values.clone(), 2)
    assert summands.dtype == torch.bfloat16
    assert ((summands.double().sum(dim=0) - values.double()).abs() <= 2.0**-17 * values.abs()).all()
