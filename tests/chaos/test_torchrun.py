"""torchrun --max-restarts: after the kill of a rank, torchrun starts all ranks again, and they resume the run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_kto.algorithms.callbacks import Callback, Event, Trainer
from tests.chaos.job import Job, files, metrics, run

KILLED_AFTER = (3, 5)  # steps; the job has six, and saves every second


class KillRank(Callback):
    """Kills rank 1 after each step of ``KILLED_AFTER``, once; ``folder`` has a file for each kill."""

    def __init__(self, *, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_step_end(self, trainer: Trainer, event: Event) -> None:
        done = self.folder / f"killed_after_{event.step}"
        if os.environ["RANK"] == "1" and event.step in KILLED_AFTER and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.chaos
def test_torchrun_restarts_and_resumes(job: Job, whole: Callable[[Job], Path], tmp_path: Path) -> None:
    kill = f"trainer.callbacks=[{{_target_: {__name__}.KillRank, folder: {tmp_path}}}]"
    ended = run(replace(job, restarts=2, overrides=(*job.overrides, kill)), tmp_path)
    assert (ended.status, ended.hung, ended.left_running) == (0, False, []), ended.output
    assert sorted(path.name for path in tmp_path.glob("killed_*")) == [f"killed_after_{step}" for step in KILLED_AFTER]
    assert ended.output.count("failed (exitcode: -9) local_rank: 1") == 2, ended.output
    assert ended.output.count(", resumed after step ") >= 1, ended.output
    expected = whole(job) / "run"
    assert metrics(tmp_path / "run") == metrics(expected), "every step once, to the last bit"
    assert files(tmp_path / "run" / "hf") == files(expected / "hf")
