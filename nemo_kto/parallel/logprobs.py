"""From hidden states straight to token log-probs, over a vocabulary sharded over the tensor-parallel group.

The logits of all tokens never exist at the same time: they are made for ``chunk_size`` tokens, reduced to a few numbers a
token and dropped, and made again in the backward pass. Peak memory beyond inputs and results, in fp32: forward, one chunk
of logits [c, v]; backward, the same (with a soft cap its slopes besides) and the two gradients, [T, H] and, where the weight
has no ``main_grad``, [V, H]. For a bf16 model add a chunk in bf16, and on the CPU, which cannot widen a product, another
[V, H].

Shape suffixes: T tokens, H hidden size, V this rank's rows of the weight, v those that are no padding, c tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from nemo_kto.parallel.main_grad import added_to_main_grad, main_grad_of

# torch >= 2.8, and only on CUDA: bf16 factors, fp32 product
_MM_WIDENS = "dtype" in torch.ops.aten.mm.overloads()  # type: ignore[no-untyped-call]


def vocab_parallel_logprobs(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    target_T: torch.Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None,
    chunk_size: int,
    softcap: float | None = None,
    reduce_hidden_grad: bool = True,
) -> torch.Tensor:
    """Log-softmax over the full vocabulary at the target tokens. Differentiable in hidden states and weight.

    Three collectives a call, for all tokens at once: the maximum; the sum of exponentials with the target's logit;
    in the backward pass the gradient of the hidden states. Without any token they take place all the same.

    Args:
        hidden_TH: hidden states, the same on every rank of ``group``.
        weight_VH: this rank's rows of the output weight; rank i of the group holds rows i * V to (i + 1) * V. If it has a
            ``main_grad``, in fp32, its gradient is added there.
        target_T: token to give the log-prob of; the same on every rank. It must be in [0, vocab_size), see
            :func:`check_targets`, for which a tensor on the device would have to be waited for.
        vocab_size: number of tokens. Rows of the weight past it only pad the vocabulary, and take no part.
        group: tensor-parallel group; None for a single rank.
        chunk_size: tokens whose logits exist at the same time. Changes memory and speed, not the result.
        softcap: the logits become softcap * tanh(logit / softcap), in fp32; None where they stay as they are.
        reduce_hidden_grad: sum the gradient of the hidden states over ``group``. False where the backward pass of what comes
            before does it (the gather of sequence parallelism).

    Returns:
        [T], fp32 (float64 for float64 inputs), the same on every rank of the group.

    Raises:
        ValueError: ``chunk_size`` or ``softcap`` is not positive.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive, or None for no cap, got {softcap}")
    first = weight_VH.shape[0] * (dist.get_rank(group) if group is not None else 0)
    columns = min(max(vocab_size - first, 0), weight_VH.shape[0])
    is_here_T = (target_T >= first) & (target_T < first + columns)
    column_T = torch.where(is_here_T, target_T - first, 0)
    logps_T: torch.Tensor = _Logprobs.apply(  # type: ignore[no-untyped-call]
        hidden_TH, weight_VH, column_T, is_here_T, columns, group, chunk_size, softcap, reduce_hidden_grad
    )
    return logps_T


def check_targets(target_T: torch.Tensor, *, vocab_size: int) -> None:
    """Compare targets, on the host, with the vocabulary.

    Raises:
        ValueError: one is not in [0, vocab_size).
    """
    if len(target_T) and not 0 <= int(target_T.min()) <= int(target_T.max()) < vocab_size:
        raise ValueError(
            f"targets must be in [0, vocab_size = {vocab_size}), got {int(target_T.min())} to "
            f"{int(target_T.max())}; tokenise the data with the tokenizer of this model"
        )


class _Logprobs(torch.autograd.Function):
    """``column_T``: where in this rank's columns the target is, if ``is_here_T``; else any."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: torch.Tensor,
        weight_VH: torch.Tensor,
        column_T: torch.Tensor,
        is_here_T: torch.Tensor,
        columns: int,
        group: dist.ProcessGroup | None,
        chunk_size: int,
        softcap: float | None,
        reduce_hidden_grad: bool,
    ) -> torch.Tensor:
        num_tokens, wide = len(hidden_TH), _wide(hidden_TH.dtype)
        maximum_T = hidden_TH.new_full((num_tokens,), float("-inf"), dtype=wide)
        exp_sum_and_target_2T = hidden_TH.new_zeros((2, num_tokens), dtype=wide)
        exp_sum_T, target_logit_T = exp_sum_and_target_2T
        for chunk in _chunks(num_tokens if columns else 0, chunk_size):
            logits_cv = _logits(hidden_TH[chunk], weight_VH[:columns], softcap)
            its_logit_c1 = logits_cv.gather(1, column_T[chunk].unsqueeze(1))
            target_logit_T[chunk] = its_logit_c1.squeeze(1) * is_here_T[chunk]
            maximum_T[chunk] = logits_cv.amax(dim=1)
            exp_sum_T[chunk] = logits_cv.sub_(maximum_T[chunk].unsqueeze(1)).exp_().sum(dim=1)
            del logits_cv  # else it lives on while the next is made
        if group is not None:
            own_maximum_T = maximum_T.clone()
            dist.all_reduce(maximum_T, dist.ReduceOp.MAX, group=group)
            exp_sum_T *= (own_maximum_T - maximum_T).exp_()
            dist.all_reduce(exp_sum_and_target_2T, group=group)
        normaliser_T = exp_sum_T.log().add_(maximum_T)
        ctx.save_for_backward(hidden_TH, weight_VH, column_T, is_here_T, normaliser_T)
        ctx.columns, ctx.chunk_size, ctx.main_grad_VH = columns, chunk_size, main_grad_of(weight_VH)
        ctx.softcap = softcap
        ctx.reduce_group = group if reduce_hidden_grad else None
        return target_logit_T - normaliser_T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_TH, weight_VH, column_T, is_here_T, normaliser_T = ctx.saved_tensors
        columns, dtype, wide = ctx.columns, hidden_TH.dtype, normaliser_T.dtype
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        hidden_grad_TH = torch.zeros_like(hidden_TH, dtype=wide) if wants_hidden else None
        is_summed = wants_weight and ctx.main_grad_VH is not None
        weight_grad_VH = ctx.main_grad_VH if is_summed else None
        if wants_weight and not is_summed:
            weight_grad_VH = torch.zeros_like(weight_VH, dtype=wide)
        grad_T1 = -grads[0].unsqueeze(1)
        for chunk in _chunks(len(hidden_TH) if columns else 0, ctx.chunk_size):
            # d log-prob / d logits = one-hot(target) - softmax; its negative is made in place of the logits
            slope_cv = _logits(hidden_TH[chunk], weight_VH[:columns], ctx.softcap)
            # d (c tanh(x / c)) / dx = 1 - tanh(x / c)^2
            cap_slope_cv = None if ctx.softcap is None else slope_cv.div(ctx.softcap).square_().neg_().add_(1)
            slope_cv.sub_(normaliser_T[chunk].unsqueeze(1)).exp_()
            slope_cv.scatter_add_(1, column_T[chunk].unsqueeze(1), -is_here_T[chunk].to(wide).unsqueeze(1))
            slope_cv = (slope_cv if cap_slope_cv is None else slope_cv.mul_(cap_slope_cv)).to(dtype)
            # The gradient that arrives is one number a token: it scales the narrow factors, not the wide one.
            if hidden_grad_TH is not None:
                hidden_grad_TH[chunk] = _mm(slope_cv, weight_VH[:columns]).mul_(grad_T1[chunk])
            if weight_grad_VH is not None:
                _add_mm(weight_grad_VH[:columns], slope_cv.t(), (hidden_TH[chunk] * grad_T1[chunk]).to(dtype))
            del slope_cv, cap_slope_cv
        if hidden_grad_TH is not None:
            if ctx.reduce_group is not None:
                dist.all_reduce(hidden_grad_TH, group=ctx.reduce_group)
            hidden_grad_TH = hidden_grad_TH.to(dtype)
        if weight_grad_VH is not None:
            weight_grad_VH = added_to_main_grad(weight_VH) if is_summed else weight_grad_VH.to(weight_VH.dtype)
        return hidden_grad_TH, weight_grad_VH, None, None, None, None, None, None, None


def _chunks(num_tokens: int, chunk_size: int) -> list[slice]:
    return [slice(start, start + chunk_size) for start in range(0, num_tokens, chunk_size)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _logits(hidden_cH: torch.Tensor, weight_vH: torch.Tensor, softcap: float | None) -> torch.Tensor:
    logits_cv = _mm(hidden_cH, weight_vH.t())
    return logits_cv if softcap is None else logits_cv.div_(softcap).tanh_().mul_(softcap)


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in fp32 at least; where the hardware can, not rounded on the way."""
    wide = _wide(a.dtype)
    if a.is_cuda and _MM_WIDENS and a.dtype != wide:
        return torch.mm(a, b, out_dtype=wide)
    return torch.mm(a, b).to(wide)


def _add_mm(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, where ``total`` is fp32 at least."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(_mm(a, b))
