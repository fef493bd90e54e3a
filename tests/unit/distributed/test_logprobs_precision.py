"""Log-probs of chunks of logits: kernels against float64, compiled and eager, and token log-probs of a model in bf16."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nemo_kto.device import device, kernels
from nemo_kto.device.kernels import FusedKernel
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


Chunk = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def chunk(tokens: int, columns: int) -> Chunk:
    """Logits, columns of targets, whether they are local, normalisers of whole vocabularies, arriving gradients."""
    draw = torch.Generator().manual_seed(tokens)
    logits_cv = 3 * torch.randn(tokens, columns, generator=draw)
    column_c = torch.randint(0, columns, (tokens,), generator=draw)
    is_local_c = torch.rand(tokens, generator=draw) < 0.8
    return logits_cv, column_c, is_local_c, logits_cv.logsumexp(dim=1) + 0.3, torch.randn(tokens, generator=draw)


def expected(values: Chunk, softcap: float | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(maximum, sum of exponentials, gradient of the logits) in float64; the gradient by autograd."""
    logits_cv, column_c, is_local_c, normaliser_c, grad_c = values
    logits_cv = logits_cv.double().requires_grad_()
    capped_cv = logits_cv if softcap is None else softcap * torch.tanh(logits_cv / softcap)
    target_c = capped_cv.gather(1, column_c[:, None])[:, 0] * is_local_c
    # the sum of all exponentials has the slope exp(logit - normaliser) with any other logits in it
    objective = ((capped_cv - normaliser_c.double()[:, None]).exp().sum(dim=1) - target_c) @ grad_c.double()
    (gradient_cv,) = torch.autograd.grad(objective, logits_cv)
    maximum_c = capped_cv.detach().amax(dim=1)
    return maximum_c, (capped_cv.detach() - maximum_c[:, None]).exp().sum(dim=1), gradient_cv


def largest_errors(values: Chunk, softcap: float | None, *, form: str | None) -> list[float]:
    """Largest errors of both kernels, relative to each value; ``form``: that attribute; None for a call of the kernel."""
    maximum_c, sum_c, gradient_cv = expected(values, softcap)
    both: list[Any] = [logprobs.softmax_sums, logprobs.gradient_summands]
    sums, summands = both if form is None else [getattr(kernel, form) for kernel in both]
    found_maximum_c, found_sum_c = sums(values[0].clone(), softcap)
    summands_1cv, summands_2cv = (summands(values[0].clone(), *values[1:], softcap, count) for count in (1, 2))
    assert (len(summands_1cv), len(summands_2cv)) == (1, 2)
    assert summands_1cv.dtype == summands_2cv.dtype == torch.bfloat16
    pairs = {
        (found_maximum_c, maximum_c): 1e-30,
        (found_sum_c, sum_c): 1e-30,
        (summands_2cv.double().sum(dim=0), gradient_cv): 1e-4,  # cancellation next to a target of probability one
        (summands_1cv[0], gradient_cv): 1e-4,
    }
    return [float(((a.double() - b).abs() / (b.abs() + least)).max()) for (a, b), least in pairs.items()]


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("form", ["eager", "fusable"])
def test_both_forms_are_the_same_function(form: str, tokens: int, softcap: float | None) -> None:
    maximum, exp_sum, gradient, rounded = largest_errors(chunk(tokens, 501), softcap, form=form)
    assert maximum < 1e-6
    assert exp_sum < 1e-5
    assert gradient < 2**-16
    assert 2**-10 < rounded < 1.01 * 2**-8, "half a unit in the last of 8 bits, and not less"


def test_a_target_of_another_rank_has_no_one_hot() -> None:
    logits_cv, column_c, _, normaliser_c, grad_c = chunk(4, 50)
    for form in (logprobs.gradient_summands.eager, logprobs.gradient_summands.fusable):
        without, there = (
            form(logits_cv.clone(), column_c, torch.full((4,), is_local), normaliser_c, grad_c, None, 2).float().sum(dim=0)
            for is_local in (False, True)
        )
        difference_cv = without - there
        assert torch.allclose(difference_cv.gather(1, column_c[:, None])[:, 0], grad_c, rtol=1e-4)
        assert int((difference_cv != 0).sum()) == 4


def test_a_failure_to_compile_is_one_warning_and_the_eager_form(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []

    def broken(function: object, **_: object) -> object:
        def compiled(value: int) -> int:
            calls.append("compiled")
            raise RuntimeError("no kernel image\nmany more lines")

        return compiled

    kernel: FusedKernel[[int], int] = FusedKernel(compiled=lambda value: value, eager=lambda value: -value)
    assert kernel(1) == -1, "the CPU never compiles"
    monkeypatch.setattr(kernels, "compiles", lambda: True)
    monkeypatch.setattr(torch, "compile", broken)
    with caplog.at_level(logging.WARNING):
        assert [kernel(2), kernel(3)] == [-2, -3]
    assert calls == ["compiled"]
    assert len(caplog.records) == 1
    assert "RuntimeError: no kernel image)" in caplog.text


COMPILED = """
import json, sys
import torch
from nemo_kto.device import kernels
from tests.unit.distributed.test_logprobs_precision import chunk, largest_errors
kernels.compiles = lambda: True
import torch._inductor.metrics as metrics
errors = {}
for softcap in (None, 5.0):
    for tokens in (33, 64, 1):
        errors[f"{softcap}, {tokens}"] = largest_errors(chunk(tokens, 501), softcap, form=None)
from nemo_kto.distributed.logprobs import gradient_summands
counts = []
for summands in (1, 2):
    torch._dynamo.reset()
    metrics.reset()
    gradient_summands(*chunk(33, 501), None, summands)
    counts.append(metrics.generated_kernel_count)
print(json.dumps([errors, counts]))
"""


@pytest.mark.slow
def test_compiled_kernels() -> None:
    """Compiled for the CPU the values are the same, and one kernel computes each gradient and reads the logits once."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH")}
    command = [sys.executable, "-W", "error::UserWarning:nemo_kto", "-c", COMPILED]
    done = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "torch.compile failed" not in done.stderr
    errors, gradient_kernels = json.loads(done.stdout.splitlines()[-1])
    for maximum, exp_sum, gradient, rounded in errors.values():
        assert maximum < 1e-6
        assert exp_sum < 1e-5
        assert gradient < 2**-16
        assert rounded < 1.01 * 2**-8
    assert gradient_kernels == [1, 1]
