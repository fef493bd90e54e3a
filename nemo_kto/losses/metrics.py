"""Metrics that can be added: the mean over several batches is the mean over their examples, not a mean of means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_kto.losses.rewards import Rewards
from nemo_kto.utils import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

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
