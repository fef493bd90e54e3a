"""Samples and histograms of rewards can be read back, and a resumed run drops those that it repeats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_kto.telemetry.evaluations import MAX_BINS, SAMPLES_FILE, RewardHistogram, Sample, read_samples
from nemo_kto.telemetry.loggers import RunLogger
from tests.unit.telemetry.test_loggers import quiet

ASKED: list[Mapping[str, Any]] = [{"role": "user", "content": "Is it hot?"}]


def samples(step: int) -> list[Sample]:
    return [
        Sample(
            step=step, model="policy", index=0, prompt="2 + 2 =", messages=None, answer=f"4 {step}", tokens=2, ended=True
        ),
        Sample(step=step, model="policy", index=1, prompt="Hot?", messages=ASKED, answer="*a*\nb", tokens=9, ended=False),
    ]


def log(logger: RunLogger, *steps: int) -> None:
    for step in steps:
        logger.log_samples(samples(step), step)
    logger.finalize("success")


def test_a_resumed_run_drops_later_samples(tmp_path: Path) -> None:
    log(quiet(tmp_path, samples=True), 0, 2, 4)
    with (tmp_path / SAMPLES_FILE).open("a") as file:
        file.write('{"step": 4, "mod')  # killed in the middle of a line
    assert [sample.step for sample in read_samples(tmp_path / SAMPLES_FILE)] == [0, 0, 2, 2, 4, 4]
    log(quiet(tmp_path, samples=True, resumed_step=3), 4)
    assert [sample.step for sample in read_samples(tmp_path / SAMPLES_FILE)] == [0, 0, 2, 2, 4, 4]


def test_tensorboard_has_a_text_for_each_prompt(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log(RunLogger(folder=tmp_path, enabled=True, samples=True), 0, 2)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    texts = [
        [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(f"samples/{n}/text_summary")]
        for n in range(2)
    ]
    assert texts[0] == [(step, f"**prompt**\n\n    2 + 2 =\n\n**policy**\n\n    4 {step}") for step in (0, 2)]
    assert texts[1][0][1].endswith("**policy** (cut after 9 tokens)\n\n    *a*\n    b")


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
