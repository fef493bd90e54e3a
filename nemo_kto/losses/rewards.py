"""Rewards of single examples, and the AUC, a metric that is not a sum over examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_kto.utils import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

_ROUNDING = 2.0**-20  # of a log-prob in fp32, summed over tokens: eight units in its last place


def without_rounding_errors(log_ratios_N: Tensor, logps_N: Tensor) -> Tensor:
    """Return the log-ratios, with 0 for finite ones that are within the rounding errors of their log-probs.

    Where policy and reference are equal, but are evaluated in different micro-batches, rounding errors would otherwise order
    the examples, and before training an AUC would be arbitrary instead of 0.5, an accuracy instead of 0.
    """
    is_rounding_N = (log_ratios_N.abs() <= _ROUNDING * logps_N.abs()) & log_ratios_N.isfinite()
    return torch.where(is_rounding_N, 0.0, log_ratios_N)


def roc_auc(rewards_N: Tensor, desirable_N: Tensor) -> float | None:
    """Return the area under the ROC curve of rewards as scores of desirable against undesirable examples.

    This is the probability that a desirable example has the higher reward of the two, where equal rewards count one half
    (Hanley and McNeil 1982, doi 10.1148/radiology.143.1.7063747): 1 if the rewards separate the classes, 0.5 for rewards
    without relation to the labels. ``rewards_N`` is on the host, ``desirable_N`` is bool; the cost is that of sorting. The
    result is a quotient of integers, and does not depend on the order of the examples. None if a class is absent or a
    reward is NaN.

    Examples:
        >>> roc_auc(torch.tensor([0.3, 0.1, 0.2]), torch.tensor([True, False, True]))
        1.0
        >>> roc_auc(torch.tensor([0.3, 0.1, 0.3, 0.4]), torch.tensor([True, False, False, False]))
        0.5
    """
    desirable_D, undesirable_U = rewards_N[desirable_N], rewards_N[~desirable_N].sort().values
    if not len(desirable_D) or not len(undesirable_U) or rewards_N.isnan().any():
        return None
    below_D = torch.searchsorted(undesirable_U, desirable_D)
    not_above_D = torch.searchsorted(undesirable_U, desirable_D, right=True)
    twice_won = int((below_D + not_above_D).sum())
    return twice_won / (2 * len(desirable_D) * len(undesirable_U))


@dataclass(frozen=True, kw_only=True, eq=False)
class Rewards:
    """Rewards of the examples of a batch or a validation: float64, on the host."""

    chosen_N: Tensor  # of desirable examples, or of the chosen answers of pairs
    rejected_N: Tensor  # of undesirable examples, or of the rejected answers of pairs
    paired: bool  # pairs have the metric acc instead of auc

    @classmethod
    def total(cls, parts: Sequence[Rewards]) -> Rewards:
        """Return the rewards of several batches."""
        return cls(
            chosen_N=torch.cat([part.chosen_N for part in parts]),
            rejected_N=torch.cat([part.rejected_N for part in parts]),
            paired=parts[0].paired,
        )

    @property
    def by_class(self) -> dict[str, Tensor]:
        """The rewards by the name of their class."""
        if self.paired:
            return {"chosen": self.chosen_N, "rejected": self.rejected_N}
        return {"desirable": self.chosen_N, "undesirable": self.rejected_N}

    def metrics(self) -> dict[str, float]:
        """Return ``auc``, the result of :func:`roc_auc`; empty for pairs, and if it is undefined."""
        if self.paired:
            return {}
        rewards_N = torch.cat([self.chosen_N, self.rejected_N])
        auc = roc_auc(rewards_N, torch.arange(len(rewards_N)) < len(self.chosen_N))
        return {} if auc is None else {"auc": auc}
