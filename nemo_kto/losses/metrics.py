"""Metrics that can be added: the mean over several batches is the mean over their examples, not a mean of means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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


Derive = Callable[[Mapping[str, float]], dict[str, float]]


class Metrics(dict[str, float]):
    """Named metrics, derived from sums and counts, which remain available as ``sums``.

    ``a + b`` adds the sums and derives the metrics again, so that batches with different numbers of valid examples are
    weighted correctly. A validation also has ``rewards``, those of its examples by the name of the validation set (empty for
    a single batch), whose metrics are not sums.

    Examples:
        >>> mean = lambda sums: {"loss": sums["loss_sum"] / sums["rows"]}
        >>> one, three = Metrics({"loss_sum": 1.0, "rows": 1}, mean), Metrics({"loss_sum": 9.0, "rows": 3}, mean)
        >>> one + three
        {'loss': 2.5}
    """

    def __init__(self, sums: Mapping[str, float], derive: Derive, rewards: Mapping[str, Rewards] | None = None) -> None:
        self.rewards = dict(rewards or {})
        of_rewards = {
            f"{metric_prefix(name)}{metric}": value
            for name, each in self.rewards.items()
            for metric, value in each.metrics().items()
        }
        super().__init__({**derive(sums), **of_rewards})
        self.sums = dict(sums)
        self._derive = derive

    def __add__(self, other: Metrics) -> Metrics:
        return self.total([self, other]) if isinstance(other, Metrics) else NotImplemented

    @classmethod
    def total(cls, parts: Sequence[Metrics]) -> Metrics:
        """Return the metrics of all examples of several batches."""
        sums: dict[str, float] = {}
        rewards: dict[str, list[Rewards]] = {}
        for part in parts:
            for name, value in part.sums.items():
                sums[name] = sums.get(name, 0) + value
            for name, each in part.rewards.items():
                rewards.setdefault(name, []).append(each)
        return cls(sums, parts[0]._derive, {name: Rewards.total(each) for name, each in rewards.items()})

    def of(self, sums: Mapping[str, float]) -> Metrics:
        """Return the same metrics for other sums, without rewards."""
        return Metrics(sums, self._derive)


def metric_prefix(name: str) -> str:
    """Return the prefix for the metrics of a validation set; empty if ``name`` is empty."""
    return f"{name}_" if name else ""


def metrics_by_set(parts: Iterable[tuple[str, Metrics]]) -> Metrics:
    """Combine the metrics of the batches of a validation, each with the name of its set, separately for each set.

    Metrics are named NAME_METRIC and sums NAME/SUM. The metrics of a single unnamed set keep their names.

    Examples:
        >>> mean = lambda sums: {"loss": sums["loss_sum"] / sums["rows"]}
        >>> one, two = Metrics({"loss_sum": 1.0, "rows": 1}, mean), Metrics({"loss_sum": 6.0, "rows": 2}, mean)
        >>> metrics_by_set([("a", one), ("b", two), ("a", one)])
        {'a_loss': 1.0, 'b_loss': 3.0}
    """
    batches: dict[str, list[Metrics]] = {}
    for name, metrics in parts:
        batches.setdefault(name, []).append(metrics)
    sets = {name: Metrics.total(each) for name, each in batches.items()}
    if list(sets) == [""]:
        return sets[""]

    def derive(sums: Mapping[str, float]) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, metrics in sets.items():
            own = metrics.of({key.removeprefix(f"{name}/"): sums[key] for key in sums if key.startswith(f"{name}/")})
            values |= {f"{metric_prefix(name)}{metric}": value for metric, value in own.items()}
        return values

    sums = {f"{name}/{key}": value for name, each in sets.items() for key, value in each.sums.items()}
    return Metrics(sums, derive, {name: rewards for name, each in sets.items() for rewards in each.rewards.values()})


@dataclass(frozen=True, kw_only=True)
class RunningMean:
    """Mean of all values so far, stored as sum and count.

    Examples:
        >>> one = RunningMean().plus(3.0, 1)
        >>> one.plus(1.0, 3)
        RunningMean(total=4.0, count=4)
        >>> one.plus(1.0, 3).mean, RunningMean().mean
        (1.0, 0.0)
    """

    total: float = 0.0
    count: int = 0

    @property
    def mean(self) -> float:
        """Mean of the values; 0 before the first value."""
        return self.total / max(self.count, 1)

    def plus(self, total: float, count: int) -> RunningMean:
        """Return the mean including ``count`` further values with the sum ``total``."""
        return RunningMean(total=self.total + total, count=self.count + count)


def balance_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Compute the expert load balance of a mixture-of-experts model from sums over global batches; empty for a dense model.

    moe_aux_loss is the mean load-balancing loss over sequences and layers (1 if all experts are chosen equally often).
    moe_largest_share and moe_smallest_share are the fractions of the choices in a layer that selected its most and its least
    frequently chosen expert, for the most extreme layer, averaged over batches.
    """
    if not sums.get("moe_batches"):
        return {}
    shares = {name: sums[f"{name}_sum"] / sums["moe_batches"] for name in ("moe_largest_share", "moe_smallest_share")}
    return {"moe_aux_loss": sums["moe_aux_loss_sum"] / sums["moe_aux_losses"], **shares}


def masked_sum(values_N: Tensor, mask_N: Tensor) -> Tensor:
    """Sum the values where the mask is True: 0-d, float64, without gradient.

    Examples:
        >>> masked_sum(torch.tensor([1.0, float("nan")]), torch.tensor([True, False])).item()
        1.0
    """
    # where instead of a product, because masked values may be anything, including NaN
    return torch.where(mask_N, values_N.detach().double(), 0).sum()


def sample_std(square_sum: float, total: float, count: float) -> float:
    """Return the standard deviation of a sample from its sum of squares, its sum and its size (at least 2).

    Examples:
        >>> sample_std(1.0 + 9.0, 1.0 + 3.0, 2)
        1.4142135623730951
    """
    return max(0.0, (square_sum - total * total / count) / (count - 1)) ** 0.5
