"""Attention whose scores are softly capped, cap * tanh(score / cap), as Gemma 2's are (arXiv 2408.00118, section 2).

torch's fused attention has no place for that, and its flex_attention no backward pass on the CPU. So scores are written out
for a block of queries at a time, and again in the backward pass, as in FlashAttention (Dao et al. 2022, arXiv 2205.14135,
algorithms 1 and 4): the scores of all queries never exist together, and a logarithm a query is kept of them.

Shape suffixes: b batch, h heads, g key-value heads, q queries of a block, m the queries of all heads that share a key-value
head, one head after the other, s keys, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

BLOCK = 128  # queries: as many rows of scores exist for each head


def capped_attention(
    query_bhsd: Tensor,
    key_bgsd: Tensor,
    value_bgsd: Tensor,
    *,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    enable_gqa: bool,
    cap: float,
) -> Tensor:
    """softmax(cap * tanh(scale * q k^T / cap)) v, with the arguments of torch's scaled_dot_product_attention and the cap.

    A mask may be torch's description of the causal order, too (``torch.nn.attention.bias``), of which no tensor is made.

    Returns:
        [batch, heads, sequence, head size], whose memory is [sequence, batch, heads, head size].

    Raises:
        ValueError: dropout; neither a mask nor the causal order, or both; unlike numbers of heads without ``enable_gqa``.
    """
    if dropout_p:
        raise ValueError(f"dropout_p must be 0 where scores are capped, got {dropout_p}")
    offset = 0  # of the key that is a query's own
    if isinstance(attn_mask, CausalBias):
        is_lower_right = attn_mask.variant == CausalVariant.LOWER_RIGHT
        offset = key_bgsd.size(2) - query_bhsd.size(2) if is_lower_right else 0
        attn_mask, is_causal = None, True
    if is_causal == (attn_mask is not None):
        where = "without a mask" if attn_mask is None else "with a mask"
        raise ValueError(f"is_causal must be {attn_mask is None} {where}, got {is_causal}")
    if not enable_gqa and query_bhsd.size(1) != key_bgsd.size(1):
        raise ValueError(f"enable_gqa must be set for {query_bhsd.size(1)} heads and {key_bgsd.size(1)} key-value heads")
    out: Tensor = _Capped.apply(query_bhsd, key_bgsd, value_bgsd, attn_mask, offset, scale, cap)  # type: ignore[no-untyped-call]
    return out


class _Capped(torch.autograd.Function):
    """p = softmax(cap t), t = tanh(scale q k^T / cap), in fp32; d score = scale (1 - t^2) p (dp - sum(p dp))."""

    @staticmethod
    def forward(
        ctx: Any,
        query_bhsd: Tensor,
        key_bgsd: Tensor,
        value_bgsd: Tensor,
        seen: Tensor | None,
        offset: int,
        scale: float,
        cap: float,
    ) -> Tensor:
        batch, heads, length, size = query_bhsd.shape
        out_bhsd = query_bhsd.new_empty(length, batch, heads, size).permute(1, 2, 0, 3)
        log_sum_bhs = query_bhsd.new_empty(batch, heads, length, dtype=torch.float32)
        for rows, keys in _blocks(length, key_bgsd.size(2), seen, offset):
            tanh_bgms = _tanh(_together(query_bhsd[:, :, rows], key_bgsd), key_bgsd[:, :, keys], scale / cap)
            capped_bhqs = _apart(tanh_bgms.mul_(cap), heads).masked_fill_(
                ~_sees(seen, rows, keys, offset, out_bhsd), float("-inf")
            )
            log_sum_bhs[:, :, rows] = log_sum_bhq = capped_bhqs.logsumexp(-1)
            weight_bhqs = capped_bhqs.sub_(log_sum_bhq.unsqueeze(-1)).exp_().to(value_bgsd.dtype)
            out_bhsd[:, :, rows] = _apart(_together(weight_bhqs, key_bgsd) @ value_bgsd[:, :, keys], heads)
        ctx.save_for_backward(query_bhsd, key_bgsd, value_bgsd, seen, log_sum_bhs)
        ctx.offset, ctx.scale, ctx.cap = offset, scale, cap
        return out_bhsd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query_bhsd, key_bgsd, value_bgsd, seen, log_sum_bhs = ctx.saved_tensors
        heads, dtype = query_bhsd.size(1), query_bhsd.dtype
        query_grad = torch.empty_like(query_bhsd)
        key_grad, value_grad = (torch.zeros_like(each, dtype=torch.float32) for each in (key_bgsd, value_bgsd))
        for rows, keys in _blocks(query_bhsd.size(2), key_bgsd.size(2), seen, ctx.offset):
            query_bgmd, out_grad_bgmd = (_together(each[:, :, rows], key_bgsd) for each in (query_bhsd, grads[0]))
            tanh_bhqs = _apart(_tanh(query_bgmd, key_bgsd[:, :, keys], ctx.scale / ctx.cap), heads)
            weight_bhqs = (ctx.cap * tanh_bhqs).sub_(log_sum_bhs[:, :, rows].unsqueeze(-1)).exp_()
            weight_bhqs.masked_fill_(~_sees(seen, rows, keys, ctx.offset, grads[0]), 0.0)
            value_grad[:, :, keys] += _together(weight_bhqs.to(dtype), key_bgsd).mT @ out_grad_bgmd
            score_grad_bhqs = _apart((out_grad_bgmd @ value_bgsd[:, :, keys].mT).float(), heads)
            score_grad_bhqs = score_grad_bhqs.sub_((weight_bhqs * score_grad_bhqs).sum(-1, keepdim=True)).mul_(weight_bhqs)
            score_grad_bhqs.mul_(tanh_bhqs.square_().neg_().add_(1)).mul_(ctx.scale)
            score_grad_bgms = _together(score_grad_bhqs.to(dtype), key_bgsd)
            query_grad[:, :, rows] = _apart(score_grad_bgms @ key_bgsd[:, :, keys], heads)
            key_grad[:, :, keys] += score_grad_bgms.mT @ query_bgmd
        return query_grad, key_grad.to(dtype), value_grad.to(dtype), None, None, None, None


def _blocks(queries: int, keys: int, seen: Tensor | None, offset: int) -> Iterator[tuple[slice, slice]]:
    """Each block of queries, and the keys that it may see."""
    for start in range(0, queries, BLOCK):
        stop = min(start + BLOCK, queries)
        yield slice(start, stop), slice(0, min(stop + offset, keys) if seen is None else keys)


def _together(each_bhqx: Tensor, key_bgsd: Tensor) -> Tensor:
    """[b, h, q, x] to [b, g, m, x]: one product for all heads of a key-value head, which is not repeated."""
    return each_bhqx.unflatten(1, (key_bgsd.size(1), -1)).flatten(2, 3)


def _apart(each_bgmx: Tensor, heads: int) -> Tensor:
    """[b, g, m, x] to [b, h, q, x]."""
    return each_bgmx.unflatten(2, (heads // each_bgmx.size(1), -1)).flatten(1, 2)


def _tanh(query_bgmd: Tensor, key_bgsd: Tensor, scale: float) -> Tensor:
    return (query_bgmd @ key_bgsd.mT).float().mul_(scale).tanh_()


def _sees(seen: Tensor | None, rows: slice, keys: slice, offset: int, like: Tensor) -> Tensor:
    """True where a query of the block sees a key: [q, s], or what broadcasts to [b, h, q, s]; None is the causal order."""
    if seen is not None:
        return seen[..., rows, keys]
    own_key_q1 = torch.arange(rows.start + offset, rows.stop + offset, device=like.device)[:, None]
    return own_key_q1 >= torch.arange(keys.start, keys.stop, device=like.device)
