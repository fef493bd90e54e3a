"""Samples can be read back from every logger, and a resumed run drops those that it repeats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_kto.telemetry.evaluations import SAMPLES_FILE, Sample, read_samples
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
