"""What only a GPU can show: torch's fused kernels let the last query of a chunk see all keys, of which there are more."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from nemo_kto.device import device

pytestmark = pytest.mark.skipif(not device.on_gpu(), reason="needs a GPU that is used")


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
def test_a_chunk_sees_what_is_before_it(dtype: torch.dtype, tolerance: float, grouped: bool) -> None:
    queries, keys, heads, head_dim = 64, 192, 8, 64
    draw, here = torch.Generator().manual_seed(0), device.current_device()
    shapes = ((heads, queries), (heads // 2 if grouped else heads, keys), (heads // 2 if grouped else heads, keys))
    whole = [torch.randn(2, *shape, head_dim, generator=draw).to(dtype).to(here) for shape in shapes]
    mask = torch.ones(queries, keys, dtype=torch.bool, device=here).tril(keys - queries)
    grad = torch.randn(2, heads, queries, head_dim, generator=draw).to(dtype).to(here)
    results = []
    for seen, inputs in ((causal_lower_right(queries, keys), whole), (mask, [each.float() for each in whole])):
        leaves = [each.detach().requires_grad_() for each in inputs]
        q, k, v = leaves
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=grouped)
        results.append([found, *torch.autograd.grad(found, leaves, grad.to(found.dtype))])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours.float(), expected, rtol=tolerance, atol=tolerance)
