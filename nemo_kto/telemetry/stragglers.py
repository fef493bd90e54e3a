"""Ranks that are slower than the others: which one took longest in each phase, and which one holds the others up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

OWN_PHASES = ("data", "forward", "reference_swap")
"""Phases in which a rank waits for no other one, but for those of its tensor- and context-parallel groups. In all others the
collectives make the fast ranks as slow as the slowest."""
INTERVAL = 10  # steps between two comparisons
SLOW = 1.5  # times the median of the ranks with the same work
_SHARE = 0.1  # of the time of a step, by which a rank must be slower: less is not worth a word


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """What one rank took, seconds a step on average.

    Attributes:
        host: name of its machine.
        stage: its pipeline stage; the stages have different work.
        step: the whole step.
        phases: by name.
    """

    host: str
    stage: int
    step: float
    phases: Mapping[str, float]

    @property
    def own(self) -> float:
        """Seconds in which it waited for no other rank."""
        return sum(self.phases.get(name, 0.0) for name in OWN_PHASES)


def slowest(times: Sequence[RankTimes]) -> dict[str, float]:
    """For each phase PHASE_max (seconds) and PHASE_max_rank (who took them); ``times`` in the order of the ranks."""
    report: dict[str, float] = {}
    for name in dict.fromkeys(name for one in times for name in one.phases):
        seconds = [one.phases.get(name, 0.0) for one in times]
        report |= {f"{name}_max": max(seconds), f"{name}_max_rank": seconds.index(max(seconds))}
    return report


@dataclass(kw_only=True, eq=False)
class StragglerFinder:
    """Finds ranks that are slow in two comparisons in a row; each is reported once."""

    _suspected: set[int] = field(default_factory=set, init=False)
    _reported: set[int] = field(default_factory=set, init=False)

    def find(self, times: Sequence[RankTimes]) -> list[str]:
        """A warning for each rank that has become a straggler; ``times`` in the order of the ranks."""
        slow = {rank: typical for rank, one in enumerate(times) if (typical := _slower_than(rank, times)) is not None}
        new = [rank for rank in slow if rank in self._suspected - self._reported]
        self._suspected = set(slow)
        self._reported |= set(new)
        return [_warning(rank, times, slow[rank]) for rank in new]


def _slower_than(rank: int, times: Sequence[RankTimes]) -> float | None:
    """The median of the others with the same work if this rank is much slower, else None."""
    mine = times[rank]
    others = [one.own for other, one in enumerate(times) if other != rank and one.stage == mine.stage]
    if not others:
        return None
    typical = median(others)
    return typical if mine.own > SLOW * typical and mine.own - typical > _SHARE * mine.step else None


def _warning(rank: int, times: Sequence[RankTimes], typical: float) -> str:
    mine = times[rank]
    parts = ", ".join(f"{name} {mine.phases[name]:.2f} s" for name in OWN_PHASES if name in mine.phases)
    return (
        f"rank {rank} of {len(times)} on {mine.host} is slower than the others with the same work: it needs {mine.own:.2f} "
        f"s of each step ({parts}), they need {typical:.2f} s (median, over {2 * INTERVAL} steps), and all ranks wait for it"
    )
