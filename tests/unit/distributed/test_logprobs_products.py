"""Products of bf16 matrices with fp32 results, as used for log-probs on a GPU: values and memory.

A CPU lacks these products. They are registered for it here, so that the code for GPUs runs with real values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_kto.device import device, kernels
from nemo_kto.distributed import logprobs
from tests.unit.distributed.test_logprobs_precision import (  # noqa: F401  # collected here
    test_gradients_are_rounded_once,
    test_the_log_ratio_of_slightly_moved_weights,
    test_token_log_probs_are_not_rounded_to_bf16,
)

TOKENS, HIDDEN, VOCAB, COLUMNS, CHUNK = 20, 16, 20_000, 19_900, 8
FP32, BF16 = torch.float32, torch.bfloat16


def product(left: torch.Tensor, right: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    assert left.dtype == right.dtype == BF16
    return torch.mm(left.to(out_dtype), right.to(out_dtype))


def added_product(
    total: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    out: torch.Tensor,
    **factors: Any,
) -> torch.Tensor:
    """torch 2.13's."""
    assert out is total or out.data_ptr() == total.data_ptr()
    assert set(factors.values()) <= {1}
    return out.add_(product(left, right, out_dtype))


def refused(*_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("self and mat2 must have the same dtype, but got Float and BFloat16")


@pytest.fixture(params=[True, False], ids=["adds", "refuses"], autouse=True)
def adds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether torch adds such a product to an fp32 sum; the choice between both is the package's."""
    library = torch.library.Library("aten", "IMPL", "CPU")  # destroyed below
    library.impl("mm.dtype", product)
    library.impl("addmm.dtype_out", added_product if request.param else refused)
    monkeypatch.setattr(logprobs, "_multiplies_to_fp32", lambda factor: factor.dtype == BF16)
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(device, "on_gpu", lambda: True)
        on_gpu.setattr(device, "current_device", lambda: torch.device("cpu"))
        found = kernels.adds_wide_products.__wrapped__()
    monkeypatch.setattr(kernels, "adds_wide_products", lambda: found)
    yield request.param
    library._destroy()


class Results(TorchDispatchMode):
    """Records the shapes of newly allocated products, and counts those that are added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.added = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.mm.dtype:
            self.shapes.append(tuple(result.shape))
        self.added += function is torch.ops.aten.addmm.dtype_out
        return result


@pytest.mark.parametrize("summands", [1, 2])
@pytest.mark.parametrize("has_main_grad", [True, False], ids=["main_grad", "bf16_grad"])
def test_no_product_is_as_large_as_the_weight(has_main_grad: bool, summands: int, adds: bool) -> None:
    """New products are logits and, where torch cannot add, hidden gradients and blocks of rows of the weight gradient."""
    draw = torch.Generator().manual_seed(0)
    hidden_TH, weight_VH = (torch.randn(rows, HIDDEN, generator=draw).bfloat16() for rows in (TOKENS, VOCAB))
    target_T = torch.randint(0, COLUMNS, (TOKENS,), generator=draw)
    exact_vH = weight_VH[:COLUMNS].double().requires_grad_()
    exact_T = torch.log_softmax(hidden_TH.double() @ exact_vH.t(), dim=1)[torch.arange(TOKENS), target_T]
    (expected_vH,) = torch.autograd.grad(exact_T.sum(), exact_vH)
    weight_VH.requires_grad_()
    if has_main_grad:
        weight_VH.main_grad = torch.zeros(VOCAB, HIDDEN)  # type: ignore[attr-defined]
    logps_T = logprobs.vocab_parallel_logprobs(
        hidden_TH.requires_grad_(), weight_VH, target_T, vocab_size=COLUMNS, group=None, chunk_size=CHUNK, summands=summands
    )
    with Results() as results:
        logps_T.sum().backward()
    chunks = [8, 8, 4]
    blocks = [(8192, HIDDEN), (8192, HIDDEN), (COLUMNS - 2 * 8192, HIDDEN)] * len(chunks)
    summed = [*blocks, *((chunk, HIDDEN) for chunk in chunks)] * summands
    assert sorted(results.shapes) == sorted([*((chunk, COLUMNS) for chunk in chunks), *([] if adds else summed)])
    assert results.added == (2 * summands * len(chunks) if adds else 0)
    found_VH = weight_VH.main_grad if has_main_grad else weight_VH.grad  # type: ignore[attr-defined]
    assert found_VH is not None
    error = torch.linalg.vector_norm(found_VH[:COLUMNS].double() - expected_vH) / torch.linalg.vector_norm(expected_vH)
    assert error < (1e-5 if has_main_grad and summands == 2 else 2**-8)
    assert not found_VH[COLUMNS:].any(), "padding of the vocabulary"


def test_the_called_functions_exist_in_the_installed_torch(monkeypatch: pytest.MonkeyPatch, adds: bool) -> None:
    """A name or an argument that torch lacks is an error of another type than a refusal."""
    assert kernels.adds_wide_products() is adds
    total, factor = torch.ones(2, 2), torch.ones(2, 2, dtype=BF16)
    monkeypatch.setattr(logprobs, "_PRODUCT_ROWS", 1)
    logprobs._add_product(total, factor, factor)
    assert torch.equal(total, torch.full((2, 2), 3.0))
    for overload in ("dtype", "dtype_out"):
        assert "out_dtype" in str(getattr(torch.ops.aten.addmm, overload)._schema)
