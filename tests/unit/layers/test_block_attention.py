"""Attention with score soft caps or sinks, against plain formulas and autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_kto.layers.block_attention import QUERY_BLOCK, block_attention

LENGTH, HEADS, GROUPS, SIZE, SCALE, CAP = QUERY_BLOCK + 37, 4, 2, 8, 0.9, 2.5
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
WINDOW = CAUSAL & ~CAUSAL.tril(-5)


def heads(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Query, key, value, and the gradient that arrives; laid out as megatron-core's layers have them."""
    draw = torch.Generator().manual_seed(0)
    numbers = (HEADS, GROUPS, GROUPS, HEADS)
    made = [torch.randn(LENGTH, 2, number, SIZE, generator=draw).to(dtype).permute(1, 2, 0, 3) for number in numbers]
    return [each.requires_grad_(place < 3) for place, each in enumerate(made)]


def written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    seen: torch.Tensor,
    cap: float | None = CAP,
) -> torch.Tensor:
    key, value = (each.repeat_interleave(HEADS // GROUPS, dim=1) for each in (key, value))
    scores = query @ key.mT * SCALE
    scores = (scores if cap is None else cap * torch.tanh(scores / cap)).masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], dim=-1)
    return scores.softmax(-1)[..., : key.size(2)] @ value


def attend(*parts: torch.Tensor, **changes: Any) -> torch.Tensor:
    return block_attention(*parts, **{"scale": SCALE, "cap": CAP, **changes})


def assert_alike(
    found: torch.Tensor, exact: torch.Tensor, parts: list[torch.Tensor], exact_parts: list[torch.Tensor], grad: torch.Tensor
) -> None:
    """Values, and gradients of the parts."""
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad(exact, exact_parts, grad.double())
    for one, other in zip(torch.autograd.grad(found, parts, grad), expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_values_and_gradients() -> None:
    *parts, grad = heads()
    exact_parts = [part.detach().double().requires_grad_() for part in parts]
    assert_alike(attend(*parts), written_out(*exact_parts, seen=CAUSAL), parts, exact_parts, grad)


@pytest.mark.parametrize("cap", [None, CAP], ids=["no cap", "cap"])
def test_a_sink_is_part_of_the_softmax(cap: float | None) -> None:
    *parts, grad = heads()
    parts.append(torch.tensor([-1.0, 0.0, 2.0, 30.0], requires_grad=True))  # the last head sees almost nothing else
    exact_parts = [part.detach().double().requires_grad_() for part in parts]
    exact = written_out(*exact_parts, seen=CAUSAL, cap=cap)
    *others, sinks = parts
    found = attend(*others, sinks_h=sinks, cap=cap)
    assert found[:, 3].abs().max() < 1e-6 < found[:, 2].abs().max()
    assert_alike(found, exact, parts, exact_parts, grad)


@pytest.mark.parametrize("before", [0, 20])
def test_a_window_equals_a_mask(before: int) -> None:
    """If there are more keys than queries, the window of the first block begins past the first key."""
    *parts, grad = heads()
    query, key, value = parts
    exact_parts = [part.detach().double().requires_grad_() for part in parts]
    exact = written_out(*exact_parts, seen=WINDOW)[:, :, before:]
    found = attend(query[:, :, before:], key, value, window=5)
    assert_alike(found, exact, parts, exact_parts, grad[:, :, before:])


def test_keys_beyond_the_window_of_a_block_are_not_read() -> None:
    from tests.distributed.models.test_logprobs import LargestTensor

    long = [torch.randn(1, 1, 4 * QUERY_BLOCK, 2, requires_grad=True) for _ in range(3)]
    with LargestTensor() as largest:
        attend(*long, window=9).sum().backward()
    assert largest.elements == QUERY_BLOCK * (QUERY_BLOCK + 8)


def test_bf16_uses_fp32_between_the_products() -> None:
    *parts, grad = heads(torch.bfloat16)
    exact_parts = [part.detach().double().requires_grad_() for part in parts]
    exact = written_out(*exact_parts, seen=CAUSAL)
    found = attend(*parts)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-2)
    expected = torch.autograd.grad(exact, exact_parts, grad.double())
    for one, other in zip(torch.autograd.grad(found, parts, grad), expected, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one.double(), other, rtol=5e-2, atol=5e-2)
