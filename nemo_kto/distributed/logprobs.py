"""Token log-probs and logits from hidden states, with a vocabulary sharded over the tensor-parallel group.

The logits of all tokens never exist at the same time: they are computed for ``chunk_size`` tokens, reduced to a few numbers
per token and freed, and recomputed in the backward pass. On a CPU the last chunk is not recomputed, because its exponentials
are kept; with a soft cap it is, because its slopes need the logits.

Logits, their gradient and the accumulator of every product are fp32, also for a bf16 model. On a GPU the products multiply
bf16 matrices and return fp32; the gradient of the logits is rounded to bf16 for them, or enters as two bf16 summands. A CPU
has no such product: the weight is converted to fp32 in blocks of rows, and fp32 matrices are multiplied.

Peak memory in addition to inputs and results, in fp32: in the forward pass one chunk of logits [c, v], which may be kept; in
the backward pass the same (with a soft cap also its slopes) and the two gradients, [T, H] and, if the weight has no
``main_grad``, [V, H]. A bf16 model also needs, on a GPU, a chunk in bf16 for each summand and, while the fp32 chunk is free,
a block of rows of a product [v, H] if torch cannot add it in place; on a CPU, a block of the weight.

Two kernels operate on a chunk of logits between two matrix products: softmax statistics, and the gradient of the logits. In
eager mode each operation reads or writes the whole chunk, 4 bytes per logit; a compiled kernel reads it once. Passes over a
chunk in fp32, without the products themselves (a soft cap costs no passes in a compiled kernel):

==========================  ===================  ========
kernel                      eager (soft cap)     compiled
==========================  ===================  ========
``softmax_sums``            6 (+ 6)              1
``gradient_summands``, one  7.5 (+ 17)           1.5
``gradient_summands``, two  11.5 (+ 17)          2
==========================  ===================  ========

Shape suffixes: T tokens, H hidden size, V this rank's rows of the weight, v those that are not padding, c tokens of a chunk,
n summands of a gradient, r rows and i inner size of a product.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_kto.device import kernels
from nemo_kto.device.kernels import FusedKernel
from nemo_kto.distributed.gradients import added_to_main_grad, main_grad_of

# Whether torch.mm returns an fp32 product of bf16 factors: torch >= 2.8, and only on CUDA
_MM_WIDENS = "dtype" in torch.ops.aten.mm.overloads()  # type: ignore[no-untyped-call]

# Rows of the weight that are converted to fp32 at a time: few enough that the product reads them from the CPU cache
_BLOCK_ROWS = 1024

# Rows of a gradient that are computed at a time if torch cannot add them in place: enough to keep a GPU busy
_PRODUCT_ROWS = 8192


def cap_logits(logits: Tensor, softcap: float | None) -> Tensor:
    """Return softcap * tanh(logits / softcap); the logits themselves if ``softcap`` is None."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _cap_(logits_cv: Tensor, softcap: float | None) -> Tensor:
    return logits_cv if softcap is None else logits_cv.div_(softcap).tanh_().mul_(softcap)


def _softmax_sums(logits_cv: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    capped_cv = cap_logits(logits_cv, softcap)
    maximum_c1 = capped_cv.amax(dim=1, keepdim=True)  # inductor finds maximum and sum in one pass if it recognises this form
    return maximum_c1.squeeze(1), (capped_cv - maximum_c1).exp().sum(dim=1, keepdim=True).squeeze(1)


def _softmax_sums_(logits_cv: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    capped_cv = _cap_(logits_cv, softcap)
    maximum_c = capped_cv.amax(dim=1)
    return maximum_c, capped_cv.sub_(maximum_c.unsqueeze(1)).exp_().sum(dim=1)


softmax_sums = FusedKernel(compiled=_softmax_sums, eager=_softmax_sums_)
"""(logits [c, v], soft cap or None) -> maximum of each token's capped logits [c], sum of exp(logit - maximum) [c]."""


def logit_slopes_(
    logits_cv: Tensor, column_c: Tensor, is_local_c: Tensor, normaliser_c: Tensor, softcap: float | None
) -> Tensor:
    """Overwrite logits with d -log-prob / d logits = softmax - one-hot(target); with a soft cap for the logits before it.

    Args:
        column_c: logit column of the target where ``is_local_c``, and arbitrary elsewhere.
        normaliser_c: log of the sum of the exponentials of all capped logits, over all tensor-parallel ranks.
    """
    slope_cv = _cap_(logits_cv, softcap)
    # d (c tanh(x / c)) / dx = 1 - tanh(x / c)^2
    cap_slope_cv = None if softcap is None else slope_cv.div(softcap).square_().neg_().add_(1)
    slope_cv.sub_(normaliser_c.unsqueeze(1)).exp_()
    _subtract_one_hot_(slope_cv, column_c, is_local_c)
    return slope_cv if cap_slope_cv is None else slope_cv.mul_(cap_slope_cv)


def exponential_slopes_(exponentials_cv: Tensor, factor_c: Tensor, column_c: Tensor, is_local_c: Tensor) -> Tensor:
    """Overwrite the exponentials that ``softmax_sums.eager`` leaves without a soft cap with :func:`logit_slopes_`.

    ``factor_c`` is exp(m - normaliser), with the maximum m that was subtracted from the logits.
    """
    return _subtract_one_hot_(exponentials_cv.mul_(factor_c.unsqueeze(1)), column_c, is_local_c)


def _subtract_one_hot_(values_cv: Tensor, column_c: Tensor, is_local_c: Tensor) -> Tensor:
    return values_cv.scatter_add_(1, column_c.unsqueeze(1), -is_local_c.to(values_cv.dtype).unsqueeze(1))


def _gradient_summands(
    logits_cv: Tensor,
    column_c: Tensor,
    is_local_c: Tensor,
    normaliser_c: Tensor,
    grad_c: Tensor,
    softcap: float | None,
    count: int,
) -> Tensor:
    capped_cv = cap_logits(logits_cv, softcap)
    is_target_cv = (torch.arange(logits_cv.shape[1], device=logits_cv.device) == column_c[:, None]) & is_local_c[:, None]
    gradient_cv = (capped_cv - normaliser_c[:, None]).exp() - is_target_cv.to(logits_cv.dtype)
    if softcap is not None:
        gradient_cv = gradient_cv * (1 - (capped_cv / softcap).square())
    return summands_by_bits(gradient_cv * grad_c[:, None], count)


def summands_by_bits(values: Tensor, count: int) -> Tensor:
    """Return fp32 values as :func:`summands_`; rounding of the first of two summands needs no bf16."""
    if count == 1:
        return values.bfloat16().unsqueeze(0)
    # Rounded to 16 bits as integers: inductor computes in fp32 and would omit a rounding to bf16 between two operations.
    high = ((values.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)
    return torch.stack((high.bfloat16(), (values - high).bfloat16()))


def _gradient_summands_(
    logits_cv: Tensor,
    column_c: Tensor,
    is_local_c: Tensor,
    normaliser_c: Tensor,
    grad_c: Tensor,
    softcap: float | None,
    count: int,
) -> Tensor:
    return summands_(logit_slopes_(logits_cv, column_c, is_local_c, normaliser_c, softcap).mul_(grad_c[:, None]), count)


def summands_(values: Tensor, count: int) -> Tensor:
    """Return fp32 values, which are overwritten, as one bf16 matrix, exact to 8 bits, or two, exact to 16: [count, ...]."""
    summands = values.new_empty((count, *values.shape), dtype=torch.bfloat16)
    summands[0] = values
    if count == 2:
        summands[1] = values.sub_(summands[0])
    return summands


gradient_summands = FusedKernel(compiled=_gradient_summands, eager=_gradient_summands_)
"""Gradient of fp32 logits, computed in fp32, as one or two summands in bf16, see :func:`summands_`: [count, c, v].

The arguments are those of :func:`logit_slopes_`, with ``grad_c``, the gradient of each token's negative log-prob, before
``softcap``, and the number of summands at the end.
"""


def vocab_parallel_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None,
    chunk_size: int,
    softcap: float | None = None,
    reduce_hidden_grad: bool = True,
    square_sums: bool = False,
    summands: int = 2,
) -> Tensor:
    """Compute the log-softmax over the full vocabulary at the target tokens. Differentiable in hidden states and weight.

    Each call runs three collectives, for all tokens at once: the maximum; the sum of exponentials together with the logit of
    the target; in the backward pass the gradient of the hidden states. They also run if there are no tokens. Hidden states,
    targets and the result ([T], fp32, or float64 for float64 inputs) are the same on every rank of the group.

    Args:
        weight_VH: this rank's rows of the output weight; rank i of the group holds rows i * V to (i + 1) * V. If it has an
            fp32 ``main_grad``, its gradient is added to that.
        target_T: tokens in [0, vocab_size), which only :func:`check_targets` checks, because here the host would have to
            wait for the device.
        vocab_size: rows of the weight beyond it only pad the vocabulary and are ignored.
        group: tensor-parallel group; None for a single rank.
        chunk_size: number of tokens whose logits exist at the same time. Affects memory and speed, not the result.
        softcap: replace logits by softcap * tanh(logit / softcap), in fp32.
        reduce_hidden_grad: sum the gradient of the hidden states over ``group``. False if the backward pass of the preceding
            operation does so (the gather of sequence parallelism).
        square_sums: return [2, T]: the log-probs, then the log of the sum of all squared probabilities, which has no
            gradient. Needs another collective, and memory for another chunk of logits.
        summands: number of bf16 matrices, 1 or 2, whose sum is the gradient of the logits where a GPU multiplies
            bf16 matrices; without effect elsewhere.

    Raises:
        ValueError: ``chunk_size`` or ``softcap`` is not positive.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive, or None for no cap, got {softcap}")
    first = weight_VH.shape[0] * (dist.get_rank(group) if group is not None else 0)
    columns = min(max(vocab_size - first, 0), weight_VH.shape[0])
    is_local_T = (target_T >= first) & (target_T < first + columns)
    column_T = torch.where(is_local_T, target_T - first, 0)
    logps_T, square_sums_T = _Logprobs.apply(  # type: ignore[no-untyped-call]
        hidden_TH,
        weight_VH,
        column_T,
        is_local_T,
        columns,
        group,
        chunk_size,
        softcap,
        reduce_hidden_grad,
        square_sums,
        summands,
    )
    result: Tensor = logps_T if square_sums_T is None else torch.stack((logps_T, square_sums_T))
    return result


@torch.no_grad()
def vocab_parallel_logits(
    hidden_TH: Tensor, weight_VH: Tensor, *, vocab_size: int, group: dist.ProcessGroup | None, softcap: float | None = None
) -> Tensor:
    """Compute the logits of the full vocabulary, [T, vocab_size], on every rank of the group; for a few tokens.

    The arguments are those of :func:`vocab_parallel_logprobs`. The result, in fp32 or wider, has no gradient. One
    collective gathers the columns of all ranks.
    """
    logits_TV = cap_logits(_logits(hidden_TH, weight_VH), softcap)
    if group is not None:
        of_ranks = [torch.empty_like(logits_TV) for _ in range(dist.get_world_size(group))]
        dist.all_gather(of_ranks, logits_TV, group=group)
        logits_TV = torch.cat(of_ranks, dim=1)
    return logits_TV[:, :vocab_size]


def check_targets(target_T: Tensor, *, vocab_size: int) -> None:
    """Check that targets, a tensor on the host, are in [0, vocab_size); raise ValueError otherwise."""
    if len(target_T) and not 0 <= int(target_T.min()) <= int(target_T.max()) < vocab_size:
        raise ValueError(
            f"targets must be in [0, vocab_size={vocab_size}), got {int(target_T.min())} to {int(target_T.max())}; "
            "tokenise the data with the tokenizer of this model"
        )


class _Logprobs(torch.autograd.Function):
    # column_T is the index of the target among this rank's logit columns if is_local_T, and arbitrary otherwise

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        column_T: Tensor,
        is_local_T: Tensor,
        columns: int,
        group: dist.ProcessGroup | None,
        chunk_size: int,
        softcap: float | None,
        reduce_hidden_grad: bool,
        square_sums: bool,
        summands: int,
    ) -> tuple[Tensor, Tensor | None]:
        num_tokens, wide = len(hidden_TH), _wide(hidden_TH.dtype)
        maximum_T = hidden_TH.new_full((num_tokens,), float("-inf"), dtype=wide)
        exp_sum_and_target_2T = hidden_TH.new_zeros((2, num_tokens), dtype=wide)
        exp_sum_T, target_logit_T = exp_sum_and_target_2T
        square_sum_T = exp_sum_T.clone() if square_sums else None
        logits_cv, chunk = None, slice(0)
        for chunk in _chunks(num_tokens if columns else 0, chunk_size):
            logits_cv = None  # frees it before the next chunk is computed
            logits_cv = _logits(hidden_TH[chunk], weight_VH[:columns])
            target_c = logits_cv.gather(1, column_T[chunk].unsqueeze(1)).squeeze(1)
            target_logit_T[chunk] = cap_logits(target_c, softcap) * is_local_T[chunk]
            if square_sum_T is not None:  # before the logits are overwritten; their maximum is doubled as well
                _, square_sum_T[chunk] = softmax_sums(2 * cap_logits(logits_cv, softcap), None)
            maximum_T[chunk], exp_sum_T[chunk] = softmax_sums(logits_cv, softcap)
        own_maximum_T = maximum_T
        if group is not None:
            own_maximum_T = maximum_T.clone()
            dist.all_reduce(maximum_T, dist.ReduceOp.MAX, group=group)
            exp_sum_T *= (own_maximum_T - maximum_T).exp_()
            dist.all_reduce(exp_sum_and_target_2T, group=group)
            if square_sum_T is not None:  # on its own, because the rounding of a sum depends on the size of the message
                square_sum_T *= (2 * (own_maximum_T - maximum_T)).exp_()
                dist.all_reduce(square_sum_T, group=group)
        normaliser_T = exp_sum_T.log().add_(maximum_T)
        ctx.save_for_backward(hidden_TH, weight_VH, column_T, is_local_T, normaliser_T)
        ctx.columns, ctx.chunk_size, ctx.softcap, ctx.main_grad_VH = columns, chunk_size, softcap, main_grad_of(weight_VH)
        ctx.summands = summands
        ctx.reduce_group = group if reduce_hidden_grad else None
        keeps = logits_cv is not None and _leaves_exponentials(hidden_TH, softcap)
        ctx.kept = (logits_cv, (own_maximum_T - normaliser_T)[chunk].exp_()) if keeps else None
        if square_sum_T is None:
            return target_logit_T - normaliser_T, None
        log_squares_T = square_sum_T.log().add_(2 * (maximum_T - normaliser_T))
        ctx.mark_non_differentiable(log_squares_T)
        return target_logit_T - normaliser_T, log_squares_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, column_T, is_local_T, normaliser_T = ctx.saved_tensors
        columns, dtype, wide = ctx.columns, hidden_TH.dtype, normaliser_T.dtype
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        hidden_grad_TH = torch.zeros_like(hidden_TH, dtype=wide) if wants_hidden else None
        weight_grad_VH = ctx.main_grad_VH if wants_weight else None
        is_summed = weight_grad_VH is not None
        if wants_weight and not is_summed:
            weight_grad_VH = torch.zeros_like(weight_VH, dtype=wide)
        grad_T1 = -grads[0].unsqueeze(1)
        kept, ctx.kept = ctx.kept, None  # overwritten below
        for chunk in reversed(_chunks(len(hidden_TH) if columns else 0, ctx.chunk_size)):
            _add_gradients(
                hidden_TH[chunk],
                weight_VH[:columns],
                column_T[chunk],
                is_local_T[chunk],
                normaliser_T[chunk],
                grad_T1[chunk],
                softcap=ctx.softcap,
                summands=ctx.summands,
                kept=kept,
                hidden_grad_cH=None if hidden_grad_TH is None else hidden_grad_TH[chunk],
                weight_grad_vH=None if weight_grad_VH is None else weight_grad_VH[:columns],
            )
            kept = None
        if hidden_grad_TH is not None:
            if ctx.reduce_group is not None:
                dist.all_reduce(hidden_grad_TH, group=ctx.reduce_group)
            hidden_grad_TH = hidden_grad_TH.to(dtype)
        if weight_grad_VH is not None:
            weight_grad_VH = added_to_main_grad(weight_VH) if is_summed else weight_grad_VH.to(weight_VH.dtype)
        return hidden_grad_TH, weight_grad_VH, *[None] * 9


def _chunks(num_tokens: int, chunk_size: int) -> list[slice]:
    """Return slices of ``chunk_size`` tokens; the first one is shorter if the size does not divide their number."""
    return [slice(max(stop - chunk_size, 0), stop) for stop in reversed(range(num_tokens, 0, -chunk_size))]


def _leaves_exponentials(hidden_TH: Tensor, softcap: float | None) -> bool:
    """Return whether ``softmax_sums`` overwrites the logits of these states with exponentials without a soft cap."""
    return softcap is None and not hidden_TH.is_cuda and not _multiplies_to_fp32(hidden_TH)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _logits(hidden_cH: Tensor, weight_vH: Tensor) -> Tensor:
    """Return the logits before a soft cap in fp32 or wider, without rounding to a narrower type in between."""
    wide = _wide(hidden_cH.dtype)
    if _multiplies_to_fp32(hidden_cH):
        logits_cv = torch.mm(hidden_cH, weight_vH.t(), out_dtype=wide)
    else:
        logits_cv, hidden_cH = hidden_cH.new_empty((len(hidden_cH), len(weight_vH)), dtype=wide), hidden_cH.to(wide)
        for rows in _weight_blocks(weight_vH):
            torch.mm(hidden_cH, weight_vH[rows].to(wide).t(), out=logits_cv[:, rows])
    return logits_cv


def _add_gradients(
    hidden_cH: Tensor,
    weight_vH: Tensor,
    column_c: Tensor,
    is_local_c: Tensor,
    normaliser_c: Tensor,
    grad_c1: Tensor,
    *,
    softcap: float | None,
    summands: int,
    kept: tuple[Tensor, Tensor] | None,
    hidden_grad_cH: Tensor | None,
    weight_grad_vH: Tensor | None,
) -> None:
    """Add (slope * grad) @ weight and (slope * grad)^T @ hidden to the two gradients, which are fp32 or wider.

    The slopes are those of :func:`logit_slopes_`. ``kept`` are the exponentials of the
    logits and their factors, for ``exponential_slopes_``; None to compute the logits again. ``summands`` is the number of
    bf16 matrices that make up slope * grad.
    """
    if _multiplies_to_fp32(hidden_cH):
        logits_cv = _logits(hidden_cH, weight_vH)
        arguments = logits_cv, column_c, is_local_c, normaliser_c, grad_c1.squeeze(1), softcap, summands
        gradients_ncv = gradient_summands(*arguments)
        del logits_cv, arguments  # frees memory for the products
        for gradient_cv in gradients_ncv:
            if hidden_grad_cH is not None:
                _add_product(hidden_grad_cH, gradient_cv, weight_vH)
            if weight_grad_vH is not None:
                _add_product(weight_grad_vH, gradient_cv.t(), hidden_cH)
        return
    if kept is not None:
        slope_cv = exponential_slopes_(*kept, column_c, is_local_c)
    else:
        slope_cv = logit_slopes_(_logits(hidden_cH, weight_vH), column_c, is_local_c, normaliser_c, softcap)
    wide = _wide(hidden_cH.dtype)
    # The incoming gradient is one number per token: scaling matrices [c, H] costs less than scaling the slopes [c, v].
    if hidden_grad_cH is not None:
        for rows in _weight_blocks(weight_vH):
            hidden_grad_cH.addmm_(slope_cv[:, rows], weight_vH[rows].to(wide))
        hidden_grad_cH.mul_(grad_c1)
    if weight_grad_vH is not None:
        weight_grad_vH.addmm_(slope_cv.t(), hidden_cH.to(wide) * grad_c1)


def _add_product(sum_rH: Tensor, left_ri: Tensor, right_iH: Tensor) -> None:
    """Add left @ right of bf16 matrices to an fp32 sum, without a whole product [r, H] in memory besides the sum."""
    if kernels.adds_wide_products():
        torch.addmm(sum_rH, left_ri, right_iH, out_dtype=sum_rH.dtype, out=sum_rH)
        return
    for rows in _chunks(len(sum_rH), _PRODUCT_ROWS):
        sum_rH[rows] += torch.mm(left_ri[rows], right_iH, out_dtype=sum_rH.dtype)


def _multiplies_to_fp32(factor: Tensor) -> bool:
    """Return whether torch can multiply this matrix, in bf16 on a GPU, into an fp32 product."""
    return _MM_WIDENS and factor.is_cuda and factor.dtype == torch.bfloat16


def _weight_blocks(weight_vH: Tensor) -> list[slice]:
    """Return blocks of rows to convert one by one; a weight in fp32 needs no conversion and is one block."""
    is_wide = weight_vH.dtype == _wide(weight_vH.dtype)
    return _chunks(len(weight_vH), len(weight_vH) if is_wide else _BLOCK_ROWS)
