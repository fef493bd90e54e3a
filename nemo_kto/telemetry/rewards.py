"""Histograms of the rewards of a validation set, with bins that different validations can share; rewards.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_kto.utils.files import read_json_lines
from nemo_kto.utils.lazy import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

REWARDS_FILE = "rewards.jsonl"  # a line for each validation of a set
MAX_BINS = 100
_MIN_EXPONENT = -20  # of the width of a bin; also the width if all rewards are equal


@dataclass(frozen=True, kw_only=True)
class RewardHistogram:
    """Counts of the rewards of each class: bin i of a class covers [(first + i) * width, (first + i + 1) * width).

    The width is the smallest power of two for which at most 100 bins cover all rewards, so that a bin of a wider histogram
    consists of whole bins of a narrower one, and histograms of different validations can be brought to one width exactly.

    Attributes:
        set_name: name of the validation set; empty for a single set without a name.
        counts: name of the class -> number of examples in each bin; all classes have the same bins.
    """

    set_name: str
    width: float
    first: int
    counts: Mapping[str, list[int]]

    @classmethod
    def of(cls, set_name: str, rewards: Mapping[str, Tensor]) -> RewardHistogram | None:
        """Count the finite rewards of each class, [N] float64 each; None if there are none.

        Examples:
            >>> RewardHistogram.of("", {"desirable": torch.tensor([40.0, 55.5]), "undesirable": torch.tensor([39.0])})
            RewardHistogram(set_name='', width=0.25, first=156, counts={...})
        """
        finite = {name: values_N[values_N.isfinite()].double() for name, values_N in rewards.items()}
        values_N = torch.cat([*finite.values()])
        if not len(values_N):
            return None
        low, high = values_N.min().item(), values_N.max().item()
        exponent = _MIN_EXPONENT if low == high else max(_MIN_EXPONENT, math.floor(math.log2((high - low) / MAX_BINS)))
        while math.floor(high / 2.0**exponent) - math.floor(low / 2.0**exponent) >= MAX_BINS:
            exponent += 1
        width = 2.0**exponent
        first = math.floor(low / width)
        bins = math.floor(high / width) - first + 1
        counts = {
            name: torch.bincount(((each_N / width).floor() - first).long(), minlength=bins).tolist()
            for name, each_N in finite.items()
        }
        return cls(set_name=set_name, width=width, first=first, counts=counts)

    def line(self, step: int) -> dict[str, object]:
        """Return the content of a line of rewards.jsonl."""
        return {"step": step, "set": self.set_name, "width": self.width, "first": self.first, **self.counts}

    @property
    def bins(self) -> int:
        """Number of bins."""
        return max(map(len, self.counts.values()))

    @property
    def edges(self) -> list[float]:
        """Right edge of each bin."""
        return [(self.first + bin_index + 1) * self.width for bin_index in range(self.bins)]


def read_rewards(file: Path) -> dict[str, dict[int, RewardHistogram]]:
    """Read a file of rewards: name of the validation set -> step -> histogram.

    Damaged lines are skipped, and a missing file has none.
    """
    sets: dict[str, dict[int, RewardHistogram]] = {}
    for line in read_json_lines(file):
        counts = {name: value for name, value in line.items() if isinstance(value, list) and value}
        try:
            histogram = RewardHistogram(
                set_name=str(line["set"]), width=float(line["width"]), first=int(line["first"]), counts=counts
            )
            step = int(line["step"])
        except (LookupError, TypeError, ValueError):
            continue
        if counts and histogram.width > 0:
            sets.setdefault(histogram.set_name, {})[step] = histogram
    return sets
