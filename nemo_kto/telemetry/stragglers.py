"""Detection of stragglers: the slowest rank in each phase, and ranks that delay the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

OWN_PHASES = ("data", "forward", "reference_swap")
"""Phases in which a rank waits only for the ranks of its tensor- and context-parallel groups. In all other phases,
collectives make fast ranks take as long as the slowest."""
INTERVAL = 10  # steps between two comparisons
SLOW = 1.5  # a straggler takes longer than this multiple of the median of the other ranks with the same work
_SHARE = 0.1  # and is slower by more than this fraction of the step time; smaller delays do not justify a warning


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Times of one rank, in seconds per step on average.

    Attributes:
        host: name of the machine.
        stage: pipeline stage of the rank; different stages have different work.
        step: time of the whole step.
        phases: time of each phase by name.
    """

    host: str
    stage: int
    step: float
    phases: Mapping[str, float]

    @property
    def own(self) -> float:
        """Seconds spent in :data:`OWN_PHASES`."""
        return sum(self.phases.get(name, 0.0) for name in OWN_PHASES)


def slowest(times: Sequence[RankTimes]) -> dict[str, float]:
    """Return PHASE_max (seconds) and PHASE_max_rank (the slowest rank) for each phase; ``times`` is in rank order."""
    report: dict[str, float] = {}
    for name in dict.fromkeys(name for one in times for name in one.phases):
        seconds = [one.phases.get(name, 0.0) for one in times]
        report |= {f"{name}_max": max(seconds), f"{name}_max_rank": seconds.index(max(seconds))}
    return report


@dataclass(kw_only=True, eq=False)
class StragglerFinder:
    """Detector of ranks that are slow in two consecutive comparisons; each rank is reported once."""

    _suspected: set[int] = field(default_factory=set, init=False)
    _reported: set[int] = field(default_factory=set, init=False)

    def find(self, times: Sequence[RankTimes]) -> list[str]:
        """Return a warning for each new straggler; ``times`` is in rank order."""
        slow = {rank: typical for rank, one in enumerate(times) if (typical := _slower_than(rank, times)) is not None}
        new = [rank for rank in slow if rank in self._suspected - self._reported]
        self._suspected = set(slow)
        self._reported |= set(new)
        return [_warning(rank, times, slow[rank]) for rank in new]


def _slower_than(rank: int, times: Sequence[RankTimes]) -> float | None:
    """Return the median of the other ranks with the same work if ``rank`` is much slower, else None."""
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
