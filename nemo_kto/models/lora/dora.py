"""DoRA: trained magnitudes for the rows of adapted weights (Liu et al. 2024, arXiv 2402.09353).

With m the magnitudes, [out], and ||.|| the norm of each row (equation 5):

    y = m / ||W + s B A|| * (W x + s B A x) + bias

The norm in the denominator is treated as a constant in the backward pass (section 4.3). The trained parameter is
m - ||W||, which starts at zero like B: its gradient is that of m, the initial model equals the base model bit for bit, and
bf16 keeps small updates of m, which it would round away in a sum with ||W||.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_ROWS = 256  # number of rows of a weight for which W + s B A exists at the same time, in fp32


class RowNorms(NamedTuple):
    """Row norms of a layer, [out of this rank] each, in fp32."""

    base: Tensor  # ||W||
    adapted: Tensor  # ||W + s B A||


@torch.no_grad()
def row_norms(
    weight: Tensor,
    full_b: Tensor,
    lora_a: Tensor,
    scale: float,
    *,
    columns_over: torch.distributed.ProcessGroup | None = None,
) -> RowNorms:
    """Compute the row norms of W [out, in] and of W + scale * B A, with B [out, parts * rank] and A [parts * rank, in].

    The sum itself is formed, for some rows at a time: a norm computed from those of W and of B A would lose precision where
    the two nearly cancel. ``columns_over`` are the ranks over which the columns are sharded; None if they are not.
    """
    lora_a = lora_a.float()
    squares: tuple[list[Tensor], list[Tensor]] = ([], [])
    for weight_rows, b_rows in zip(weight.split(_ROWS), full_b.split(_ROWS), strict=True):
        base = weight_rows.float()
        adapted = torch.addmm(base, b_rows.float(), lora_a, alpha=scale)
        for sums, matrix in zip(squares, (base, adapted), strict=True):
            sums.append(matrix.square().sum(1))
    norms = RowNorms(*map(torch.cat, squares))
    for total in norms if columns_over is not None and columns_over.size() > 1 else ():
        # one tensor per call: the order of summation depends on the position in the buffer, and for B = 0 both sums must
        # be bitwise equal
        torch.distributed.all_reduce(total, group=columns_over)
    return RowNorms(*map(torch.sqrt, norms))


class Change(NamedTuple):
    """Relative change of an output by its magnitude, m / ||W + s B A|| - 1, as a function of m - ||W||: [out], fp32.

    It is zero for rows without a magnitude, and for rows of zeros, which have no direction.
    """

    start: Tensor  # change at m = ||W||
    slope: Tensor  # derivative with respect to m

    @classmethod
    def of(cls, norms: RowNorms, has_magnitude: Tensor) -> Change:
        """Build the function from the row norms; ``has_magnitude`` marks the rows with a magnitude, [out] bool."""
        counts = has_magnitude & (norms.adapted > 0)
        divisor = norms.adapted.masked_fill(~counts, 1.0)
        return cls((norms.base / divisor - 1).masked_fill_(~counts, 0.0), counts / divisor)

    def at(self, moved: Tensor) -> Tensor:
        """Return the change at ``moved`` = m - ||W||, [out]."""
        return self.start + moved.float() * self.slope
