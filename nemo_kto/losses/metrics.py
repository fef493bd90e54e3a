"""Metrics that can be added: means over several batches are means over their rows, not means of means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_kto.utils.lazy import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

Derive = Callable[[Mapping[str, float]], dict[str, float]]


class Metrics(dict[str, float]):
    """Named metrics, derived from sums and counts.

    ``a + b`` adds the sums and derives the metrics again, so that batches of different size, or with different rows that
    count, weigh what they should. The sums and counts stay readable as ``sums``.

    Examples:
        >>> mean = lambda sums: {"loss": sums["loss_sum"] / sums["rows"]}
        >>> one, three = Metrics({"loss_sum": 1.0, "rows": 1}, mean), Metrics({"loss_sum": 9.0, "rows": 3}, mean)
        >>> one + three
        {'loss': 2.5}
    """

    def __init__(self, sums: Mapping[str, float], derive: Derive) -> None:
        """Args: sums: name -> sum or count over a global batch; derive: turns such sums into metrics."""
        super().__init__(derive(sums))
        self.sums = dict(sums)
        self._derive = derive

    def __add__(self, other: Metrics) -> Metrics:
        if not isinstance(other, Metrics):
            return NotImplemented
        names = self.sums.keys() | other.sums.keys()
        return self.of({name: self.sums.get(name, 0) + other.sums.get(name, 0) for name in names})

    def of(self, sums: Mapping[str, float]) -> Metrics:
        """The same metrics of other sums."""
        return Metrics(sums, self._derive)


def metric_prefix(name: str) -> str:
    """What stands before the metrics of a validation set of this name, which is empty for a set without one."""
    return f"{name}_" if name else ""


def side_by_side(sets: Mapping[str, Metrics]) -> Metrics:
    """The metrics of several validation sets as those of one, each under NAME_METRIC; its sums are under NAME/SUM.

    A set whose name is empty stands by itself, and as it is.

    Examples:
        >>> mean = lambda sums: {"loss": sums["loss_sum"] / sums["rows"]}
        >>> one, two = Metrics({"loss_sum": 1.0, "rows": 1}, mean), Metrics({"loss_sum": 6.0, "rows": 2}, mean)
        >>> side_by_side({"a": one, "b": two})
        {'a_loss': 1.0, 'b_loss': 3.0}
    """
    if list(sets) == [""]:
        return sets[""]

    def derive(sums: Mapping[str, float]) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, metrics in sets.items():
            own = metrics.of({key.removeprefix(f"{name}/"): sums[key] for key in sums if key.startswith(f"{name}/")})
            values |= {f"{metric_prefix(name)}{metric}": value for metric, value in own.items()}
        return values

    return Metrics({f"{name}/{key}": value for name, each in sets.items() for key, value in each.sums.items()}, derive)


@dataclass(frozen=True, kw_only=True)
class RunningMean:
    """Mean of all values so far, as their sum and number: in which batches they came does not matter.

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
        """0 before the first value."""
        return self.total / max(self.count, 1)

    def plus(self, total: float, count: int) -> RunningMean:
        """With further values, given as their sum and number."""
        return RunningMean(total=self.total + total, count=self.count + count)


def balance_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """How evenly the experts of a mixture were chosen, from sums over global batches; nothing for a dense model.

    Returns:
        moe_aux_loss, the mean of the load-balancing loss over sequences and layers (1 where all experts are chosen alike);
        moe_largest_share and moe_smallest_share, the part of a layer's choices that fell on its expert with the most or the
        fewest, of the layer where that is most extreme: for each batch by itself, as a mean over batches. The first is left
        out where its sums are, as they are of packed rows.
    """
    if not sums.get("moe_batches"):
        return {}
    shares = {name: sums[f"{name}_sum"] / sums["moe_batches"] for name in ("moe_largest_share", "moe_smallest_share")}
    if "moe_aux_losses" not in sums:
        return shares
    return {"moe_aux_loss": sums["moe_aux_loss_sum"] / sums["moe_aux_losses"], **shares}


def masked_sum(values_N: Tensor, mask_N: Tensor) -> Tensor:
    """Sum of the values where the mask is True, 0-d float64, without gradient.

    Examples:
        >>> masked_sum(torch.tensor([1.0, float("nan")]), torch.tensor([True, False])).item()
        1.0
    """
    # where, not a product: what stands in a row that does not count may be anything, NaN too
    return torch.where(mask_N, values_N.detach().double(), 0).sum()


def sample_std(square_sum: float, total: float, count: float) -> float:
    """Standard deviation of a sample, from the sum of its squares, its sum and its size (at least 2).

    Examples:
        >>> sample_std(1.0 + 9.0, 1.0 + 3.0, 2)
        1.4142135623730951
    """
    return max(0.0, (square_sum - total * total / count) / (count - 1)) ** 0.5
