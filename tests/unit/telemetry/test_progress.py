"""Lines and bar, on a clock that the test turns."""

from __future__ import annotations

import io

from nemo_kto.telemetry.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


TRAIN = {"train/loss": 0.48731, "train/kl": 0.01234, "train/rewards_margin": -0.5, "perf/tokens_per_sec": 1234.4}


def test_plain_lines_where_there_is_no_terminal() -> None:
    out, clock = io.StringIO(), Clock()
    progress = Progress(total_steps=10, start_step=4, stream=out, clock=clock)
    clock.now = 2.0
    progress.log_metrics(TRAIN, 5)
    progress.log_metrics({"timing/reference": 1.0}, 5)  # nothing to show
    clock.now = 8.0
    progress.log_metrics({"train/loss": 0.25}, 7)
    progress.log_metrics({"val/loss": 0.5, "val/kl": 0.125}, 7)
    progress.finalize("success")
    assert out.getvalue().splitlines() == [
        "step 5/10  loss 0.4873  kl 0.0123  margin -0.5000  2.00 s/step  1234 tokens/s  eta 0:00:10",
        "step 7/10  loss 0.2500  3.00 s/step  eta 0:00:08",
        "step 7/10  validation: loss 0.5000  kl 0.1250",
    ]


def test_a_run_that_failed_says_so() -> None:
    out = io.StringIO()
    progress = Progress(total_steps=10, stream=out)
    progress.log_metrics(TRAIN, 3)
    progress.finalize("failed")
    assert out.getvalue().splitlines()[-1] == "step 3/10  failed"


def test_bar_on_a_terminal() -> None:
    out, clock = Terminal(), Clock()
    progress = Progress(total_steps=4, stream=out, clock=clock)
    for step in (1, 2, 3, 4):
        clock.now = step * 1.5
        progress.log_metrics(TRAIN, step)
    progress.line("saved a checkpoint")
    progress.finalize("success")
    last = out.getvalue().replace("\n", "\r").split("\r")
    assert any("100%" in part and "step 4/4" in part and "loss 0.4873" in part and "1.50 s/step" in part for part in last)
    assert "saved a checkpoint" in last
