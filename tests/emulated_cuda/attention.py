"""Fused kernels of attention and RMS norm that the CPU lacks, computed in fp32 with CUDA's constraints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Attended:
    """Softmax attention of tensors [..., heads, tokens, size] in fp32; of keys and values there may be fewer heads.

    Attributes:
        query, key, value: in fp32, keys and values repeated to as many heads as there are queries.
        weights: [..., heads, queries, keys], their sum over keys is 1.
        dropout: factor of each weight.
        logsumexp: of the scores, [..., heads, queries].
        groups: queries of a head of keys.
        scale: factor of the scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor
    dropout: Tensor
    logsumexp: Tensor
    groups: int
    scale: float

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None,
        hidden: Tensor | None = None,
        bias: Tensor | None = None,
        dropout: Tensor | None = None,
    ) -> Attended:
        """``hidden`` is true for the keys that a query does not see; ``bias`` is added to the scores."""
        groups, scale = q.shape[-3] // k.shape[-3], q.shape[-1] ** -0.5 if scale is None else scale
        query = q.float()
        key, value = (tensor.float().repeat_interleave(groups, -3) for tensor in (k, v))
        scores = scale * query @ key.transpose(-2, -1)
        if bias is not None and bias.numel():
            scores = scores + bias.float()
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        return cls(
            query=query,
            key=key,
            value=value,
            weights=scores.softmax(-1).nan_to_num(0.0),
            dropout=torch.ones(()) if dropout is None else dropout,
            logsumexp=scores.logsumexp(-1),
            groups=groups,
            scale=scale,
        )

    def output(self) -> Tensor:
        """[..., heads, queries, size]"""
        return (self.weights * self.dropout) @ self.value

    def gradients(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Those of queries, keys, values and scores, from that of the output."""
        grad = grad.float()
        of_weights = grad @ self.value.transpose(-2, -1) * self.dropout
        of_scores = self.weights * (of_weights - (of_weights * self.weights).sum(-1, keepdim=True))
        of_key = self.scale * of_scores.transpose(-2, -1) @ self.query
        of_value = (self.weights * self.dropout).transpose(-2, -1) @ grad
        of_key, of_value = (tensor.unflatten(-3, (-1, self.groups)).sum(-3) for tensor in (of_key, of_value))
        return self.scale * of_scores @ self.key, of_key, of_value, of_scores


def _hidden(queries: int, keys: int, left: int | None, right: int | None, *, first: bool = False) -> Tensor:
    """[queries, keys]; the last query is beside the last key, or the first beside the ``first``; None or -1: no limit."""
    distance = torch.arange(queries)[:, None] - torch.arange(keys) + (0 if first else keys - queries)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if right is not None and right >= 0:
        hidden |= distance < -right
    if left is not None and left >= 0:
        hidden |= distance > left
    return hidden


def _as_fused(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In the order in memory of the fused kernels: [batch, tokens, heads, size]."""
    return tensor.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)


def _refuse_what_flash_refuses(q: Tensor, k: Tensor, v: Tensor, *, heads: int) -> None:
    """As mha_fwd, mha_varlen_fwd and their backward passes do (aten/.../transformers/cuda/flash_attn/flash_api.cpp).

    ``heads`` is the dimension of the heads.
    """
    if q.dtype not in (torch.bfloat16, torch.float16) or {k.dtype, v.dtype} != {q.dtype}:
        raise RuntimeError(f"FlashAttention only supports fp16 and bf16, got {q.dtype}, {k.dtype} and {v.dtype}")
    if q.shape[-1] % 8 or q.shape[-1] > 256 or {k.shape[-1], v.shape[-1]} != {q.shape[-1]}:
        sizes = f"{q.shape[-1]}, {k.shape[-1]} and {v.shape[-1]}"
        raise RuntimeError(f"FlashAttention only supports equal head sizes of a multiple of 8 and at most 256, got {sizes}")
    if any(each.stride(-1) != 1 for each in (q, k, v)):
        raise RuntimeError("FlashAttention needs inputs with a contiguous last dimension")
    if any(
        number * each.element_size() % 16 for each in (q, k, v) for number in (each.storage_offset(), *each.stride()[:-1])
    ):
        raise RuntimeError(
            "FlashAttention reads 16 bytes at a time: misaligned address"
        )  # CUDA's error, which ends the process
    if q.shape[heads] % k.shape[heads] or k.shape[heads] != v.shape[heads]:
        of_each = f"{k.shape[heads]} and {v.shape[heads]} of {q.shape[heads]}"
        raise RuntimeError(f"the number of heads of keys and values must divide that of queries, got {of_each}")


def _refuse_what_efficient_refuses(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, heads: int) -> None:
    """As _efficient_attention_forward does (aten/.../transformers/cuda/attention.cu)."""
    if {k.dtype, v.dtype} != {q.dtype} or (bias is not None and bias.numel() and bias.dtype != q.dtype):
        raise RuntimeError("memory-efficient attention needs inputs and a bias of one dtype")
    if not q.shape[heads] == k.shape[heads] == v.shape[heads] or q.shape[-1] != k.shape[-1]:
        raise RuntimeError(f"memory-efficient attention has no grouped heads, got {q.shape}, {k.shape} and {v.shape}")
    if any(each.stride(-1) != 1 for each in (q, k, v)):
        raise RuntimeError("memory-efficient attention needs inputs with a contiguous last dimension")


# Sequences of equal length: torch's scaled_dot_product_attention, [batch, heads, tokens, size].


def _dense(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, causal: bool, scale: Any, rate: float, seed: int, *, first: bool
) -> Attended:
    """The causal order puts the ``first`` query beside the first key, or else the last beside the last."""
    shape = (*q.shape[:-1], k.shape[-2])
    dropout = None
    if rate:
        dropout = (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) >= rate) / (1 - rate)
    hidden = _hidden(shape[-2], shape[-1], None, 0, first=first) if causal else None
    return Attended.of(q, k, v, scale=scale, hidden=hidden, bias=bias, dropout=dropout)


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    debug: bool = False,
    *,
    scale: Any = None,
) -> tuple[Any, ...]:
    _refuse_what_flash_refuses(q, k, v, heads=1)
    seed = torch.randint(2**31, ())
    found = _dense(q, k, v, None, is_causal, scale, dropout_p, int(seed), first=False)
    state = torch.stack([seed, seed]).to(torch.uint64)
    nothing = torch.empty(0)
    out = _as_fused(found.output(), q.dtype)
    return out, found.logsumexp, nothing, nothing, q.shape[2], k.shape[2], state, nothing, nothing.to(q.dtype)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cq: Any, ck: Any, mq: Any, mk: Any,
    dropout_p: float, is_causal: bool, state: Tensor, offset: Any, *, scale: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    found = _dense(q, k, v, None, is_causal, scale, dropout_p, int(state.view(-1)[0].item()), first=False)
    return tuple(_as_fused(tensor, q.dtype) for tensor in found.gradients(grad)[:3])


def _efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Any,
    logsumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Any = None,
) -> tuple[Tensor, ...]:
    _refuse_what_efficient_refuses(q, k, v, bias, heads=1)
    seed = torch.randint(2**31, ())
    found = _dense(q, k, v, bias, is_causal, scale, dropout_p, int(seed), first=True)
    return _as_fused(found.output(), q.dtype), found.logsumexp, seed, seed.clone()


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor, lse: Tensor, seed: Tensor, offset: Any,
    dropout_p: float, needed: Any, is_causal: bool = False, *, scale: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    found = _dense(q, k, v, bias, is_causal, scale, dropout_p, int(seed), first=True)
    *gradients, of_scores = found.gradients(grad)
    of_bias = of_scores.sum_to_size(bias.shape).to(bias.dtype) if needed[3] and bias is not None else torch.empty(0)
    return (*(_as_fused(tensor, q.dtype) for tensor in gradients), of_bias)


# The same kernel for [batch, tokens, heads, size], which torch calls where the last query is beside the last key.
_NO_ORDER, _FIRST, _LAST = range(3)


def _lower_right(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, starts_q: None, starts_k: None, max_q: Any, max_k: Any, dropout_p: float,
    order: int, logsumexp: bool = False, *, scale: Any = None, **_: Any,
) -> tuple[Any, ...]:  # fmt: skip
    _refuse_what_efficient_refuses(q, k, v, bias, heads=2)
    seed = torch.randint(2**31, ())
    first_q, first_k, first_v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    found = _dense(first_q, first_k, first_v, bias, order != _NO_ORDER, scale, dropout_p, int(seed), first=order == _FIRST)
    out = found.output().to(q.dtype).transpose(1, 2).contiguous()
    return out, found.logsumexp, seed, seed.clone(), q.shape[1], k.shape[1]


def _lower_right_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor, starts_q: None, starts_k: None, max_q: Any,
    max_k: Any, lse: Tensor, dropout_p: float, seed: Tensor, offset: Any, order: int, of_bias: bool, *, scale: Any = None,
    **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    grad, first_q, first_k, first_v = (tensor.transpose(1, 2) for tensor in (grad, q, k, v))
    found = _dense(first_q, first_k, first_v, bias, order != _NO_ORDER, scale, dropout_p, int(seed), first=order == _FIRST)
    return (*(tensor.to(q.dtype).transpose(1, 2).contiguous() for tensor in found.gradients(grad)[:3]), torch.empty(0))


# Packed sequences, [tokens, heads, size]: torch's varlen_attn.


def _packed(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, longest: tuple[int, int], scale: Any, left: Any,
    right: Any,
) -> Iterator[tuple[slice, slice, Attended]]:  # fmt: skip
    """Of each sequence its queries, its keys and its attention."""
    _refuse_what_flash_refuses(q, k, v, heads=1)
    if not all(starts.dtype == torch.int32 and starts.is_contiguous() for starts in (starts_q, starts_k)):
        raise RuntimeError(f"FlashAttention takes contiguous starts in int32, got {starts_q.dtype} and {starts_k.dtype}")
    if not len(starts_q) == len(starts_k) > 1:
        raise RuntimeError(
            f"FlashAttention needs starts of one number of sequences, got {len(starts_q)} and {len(starts_k)}"
        )
    bounds = [list(zip(starts.tolist(), starts.tolist()[1:], strict=False)) for starts in (starts_q, starts_k)]
    for (a, b), (c, d) in zip(*bounds, strict=True):
        if b - a > longest[0] or d - c > longest[1]:
            raise RuntimeError(
                f"flash attention would leave out all after {longest} of a sequence of {b - a} and {d - c} tokens"
            )
        if b > a:
            heads_first = (tensor.transpose(0, 1) for tensor in (q[a:b], k[c:d], v[c:d]))
            hidden = _hidden(b - a, d - c, left, right)
            found = Attended.of(*heads_first, scale=scale, hidden=hidden)
            yield slice(a, b), slice(c, d), found


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, max_q: int, max_k: int, dropout_p: float,
    causal: bool, debug: bool, *, scale: Any = None, window_size_left: Any = None, window_size_right: Any = None, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])
    window = (window_size_left, 0 if causal else window_size_right)
    for queries, _keys, found in _packed(q, k, v, starts_q, starts_k, (max_q, max_k), scale, *window):
        out[queries], lse[:, queries] = found.output().transpose(0, 1).to(q.dtype), found.logsumexp
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), torch.empty(0, dtype=q.dtype)


def _varlen_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts_q: Tensor, starts_k: Tensor, max_q: int,
    max_k: int, dropout_p: float, causal: bool, rng: Tensor, unused: Tensor, *, scale: Any = None,
    window_size_left: Any = None, window_size_right: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    made = [torch.zeros_like(tensor) for tensor in (q, k, v)]
    window = (window_size_left, 0 if causal else window_size_right)
    for queries, keys, found in _packed(q, k, v, starts_q, starts_k, (max_q, max_k), scale, *window):
        gradients = found.gradients(grad[queries].transpose(0, 1))
        for tensor, at, values in zip(made, (queries, keys, keys), gradients, strict=False):
            tensor[at] = values.transpose(0, 1).to(tensor.dtype)
    return tuple(made)


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    factor = torch.rsqrt(wide.square().mean(tuple(range(-len(shape), 0)), keepdim=True) + eps)
    return (wide * factor * (1 if weight is None else weight)).to(x.dtype), factor


def _rms_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], factor: Tensor, weight: Tensor | None, needed: list[bool]
) -> tuple[Tensor, Tensor]:
    grad, normed = grad.to(factor.dtype), x.to(factor.dtype) * factor
    scaled = grad if weight is None else grad * weight
    of_x = factor * (scaled - normed * (scaled * normed).mean(tuple(range(-len(shape), 0)), keepdim=True))
    of_weight = torch.empty(0)
    if weight is not None and needed[1]:
        of_weight = (grad * normed).sum(tuple(range(x.dim() - len(shape)))).to(weight.dtype)
    return of_x.to(x.dtype), of_weight


KERNELS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_efficient_attention_forward": _lower_right,
    "_efficient_attention_backward": _lower_right_backward,
    "_flash_attention_forward": _varlen,
    "_flash_attention_backward": _varlen_backward,
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
}
