"""Operations on a chunk of logits between two matrix products: softmax statistics, and the gradient of the logits.

In eager mode each operation reads or writes the whole chunk, 4 bytes per logit; a compiled kernel reads it once. Passes over
a chunk in fp32, without the products themselves (a soft cap costs no passes in a compiled kernel):

==========================  ===================  ========
kernel                      eager (soft cap)     compiled
==========================  ===================  ========
``softmax_sums``            6 (+ 6)              1
``gradient_summands``, one  7.5 (+ 17)           1.5
``gradient_summands``, two  11.5 (+ 17)          2
==========================  ===================  ========

Shape suffixes: c tokens of a chunk, v this rank's logit columns.
"""

from __future__ import annotations

import torch

from nemo_kto.device.kernels import FusedKernel


def cap_logits(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Return softcap * tanh(logits / softcap); the logits themselves if ``softcap`` is None."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _cap_(logits_cv: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return logits_cv if softcap is None else logits_cv.div_(softcap).tanh_().mul_(softcap)


def _softmax_sums(logits_cv: torch.Tensor, softcap: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    capped_cv = cap_logits(logits_cv, softcap)
    maximum_c1 = capped_cv.amax(dim=1, keepdim=True)  # inductor finds maximum and sum in one pass if it recognises this form
    return maximum_c1.squeeze(1), (capped_cv - maximum_c1).exp().sum(dim=1, keepdim=True).squeeze(1)


def _softmax_sums_(logits_cv: torch.Tensor, softcap: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    capped_cv = _cap_(logits_cv, softcap)
    maximum_c = capped_cv.amax(dim=1)
    return maximum_c, capped_cv.sub_(maximum_c.unsqueeze(1)).exp_().sum(dim=1)


softmax_sums = FusedKernel(compiled=_softmax_sums, eager=_softmax_sums_)
"""(logits [c, v], soft cap or None) -> maximum of each token's capped logits [c], sum of exp(logit - maximum) [c]."""


def logit_slopes_(
    logits_cv: torch.Tensor,
    column_c: torch.Tensor,
    is_local_c: torch.Tensor,
    normaliser_c: torch.Tensor,
    softcap: float | None,
) -> torch.Tensor:
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


def exponential_slopes_(
    exponentials_cv: torch.Tensor, factor_c: torch.Tensor, column_c: torch.Tensor, is_local_c: torch.Tensor
) -> torch.Tensor:
    """Overwrite the exponentials that ``softmax_sums.eager`` leaves without a soft cap with :func:`logit_slopes_`.

    ``factor_c`` is exp(m - normaliser), with the maximum m that was subtracted from the logits.
    """
    return _subtract_one_hot_(exponentials_cv.mul_(factor_c.unsqueeze(1)), column_c, is_local_c)


def _subtract_one_hot_(values_cv: torch.Tensor, column_c: torch.Tensor, is_local_c: torch.Tensor) -> torch.Tensor:
    return values_cv.scatter_add_(1, column_c.unsqueeze(1), -is_local_c.to(values_cv.dtype).unsqueeze(1))


def _gradient_summands(
    logits_cv: torch.Tensor,
    column_c: torch.Tensor,
    is_local_c: torch.Tensor,
    normaliser_c: torch.Tensor,
    grad_c: torch.Tensor,
    softcap: float | None,
    count: int,
) -> torch.Tensor:
    capped_cv = cap_logits(logits_cv, softcap)
    is_target_cv = (torch.arange(logits_cv.shape[1], device=logits_cv.device) == column_c[:, None]) & is_local_c[:, None]
    gradient_cv = (capped_cv - normaliser_c[:, None]).exp() - is_target_cv.to(logits_cv.dtype)
    if softcap is not None:
        gradient_cv = gradient_cv * (1 - (capped_cv / softcap).square())
    return summands_by_bits(gradient_cv * grad_c[:, None], count)


def summands_by_bits(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return fp32 values as :func:`summands_`; rounding of the first of two summands needs no bf16."""
    if count == 1:
        return values.bfloat16().unsqueeze(0)
    # Rounded to 16 bits as integers: inductor computes in fp32 and would omit a rounding to bf16 between two operations.
    high = ((values.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)
    return torch.stack((high.bfloat16(), (values - high).bfloat16()))


def _gradient_summands_(
    logits_cv: torch.Tensor,
    column_c: torch.Tensor,
    is_local_c: torch.Tensor,
    normaliser_c: torch.Tensor,
    grad_c: torch.Tensor,
    softcap: float | None,
    count: int,
) -> torch.Tensor:
    return summands_(logit_slopes_(logits_cv, column_c, is_local_c, normaliser_c, softcap).mul_(grad_c[:, None]), count)


def summands_(values: torch.Tensor, count: int) -> torch.Tensor:
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
