"""kill -9 of each rank, the launcher and all of them, in each phase; then the same command, or torchrun, again.

The second start ends as if nothing had happened: the same losses to the last bit, every row once an epoch, the same exported
files bit for bit, nothing left behind.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_kto.algorithms.callbacks import Callback, Event, Trainer
from tests.chaos.job import Crash, Ended, Job, assert_resumes, files, metrics, run

# Where a run may be, by the phase: point, and how often it has been there before.
POINTS: dict[str, tuple[str, int]] = {
    "data_read": ("rows_read", 1),
    "data_write": ("cache_write", 1),
    "data_of_a_step": ("data", 5),
    "reference": ("reference", 4),
    "kl": ("kl", 4),
    "early_backward": ("backward", 2),
    "backward": ("backward", 9),
    "optimizer": ("optimizer", 5),
    "validation": ("validation", 1),
    "save_begin": ("checkpoint", 2),
    "save_write": ("save_write_4", 1),
    "save_publish": ("save_publish_4", 1),
    "save_remove": ("remove", 1),
    "export_write": ("export_write", 1),
    "export_publish": ("export_publish", 1),
}
VICTIMS = {"rank0": ("rank0",), "rank1": ("rank1",), "launcher": ("launcher",), "all": ("launcher", "rank0", "rank1")}
# One job, killed on and on: within the first steps, while it saves, and while it exports.
QUICK = (("early_backward", "rank1"), ("save_write", "all"), ("export_publish", "rank0"))
# Four ranks: tensor and pipeline parallel.
FOUR = ("model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2", "model.reference.mode=swap")
FOUR_POINTS = ("data_write", "kl", "backward", "optimizer", "save_write", "save_publish", "export_write")
FOUR_VICTIMS = {"rank3": ("rank3",), "all": ("launcher", "rank0", "rank1", "rank2", "rank3")}
# The pass of the reference over the data, before the first step.
CACHED = ("model.reference.mode=cached",)
CACHED_POINTS = ("reference_write", "reference_publish", "reference_published")
# Samples before, in and after the training, and the report after it.
REPORTED = (
    "model.reference.mode=swap", "exp_manager.samples.count=1", "exp_manager.samples.max_new_tokens=2", "export.report=true",
)  # fmt: skip
REPORTED_CASES = [("samples", 2, who) for who in VICTIMS]
REPORTED_CASES += [("report_write", 1, who) for who in VICTIMS if who != "rank1"]  # which may have ended by then


def of(phase: str, victims: tuple[str, ...]) -> Crash:
    point, count = POINTS.get(phase, (phase, 1))
    return Crash(victims=victims, point=point, count=count)


CASES = [
    *(pytest.param((), 2, of(phase, VICTIMS[who]), id=f"{phase}-{who}") for phase in POINTS for who in VICTIMS),
    *(
        pytest.param(FOUR, 4, of(phase, FOUR_VICTIMS[who]), id=f"tp2_pp2-{phase}-{who}")
        for phase in FOUR_POINTS
        for who in FOUR_VICTIMS
    ),
    *(
        pytest.param(CACHED, 2, of(phase, VICTIMS[who]), id=f"cached-{phase}-{who}")
        for phase in CACHED_POINTS
        for who in VICTIMS
    ),
    *(
        pytest.param(REPORTED, 2, Crash(victims=VICTIMS[who], point=point, count=count), id=f"reported-{point}-{who}")
        for point, count, who in REPORTED_CASES
    ),
]


def assert_ended_as_told(ended: Ended, crash: Crash, ranks: int) -> None:
    """No hang, nothing left running, and what happened in the last lines; a launcher that is killed can say nothing."""
    assert ended.fired, f"{crash} never happened: {ended.output}"
    assert not ended.hung, ended.output
    assert ended.left_running == []
    if "launcher" in crash.victims:
        assert ended.status == -9
    else:
        assert ended.status == 1, ended.output
        (victim,) = crash.victims
        assert f"nemo-kto: rank {victim[-1]} of {ranks} was killed by SIGKILL" in ended.last_lines


@pytest.mark.full
def test_killed_at_random_many_times(job: Job, whole: Callable[[Job], Path], tmp_path: Path) -> None:
    for phase, who in QUICK:
        crash = of(phase, VICTIMS[who])
        assert_ended_as_told(run(job, tmp_path, crash=crash), crash, 2)
    assert_resumes(job, tmp_path, whole(job))


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize(("overrides", "ranks", "crash"), CASES)
def test_killed_and_started_again(
    overrides: tuple[str, ...], ranks: int, crash: Crash, job: Job, whole: Callable[[Job], Path], tmp_path: Path
) -> None:
    job = replace(job, ranks=ranks, overrides=overrides or job.overrides)
    assert_ended_as_told(run(job, tmp_path, crash=crash), crash, ranks)
    assert_resumes(job, tmp_path, whole(job))


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("who", VICTIMS)
def test_killed_again_while_resuming(who: str, job: Job, whole: Callable[[Job], Path], tmp_path: Path) -> None:
    for phase in ("optimizer", "load", "data"):
        crash = of(phase, VICTIMS[who])
        assert_ended_as_told(run(job, tmp_path, crash=crash), crash, 2)
    assert_resumes(job, tmp_path, whole(job))


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
