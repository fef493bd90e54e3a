"""How exact the figures of a validation are."""

from __future__ import annotations

import math

MIN_VALIDATION_ROWS = 20  # fewer say nothing about a model: with 10 of each class, an AUC of 0.5 may come out as 0.72
_QUANTILE = 1.96  # of the normal distribution, for 95 %


def has_enough_rows(rows: float | None) -> bool:
    """Return whether a validation has enough rows to judge a model by; true if their number is not recorded."""
    return rows is None or rows >= MIN_VALIDATION_ROWS


def auc_interval(auc: float, desirable: int, undesirable: int) -> tuple[float, float]:
    """Return the interval of 95 % of an AUC from numbers of desirable and undesirable examples (each at least 1).

    The standard error is that of Hanley and McNeil (1982, doi 10.1148/radiology.143.1.7063747), taken at each end instead of
    at the estimate (Newcombe 2006, doi 10.1002/sim.2324), so that an AUC of 1 also has an interval.

    Examples:
        >>> [round(end, 2) for end in auc_interval(1.0, 2, 2)], [round(end, 2) for end in auc_interval(0.8, 50, 50)]
        ([0.39, 1.0], [0.7, 0.87])
    """

    def end(limit: float) -> float:
        near, far = auc, limit
        for _ in range(50):
            middle = (near + far) / 2
            is_inside = abs(auc - middle) <= _QUANTILE * _standard_error(middle, desirable, undesirable)
            near, far = (middle, far) if is_inside else (near, middle)
        return near

    return end(0.0), end(1.0)


def _standard_error(auc: float, desirable: int, undesirable: int) -> float:
    both, one = auc / (2 - auc), 2 * auc * auc / (1 + auc)
    variance = auc * (1 - auc) + (desirable - 1) * (both - auc * auc) + (undesirable - 1) * (one - auc * auc)
    return math.sqrt(max(0.0, variance) / (desirable * undesirable))
