from __future__ import annotations

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2TextScaledWordEmbedding

from nemo_kto.models.gpt import scale_of


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 55.5), (torch.float32, 55.42562484741211)])
def test_the_scale_is_rounded_as_in_transformers(dtype: torch.dtype, scale: float) -> None:
    theirs = Gemma2TextScaledWordEmbedding(2, 4, 0, embed_scale=3072**0.5).to(dtype)
    assert scale_of(3072, dtype) == scale
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(2, 4, generator=torch.Generator().manual_seed(0)))
        assert torch.equal(theirs(torch.tensor([1])), theirs.weight[1:] * scale)
