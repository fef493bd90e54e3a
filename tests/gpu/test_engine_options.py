"""What only a GPU with Transformer Engine can do: whole jobs learn what the CPU learns, and go on after a stop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.jobs import trajectory
from tests.gpu.jobs import DETERMINISTIC, Workplace, assert_close, on
from tests.gpu.test_jobs import BF16, HAS_ENGINE, IN_BF16, assert_same_files

pytestmark = pytest.mark.skipif(not HAS_ENGINE, reason="needs a GPU that is used, and Transformer Engine")
OPTIONS = {
    "moments": ("model.optim.moments_dtype=bf16",),
    "offload": ("model.optim.offload_fraction=1.0",),
    "offload-half": ("model.optim.offload_fraction=0.5",),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_is_that_of_the_cpu(name: str, place: Workplace, expected: Callable[[str], Path]) -> None:
    run = place.run(name, *on("gpu"), IN_BF16, *OPTIONS[name])
    assert_close(run, expected("kto"), tolerance=BF16, in_bf16=True)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_resumed_run_is_the_same_run(name: str, place: Workplace) -> None:
    always = "{_target_: tests.gpu.noted.Deterministic}"
    stop = "{_target_: tests.gpu.noted.StopAfter, step: 2}"
    settings = [*on("gpu"), IN_BF16, *OPTIONS[name]]
    whole = place.run(f"whole-{name}", *settings, callbacks=[always], env=DETERMINISTIC)
    place.run(f"stopped-{name}", *settings, callbacks=[always, stop], env=DETERMINISTIC, status=85)
    stopped = place.run(f"stopped-{name}", *settings, callbacks=[always], env=DETERMINISTIC)
    assert trajectory(stopped) == trajectory(whole)
    assert_same_files(stopped / "hf", whole / "hf")
