from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gemma2.modeling_gemma2 import Gemma2TextScaledWordEmbedding

from nemo_kto.models.gpt import _Lookup, scale_of


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 55.5), (torch.float32, 55.42562484741211)])
def test_the_scale_is_rounded_as_in_transformers(dtype: torch.dtype, scale: float) -> None:
    theirs = Gemma2TextScaledWordEmbedding(2, 4, 0, embed_scale=3072**0.5).to(dtype)
    assert scale_of(3072, dtype) == scale
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(2, 4, generator=torch.Generator().manual_seed(0)))
        assert torch.equal(theirs(torch.tensor([1])), theirs.weight[1:] * scale)


class DtypesOfSums(TorchDispatchMode):
    """Notes the dtypes of the sums that ``index_add_`` adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index_add_.default:
            self.found.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_the_gradient_of_a_frequent_token_is_summed_in_fp32() -> None:
    """On a GPU each addition rounds, and a sum of ones in bf16 would end at 256."""
    weight, tokens = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True), torch.ones(1, 4096, dtype=torch.long)
    with DtypesOfSums() as sums:
        _Lookup.apply(weight, tokens, tokens.bool()).sum().backward()
    assert sums.found == [torch.float32]
    assert weight.grad is not None
    assert weight.grad.tolist() == [[0.0] * 3, [4096.0] * 3]
