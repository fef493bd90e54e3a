"""Runs with Transformer Engine on a GPU: fp8 and other options, compared with the CPU, and resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_kto.device import device
from tests.gpu.jobs import DETERMINISTIC, LORA, STEPS, Workplace, assert_close, on
from tests.gpu.test_jobs import BF16, HAS_ENGINE, IN_BF16, assert_same_files
from tests.helpers.training_jobs import trajectory

pytestmark = pytest.mark.skipif(not HAS_ENGINE, reason="needs a GPU that is used, and Transformer Engine")
FP8 = pytest.mark.skipif(HAS_ENGINE and device.compute_capability() < (8, 9), reason="needs a GPU with fp8")
OPTIONS = {
    "moments": ("model.optim.moments_dtype=bf16",),
    "offload": ("model.optim.offload_fraction=1.0",),
    "offload-half": ("model.optim.offload_fraction=0.5",),
}
IN_FP8 = {"fp8": ("model.fp8=hybrid",), "fp8-lora": ("model.fp8=e4m3", *LORA, "model.reference.mode=adapter")}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_equals_the_cpu(name: str, place: Workplace, expected: Callable[[str], Path]) -> None:
    run = place.run(name, *on("gpu"), IN_BF16, *OPTIONS[name])
    assert_close(run, expected("kto"), tolerance=BF16, in_bf16=True)


@FP8
@pytest.mark.parametrize("name", IN_FP8)
def test_fp8_is_close_to_bf16(name: str, place: Workplace, expected: Callable[[str], Path]) -> None:
    """Log-probs and losses within the error of fp8."""
    ours = trajectory(place.run(name, *on("gpu"), IN_BF16, *IN_FP8[name]))
    theirs = trajectory(expected("lora" if "lora" in name else "kto"))
    assert len(ours) == len(theirs) == STEPS
    for mine, other in zip(ours, theirs, strict=True):
        for figure in (figure for figure in other if "/logps_" in figure or figure.endswith("/loss")):
            assert mine[figure] == pytest.approx(other[figure], rel=0.1), figure


@pytest.mark.parametrize("name", [*OPTIONS, *(pytest.param(name, marks=FP8) for name in IN_FP8)])
def test_a_resumed_run_is_the_same_run(name: str, place: Workplace) -> None:
    always = "{_target_: tests.gpu.recorders.Deterministic}"
    stop = "{_target_: tests.gpu.recorders.StopAfter, step: 2}"
    settings = [*on("gpu"), IN_BF16, *(OPTIONS | IN_FP8)[name]]
    whole = place.run(f"whole-{name}", *settings, callbacks=[always], env=DETERMINISTIC)
    place.run(f"stopped-{name}", *settings, callbacks=[always, stop], env=DETERMINISTIC, status=85)
    stopped = place.run(f"stopped-{name}", *settings, callbacks=[always], env=DETERMINISTIC)
    assert trajectory(stopped) == trajectory(whole)
    assert_same_files(stopped / "hf", whole / "hf")
