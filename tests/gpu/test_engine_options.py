"""Runs in fp8 on a GPU, compared with the CPU, and resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_kto.device import device
from tests.gpu.jobs import LORA, STEPS, Workplace, on
from tests.gpu.test_jobs import HAS_ENGINE, IN_BF16, assert_same_files
from tests.helpers.training_jobs import trajectory

HAS_FP8 = HAS_ENGINE and device.compute_capability() >= (8, 9)
pytestmark = pytest.mark.skipif(not HAS_FP8, reason="needs a GPU with fp8, and Transformer Engine")
IN_FP8 = {"fp8": ("model.fp8=hybrid",), "fp8-lora": ("model.fp8=e4m3", *LORA, "model.reference.mode=adapter")}


@pytest.mark.parametrize("name", IN_FP8)
def test_fp8_is_close_to_bf16(name: str, place: Workplace, expected: Callable[[str], Path]) -> None:
    """Log-probs and losses within the error of fp8."""
    ours = trajectory(place.run(name, *on("gpu"), IN_BF16, *IN_FP8[name]))
    theirs = trajectory(expected("lora" if "lora" in name else "kto"))
    assert len(ours) == len(theirs) == STEPS
    for mine, other in zip(ours, theirs, strict=True):
        for figure in (figure for figure in other if "/logps_" in figure or figure.endswith("/loss")):
            assert mine[figure] == pytest.approx(other[figure], rel=0.1), figure


@pytest.mark.parametrize("name", IN_FP8)
def test_a_resumed_run_is_the_same_run(name: str, place: Workplace) -> None:
    stop = "{_target_: tests.gpu.recorders.StopAfter, step: 2}"
    settings = [*on("gpu"), IN_BF16, "trainer.deterministic=true", *IN_FP8[name]]
    whole = place.run(f"whole-{name}", *settings)
    place.run(f"stopped-{name}", *settings, callbacks=[stop], status=85)
    stopped = place.run(f"stopped-{name}", *settings)
    assert trajectory(stopped) == trajectory(whole)
    assert_same_files(stopped / "hf", whole / "hf")
