"""DoRA: a magnitude for each row of an adapted weight; Liu et al. 2024 (arXiv 2402.09353).

With m the magnitudes, [out], and ||.|| the norm of each row (equation 5):

    y = m / ||W + s B A|| * (W x + s B A x) + bias

The norm in the denominator is a constant to the gradient (section 4.3). What is trained is m - ||W||, which starts at zero
as B does: its gradient is that of m, a model starts as its base model to the last bit, and bf16 keeps small moves of m,
which it would round away beside ||W||.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_ROWS = 256  # of a weight whose sum with the adapter exists at the same time, in fp32


class RowNorms(NamedTuple):
    """Norms of the rows of a layer, [out of this rank] each, in fp32.

    Attributes:
        base: ||W||.
        adapted: ||W + s B A||.
    """

    base: Tensor
    adapted: Tensor


@torch.no_grad()
def row_norms(
    weight: Tensor,
    full_b: Tensor,
    lora_a: Tensor,
    scale: float,
    *,
    columns_over: torch.distributed.ProcessGroup | None = None,
) -> RowNorms:
    """Norms of the rows of W and of W + s B A.

    They are taken of the sum itself: a norm put together from those of W and of B A loses its digits where the two nearly
    cancel. The sum is made for some rows at a time.

    Args:
        weight: W, [out, in].
        full_b: B, [out, parts * rank].
        lora_a: A, [parts * rank, in].
        scale: s.
        columns_over: the ranks that share out the columns, where they do: the squares are summed over them.
    """
    lora_a = lora_a.float()
    squares: tuple[list[Tensor], list[Tensor]] = ([], [])
    for rows, of_rows in zip(weight.split(_ROWS), full_b.split(_ROWS), strict=True):
        base = rows.float()
        adapted = torch.addmm(base, of_rows.float(), lora_a, alpha=scale)
        for kept, matrix in zip(squares, (base, adapted), strict=True):
            kept.append(matrix.square().sum(1))
    norms = RowNorms(*map(torch.cat, squares))
    for sums in norms if columns_over is not None and columns_over.size() > 1 else ():
        # one by one: ranks are added in an order that depends on the place, and where B is zero both must be the same
        torch.distributed.all_reduce(sums, group=columns_over)
    return RowNorms(*map(torch.sqrt, norms))


class Change(NamedTuple):
    """By how much an output changes for its magnitude, m / ||W + s B A|| - 1, as a function of m - ||W||: [out], fp32.

    Rows without a magnitude, and rows of zeros, which have no direction, do not change.

    Attributes:
        start: where m = ||W||.
        slope: for each unit of m.
    """

    start: Tensor
    slope: Tensor

    @classmethod
    def of(cls, norms: RowNorms, has_magnitude: Tensor) -> Change:
        """``has_magnitude``: which rows have one, [out] of bool."""
        counts = has_magnitude & (norms.adapted > 0)
        divisor = norms.adapted.masked_fill(~counts, 1.0)
        return cls((norms.base / divisor - 1).masked_fill_(~counts, 0.0), counts / divisor)

    def at(self, moved: Tensor) -> Tensor:
        """``moved``: m - ||W||, [out]."""
        return self.start + moved.float() * self.slope
