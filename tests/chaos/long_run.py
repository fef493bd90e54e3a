"""Many random kills, and a table of their results.

    python -m tests.chaos.long_run --kills 200 --page docs/internals/reliability.md

A trial is one job that is killed, and started again with the same command, until it ends. Its number is the seed of all that
is drawn for it: ``--trial NUMBER`` repeats one, whatever ran before it. Kills at a point of the program are the same again;
kills by the clock are only about the same.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path

from tests.chaos.job import SHOWN_LINES, Crash, Ended, Job, compare, make_job, replace_figures, run

# Points that a process may reach, and how often it does at most in a whole run.
AT_ANY_RANK = {
    "data": 6, "reference": 6, "kl": 6, "forward": 30, "backward": 12, "forward_backward": 6, "optimizer": 6,
    "validation": 2, "checkpoint": 3, "save_write_2": 2, "save_write_4": 2, "save_write_6": 2,
}  # fmt: skip
AT_RANK_ZERO = {
    "save_publish_2": 1, "save_publish_4": 1, "save_publish_6": 1, "save_published_2": 1, "save_published_4": 1,
    "save_published_6": 1, "remove": 1, "export_write": 4, "export_publish": 1, "export_published": 1,
}  # fmt: skip
IN_THE_FIRST_START = {"rows_read": 1, "cache_write": 2, "cache_publish": 2, "cache_published": 2}
IF_CACHED = {"reference_write": 2, "reference_publish": 1, "reference_published": 1}
IN_LATER_STARTS = {"load": 4}
SHARE_BY_TIME = 0.3  # of the kills; the others are at a point
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "dp2": (2, ()),
    "tp2": (2, ("model.tensor_model_parallel_size=2",)),
    "pp2": (2, ("model.pipeline_model_parallel_size=2",)),
    "tp2_pp2": (4, ("model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2")),
}
WEIGHTS = (4, 2, 2, 1)  # how often each layout is drawn
MODES = ("swap", "cached")
ROWS_OF_TABLE = (
    KILLS := "kills (SIGKILL)",
    OF_A_RANK := "of one rank",
    OF_LAUNCHER := "of the launcher",
    OF_ALL := "of all processes at once",
    JOBS := "jobs, each killed up to four times",
    STARTS := "starts of these jobs",
    LOST := "rows lost",
    DOUBLED := "rows used twice within an epoch",
    DAMAGED := "damaged checkpoints taken",
    OTHERS := "other differences: exported files, leftovers",
    FAILED := "starts that failed though nothing was done to them",
    HANGS := "hangs",
    LEFT := "processes left running",
)
DUE, NAMED = "causes that a launcher lives to name", "causes within the last lines"


def draw_crash(draw: random.Random, ranks: int, usual_seconds: float, *, first: bool, cached: bool) -> Crash:
    """Who is killed, and when; at a point that this start may reach."""
    everybody = ("launcher", *(f"rank{number}" for number in range(ranks)))
    victims = draw.choice([*((who,) for who in everybody), everybody])
    if draw.random() < SHARE_BY_TIME:
        return Crash(victims=victims, seconds=draw.uniform(0.05, usual_seconds))
    of_start = (IN_THE_FIRST_START | (IF_CACHED if cached else {})) if first else IN_LATER_STARTS
    points = AT_ANY_RANK | AT_RANK_ZERO | of_start
    point = draw.choice(list(points))
    at = f"rank{draw.randrange(ranks)}" if point in AT_ANY_RANK else "rank0"
    return Crash(victims=victims, point=point, count=draw.randint(1, points[point]), at=at)


class Trial:
    """One job, killed up to four times; a kill that never comes lets it end."""

    def __init__(self, number: int, jobs: Mapping[str, Job], wholes: dict[Job, tuple[Path, float]], folder: Path) -> None:
        self.figures, self.failures = Counter[str]({JOBS: 1}), list[str]()
        draw = random.Random(number)
        layout, mode = draw.choices(list(LAYOUTS), WEIGHTS)[0], draw.choice(MODES)
        self.job, self.name = jobs[f"{layout} {mode}"], f"trial {number} ({layout}, {mode})"
        whole, usual_seconds = _whole(self.job, wholes, folder.parent)
        kills_to_come, done = draw.randint(1, 4), False
        while not done and not self.failures:
            crash = None
            if self.figures[KILLS] < kills_to_come:
                first = self.figures[STARTS] == 0
                crash = draw_crash(draw, self.job.ranks, usual_seconds, first=first, cached=mode == "cached")
            ended = run(self.job, folder, crash=crash)
            self.figures[STARTS] += 1
            done = not ended.fired or ended.status == 0  # a kill by the clock may come when all have ended
            self._judge(crash, ended, f"{self.name}, start {self.figures[STARTS]}, {crash or 'undisturbed'}")
        if not self.failures:
            self._compare(folder, whole)

    def _judge(self, crash: Crash | None, ended: Ended, what: str) -> None:
        """How one start ended; only a launcher that lives can name what was killed."""
        if ended.hung or ended.left_running:
            self.figures += Counter({HANGS: int(ended.hung), LEFT: int(bool(ended.left_running))})
            self.failures.append(f"{what}: {'hung' if ended.hung else 'left ' + ' '.join(ended.left_running) + ' running'}")
        elif ended.status != 0 and not (ended.fired and crash):
            self.figures[FAILED] += 1
            self.failures.append(f"{what}: status {ended.status}\n{ended.last_lines}")
        elif ended.status != 0 and crash:
            of_launcher = crash.victims == ("launcher",)
            self.figures[KILLS] += 1
            self.figures[OF_ALL if len(crash.victims) > 1 else OF_LAUNCHER if of_launcher else OF_A_RANK] += 1
            if "launcher" not in crash.victims:
                self.figures[DUE] += 1
                number = crash.victims[0].removeprefix("rank")
                if re.search(rf"rank {number} of {self.job.ranks} was killed by SIGKILL", ended.last_lines):
                    self.figures[NAMED] += 1
                else:
                    self.failures.append(f"{what}: its cause is not named\n{ended.last_lines}")

    def _compare(self, folder: Path, whole: Path) -> None:
        found = compare(folder, whole)
        other = bool(found.differences) and not found.other_losses
        self.figures += Counter({LOST: found.rows_lost, DOUBLED: found.rows_doubled})
        self.figures += Counter({DAMAGED: int(found.other_losses), OTHERS: int(other)})
        if not found.clean:
            self.failures.append(f"{self.name}: {found}")


def _whole(job: Job, wholes: dict[Job, tuple[Path, float]], folder: Path) -> tuple[Path, float]:
    """The folder of the same job that nothing happened to, and the seconds that it took."""
    if job not in wholes:
        place = folder / f"whole_{len(wholes)}"
        ended = run(job, place)
        if ended.status != 0:
            raise RuntimeError(f"the job fails without any kill:\n{ended.output}")
        wholes[job] = place, ended.seconds
    return wholes[job]


def trials(args: argparse.Namespace, folder: Path) -> Iterator[Trial]:
    """Until the kills or the time are spent."""
    small = make_job(folder / "job")
    jobs = {
        f"{layout} {mode}": replace(small, ranks=ranks, overrides=(*overrides, f"model.reference.mode={mode}"))
        for layout, (ranks, overrides) in LAYOUTS.items()
        for mode in MODES
    }
    wholes: dict[Job, tuple[Path, float]] = {}
    if args.trial is not None:
        yield Trial(args.trial, jobs, wholes, folder / "trial")
        return
    end, kills, number = time.monotonic() + 60 * args.minutes, 0, args.seed
    while kills < args.kills and time.monotonic() < end:
        found = Trial(number, jobs, wholes, folder / f"trial_{number}")
        if not found.failures:
            shutil.rmtree(folder / f"trial_{number}")
        kills += found.figures[KILLS]
        number += 1
        yield found


def table(figures: Mapping[str, int], seed: int, seconds: float) -> str:
    """The figures in Markdown."""
    lines = [
        f"Measured on {date.today().isoformat()} with seeds {seed} to {seed + figures[JOBS] - 1}, on {os.cpu_count()} "
        f"cores ({platform.machine()}), in {seconds / 60:.0f} minutes:",
        *["", "| | |", "|---|---:|"],
        *(f"| {text} | {figures[text]} |" for text in ROWS_OF_TABLE),
        f"| cause within the last {SHOWN_LINES} lines, where the launcher lives to say it "
        f"| {figures[NAMED]} of {figures[DUE]} |",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="how many at least")
    parser.add_argument("--seed", type=int, default=1, help="number of the first trial")
    parser.add_argument("--trial", type=int, help="run only this one")
    parser.add_argument("--minutes", type=float, default=600, help="end after the trial of this minute")
    parser.add_argument("--page", type=Path, help="page whose figures are replaced")
    args = parser.parse_args()
    folder, figures, failures, began = Path(tempfile.mkdtemp(prefix="chaos_")), Counter[str](), 0, time.monotonic()
    for found in trials(args, folder):
        figures += found.figures
        failures += len(found.failures)
        failed = [f"FAILED {each}" for each in found.failures]
        print(f"{figures[KILLS]} kills in {figures[JOBS]} jobs", *failed, sep="\n", flush=True)
    text = table(figures, args.seed, time.monotonic() - began)
    print(text)
    if args.page is not None:
        replace_figures(args.page, "<!-- figures: make chaos -->", text, "<!-- end of figures -->")
    if failures:
        print(f"{failures} failures; what they left is in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
