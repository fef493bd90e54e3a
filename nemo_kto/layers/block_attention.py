"""Attention in blocks of queries, with features that torch's fused attention lacks: soft caps and sinks.

Soft caps: a score becomes cap * tanh(score / cap), as in Gemma 2 (arXiv 2408.00118, section 2). Sinks: the softmax of each
head has one additional learned score without a value, as in gpt-oss (arXiv 2508.10925).

torch's flex_attention has no backward pass on the CPU. Therefore scores are computed for one block of queries at a time, and
recomputed in the backward pass, as in FlashAttention (Dao et al. 2022, arXiv 2205.14135, algorithms 1 and 4): the scores of
all queries never exist at the same time, and only the log-sum-exp of each query is saved.

Shape suffixes: b batch, h heads, g key-value heads, q queries of a block, m the queries of all heads that share a key-value
head, concatenated head by head, s keys, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

QUERY_BLOCK = 128  # queries for which scores exist at the same time


def block_attention(
    query_bhsd: Tensor,
    key_bgsd: Tensor,
    value_bgsd: Tensor,
    *,
    scale: float,
    cap: float | None = None,  # the scores become cap * tanh(scores / cap)
    sinks_h: Tensor | None = None,  # additional score without a value in the softmax of each head
    window: int | None = None,  # number of keys a query attends to, including its own; None for all earlier ones
) -> Tensor:
    """Compute causal softmax(scores) v, scores = scale * q k^T.

    The last query attends to the last key, also if there are fewer queries than keys. The result is stored in memory as
    [sequence, batch, heads, head size].
    """
    blocks = _Blocks(queries=query_bhsd.size(2), keys=key_bgsd.size(2), window=window)
    out: Tensor = _Attention.apply(query_bhsd, key_bgsd, value_bgsd, sinks_h, blocks, scale, cap)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    """Blocks of queries, with the keys they attend to."""

    queries: int
    keys: int
    window: int | None  # number of keys a query attends to, including its own; None for all earlier ones

    @property
    def offset(self) -> int:
        """Index of a query's own key, minus the index of the query."""
        return self.keys - self.queries

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        """Yield each block of queries with a range of keys that contains all keys it may attend to."""
        for start in range(0, self.queries, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, self.queries)
            first = 0 if self.window is None else max(0, start + self.offset + 1 - self.window)
            yield slice(start, stop), slice(first, min(stop + self.offset, self.keys))

    def hidden(self, rows: slice, keys: slice, like: Tensor) -> Tensor:
        """Return the mask of a block, True where attention is forbidden, [q, s]."""
        own_key_q1 = torch.arange(rows.start + self.offset, rows.stop + self.offset, device=like.device)[:, None]
        before_qs = own_key_q1 - torch.arange(keys.start, keys.stop, device=like.device)
        return before_qs < 0 if self.window is None else (before_qs < 0) | (before_qs >= self.window)


class _Attention(torch.autograd.Function):
    """Autograd function of :func:`block_attention`; the softmax is in fp32.

    Let p be the softmax over the scores z and the sink, without the probability of the sink. The gradient of z is
    p (dp - sum(p dp)). The derivative of a soft-capped z is 1 - (z / cap)^2. The probability of the sink is 1 - sum(p), the
    gradient of the sink -(1 - sum(p)) sum(p dp).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_bhsd: Tensor,
        key_bgsd: Tensor,
        value_bgsd: Tensor,
        sinks_h: Tensor | None,
        blocks: _Blocks,
        scale: float,
        cap: float | None,
    ) -> Tensor:
        batch, heads, length, size = query_bhsd.shape
        out_bhsd = query_bhsd.new_empty(length, batch, heads, size).permute(1, 2, 0, 3)
        log_sum_bhs = query_bhsd.new_empty(batch, heads, length, dtype=torch.float32)
        for rows, keys in blocks:
            score_bgms = _scores(_merge_heads(query_bhsd[:, :, rows], key_bgsd), key_bgsd[:, :, keys], scale, cap)
            score_bhqs = _split_heads(score_bgms, heads).masked_fill_(blocks.hidden(rows, keys, out_bhsd), float("-inf"))
            log_sum_bhq = score_bhqs.logsumexp(-1)
            if sinks_h is not None:
                log_sum_bhq = torch.logaddexp(log_sum_bhq, sinks_h.float()[:, None])
            log_sum_bhs[:, :, rows] = log_sum_bhq
            weight_bhqs = score_bhqs.sub_(log_sum_bhq.unsqueeze(-1)).exp_().to(value_bgsd.dtype)
            out_bhsd[:, :, rows] = _split_heads(_merge_heads(weight_bhqs, key_bgsd) @ value_bgsd[:, :, keys], heads)
        ctx.save_for_backward(query_bhsd, key_bgsd, value_bgsd, sinks_h, log_sum_bhs)
        ctx.blocks, ctx.scale, ctx.cap = blocks, scale, cap
        return out_bhsd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query_bhsd, key_bgsd, value_bgsd, sinks_h, log_sum_bhs = ctx.saved_tensors
        heads, dtype, cap = query_bhsd.size(1), query_bhsd.dtype, ctx.cap
        query_grad, row_dot_bhs = torch.empty_like(query_bhsd), torch.empty_like(log_sum_bhs)
        key_grad = torch.zeros_like(key_bgsd, dtype=torch.float32)
        value_grad = torch.zeros_like(value_bgsd, dtype=torch.float32)
        for rows, keys in ctx.blocks:
            query_bgmd = _merge_heads(query_bhsd[:, :, rows], key_bgsd)
            out_grad_bgmd = _merge_heads(grads[0][:, :, rows], key_bgsd)
            score_bhqs = _split_heads(_scores(query_bgmd, key_bgsd[:, :, keys], ctx.scale, cap), heads)
            slope_bhqs = None if cap is None else (score_bhqs / cap).square_().neg_().add_(1)
            weight_bhqs = score_bhqs.sub_(log_sum_bhs[:, :, rows].unsqueeze(-1)).exp_()
            weight_bhqs.masked_fill_(ctx.blocks.hidden(rows, keys, grads[0]), 0.0)
            value_grad[:, :, keys] += _merge_heads(weight_bhqs.to(dtype), key_bgsd).mT @ out_grad_bgmd
            score_grad_bhqs = _split_heads((out_grad_bgmd @ value_bgsd[:, :, keys].mT).float(), heads)
            row_dot_bhs[:, :, rows] = row_dot_bhq = (weight_bhqs * score_grad_bhqs).sum(-1)
            score_grad_bhqs.sub_(row_dot_bhq.unsqueeze(-1)).mul_(weight_bhqs).mul_(ctx.scale)
            if slope_bhqs is not None:
                score_grad_bhqs.mul_(slope_bhqs)
            score_grad_bgms = _merge_heads(score_grad_bhqs.to(dtype), key_bgsd)
            query_grad[:, :, rows] = _split_heads(score_grad_bgms @ key_bgsd[:, :, keys], heads)
            key_grad[:, :, keys] += score_grad_bgms.mT @ query_bgmd
        sinks_grad = None
        if sinks_h is not None:
            sink_prob_bhs = torch.exp(sinks_h.float()[:, None] - log_sum_bhs)
            sinks_grad = -(sink_prob_bhs * row_dot_bhs).sum((0, 2)).to(sinks_h.dtype)
        return query_grad, key_grad.to(dtype), value_grad.to(dtype), sinks_grad, None, None, None


def _merge_heads(values_bhqx: Tensor, key_bgsd: Tensor) -> Tensor:
    """Reshape [b, h, q, x] to [b, g, m, x], for one product per key-value head without repeating that head."""
    return values_bhqx.unflatten(1, (key_bgsd.size(1), -1)).flatten(2, 3)


def _split_heads(values_bgmx: Tensor, heads: int) -> Tensor:
    """Reshape [b, g, m, x] to [b, h, q, x]."""
    return values_bgmx.unflatten(2, (heads // values_bgmx.size(1), -1)).flatten(1, 2)


def _scores(query_bgmd: Tensor, key_bgsd: Tensor, scale: float, cap: float | None) -> Tensor:
    scores = (query_bgmd @ key_bgsd.mT).float()
    return scores.mul_(scale) if cap is None else scores.mul_(scale / cap).tanh_().mul_(cap)
