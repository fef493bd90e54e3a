"""Detection of the slowest rank of each phase."""

from __future__ import annotations

from nemo_kto.telemetry.watch import RankTimes, StragglerFinder, slowest
from tests.helpers.messages import Message


def rank(*, data: float = 0.1, forward: float = 0.4, stage: int = 0, step: float = 2.0) -> RankTimes:
    phases = {"data": data, "forward": forward, "forward_backward": 1.5}
    return RankTimes(host=f"node{stage}", stage=stage, step=step, phases=phases)


def test_the_slowest_rank_of_each_phase() -> None:
    assert slowest([rank(), rank(data=0.3), rank(forward=0.6)]) == {
        "data_max": 0.3,
        "data_max_rank": 1,
        "forward_max": 0.6,
        "forward_max_rank": 2,
        "forward_backward_max": 1.5,
        "forward_backward_max_rank": 0,
    }


def test_a_rank_that_is_slow_twice_in_a_row_is_named_once() -> None:
    finder = StragglerFinder()
    slow, well = [rank(), rank(), rank(data=1.9), rank()], [rank()] * 4
    assert finder.find(slow) == []
    assert finder.find(well) == []
    assert finder.find(slow) == []
    assert finder.find(slow) == [Message("2", "4", "node0", "work", "2.30", "1.90", "0.40", "0.50", "20", "all")]
    assert finder.find(slow) == []


def twice(*times: RankTimes) -> list[str]:
    finder = StragglerFinder()
    return finder.find(times) + finder.find(times)


def test_stages_of_a_pipeline_have_different_work() -> None:
    assert twice(rank(), rank(stage=1, forward=1.5)) == []
    (warning,) = twice(rank(), rank(), rank(stage=1, forward=1.5), rank(stage=1, forward=3.0))
    assert warning.startswith("rank 3 of 4 on node1")


def test_small_delays_are_not_reported() -> None:
    assert twice(rank(data=0.001, forward=0.001), rank(data=0.0, forward=0.001)) == []
    assert twice(rank(forward=0.5), rank(forward=0.4)) == []
