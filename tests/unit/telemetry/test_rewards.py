"""Histograms of rewards: each bin counts the values between its edges, and wider bins are whole numbers of narrower ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nemo_kto.telemetry.evaluations import MAX_BINS, RewardHistogram
from nemo_kto.telemetry.loggers import RunLogger


def histogram(*classes: list[float], name: str = "") -> RewardHistogram:
    found = RewardHistogram.of(name, {str(number): torch.tensor(values) for number, values in enumerate(classes)})
    assert found is not None
    return found


@pytest.mark.parametrize("seed", range(3))
def test_bins_count_the_values_between_their_edges(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-5, 6, (), generator=draw).item()
    classes = [(scale * torch.randn(size, generator=draw)).tolist() for size in (200, 37)]
    found = histogram(*classes)
    assert len(found.edges) <= MAX_BINS
    spread = max(map(max, classes)) - min(map(min, classes))
    assert found.width in (2.0**-20, *(2.0**power for power in range(-20, 40) if spread / 2.0**power > MAX_BINS / 2 - 1))
    for values, counts in zip(classes, found.counts.values(), strict=True):
        lefts = [edge - found.width for edge in found.edges]
        expected = [sum(left <= value < edge for value in values) for left, edge in zip(lefts, found.edges, strict=True)]
        assert counts == expected


def test_equal_rewards_and_rewards_without_a_value() -> None:
    assert histogram([0.0, 0.0], []).counts == {"0": [2], "1": [0]}
    assert histogram([1.5, float("nan"), float("inf")]).counts == {"0": [1]}
    assert RewardHistogram.of("", {"desirable": torch.tensor([float("nan")]), "undesirable": torch.tensor([])}) is None


def test_a_resumed_run_repeats_no_line(tmp_path: Path) -> None:
    """One line a validation and set; those after the resumed step are dropped."""
    file = tmp_path / "rewards.jsonl"
    logger = RunLogger(folder=tmp_path, enabled=True, tensorboard=False)
    for step in (2, 4):
        logger.log_rewards([histogram([0.5, 0.75], [0.5], name=name) for name in ("a", "b")], step)
    before = [json.loads(line) for line in file.read_text().splitlines()]
    logger.finalize("failed")
    assert before[1] == {"step": 2, "set": "b", "width": 2.0**-8, "first": 128, "0": before[0]["0"], "1": [1] + 64 * [0]}
    assert (sum(before[1]["0"]), before[1]["0"][0], before[1]["0"][-1]) == (2, 1, 1)
    logger = RunLogger(folder=tmp_path, enabled=True, tensorboard=False, resumed_step=2)
    logger.log_rewards([histogram([1.0], [2.0])], 4)
    logger.finalize("success")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["step"], line["set"]) for line in lines] == [(2, "a"), (2, "b"), (4, "")]
