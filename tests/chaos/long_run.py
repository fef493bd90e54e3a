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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import date
from pathlib import Path

from tests.chaos.job import SHOWN_LINES, Comparison, Crash, Ended, Job, compare, make_job, run

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


@dataclass(kw_only=True)
class Figures:
    """Sums over all trials; everything after ``causes_due`` must be 0, and ``causes_named`` equal to it."""

    trials: int = 0
    kills: int = 0
    of_a_rank: int = 0
    of_the_launcher: int = 0
    of_all: int = 0
    starts: int = 0
    causes_due: int = 0
    causes_named: int = 0
    rows_lost: int = 0
    rows_doubled: int = 0
    damaged_checkpoints_taken: int = 0
    other_results: int = 0
    failed_starts: int = 0
    hangs: int = 0
    left_running: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    def add(self, other: Figures) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


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


def run_trial(number: int, jobs: Mapping[str, Job], wholes: dict[Job, tuple[Path, float]], folder: Path) -> Figures:
    """One job, killed up to four times; a kill that never comes lets it end."""
    began, draw = time.monotonic(), random.Random(number)
    layout, mode = draw.choices(list(LAYOUTS), WEIGHTS)[0], draw.choice(MODES)
    job, name = jobs[f"{layout} {mode}"], f"trial {number} ({layout}, {mode})"
    whole, usual_seconds = _whole(job, wholes, folder.parent)
    found, kills_to_come = Figures(trials=1), draw.randint(1, 4)
    done = False
    while not done and not found.failures:
        crash = None
        if found.kills < kills_to_come:
            crash = draw_crash(draw, job.ranks, usual_seconds, first=found.starts == 0, cached=mode == "cached")
        ended = run(job, folder, crash=crash)
        found.starts += 1
        done = not ended.fired or ended.status == 0  # a kill by the clock may come when all have ended
        _judge(found, crash, ended, job.ranks, f"{name}, start {found.starts}, {crash or 'undisturbed'}")
    if not found.failures:
        _hold_against(found, compare(folder, whole), name)
    found.seconds = time.monotonic() - began
    return found


def _judge(found: Figures, crash: Crash | None, ended: Ended, ranks: int, what: str) -> None:
    """How one start ended."""
    if ended.hung or ended.left_running:
        found.hangs += ended.hung
        found.left_running += bool(ended.left_running)
        found.failures.append(f"{what}: {'hung' if ended.hung else 'left ' + ' '.join(ended.left_running) + ' running'}")
    elif ended.fired and crash is not None and ended.status != 0:
        _count_kill(found, crash, ended, ranks, what)
    elif ended.status != 0:
        found.failed_starts += 1
        found.failures.append(f"{what}: status {ended.status}\n{ended.last_lines}")


def _whole(job: Job, wholes: dict[Job, tuple[Path, float]], folder: Path) -> tuple[Path, float]:
    """The folder of the same job that nothing happened to, and the seconds that it took."""
    if job not in wholes:
        place = folder / f"whole_{len(wholes)}"
        ended = run(job, place)
        if ended.status != 0:
            raise RuntimeError(f"the job fails without any kill:\n{ended.output}")
        wholes[job] = place, ended.seconds
    return wholes[job]


def _count_kill(found: Figures, crash: Crash, ended: Ended, ranks: int, what: str) -> None:
    """A kill, and whether it was named: only a launcher that lives can do that."""
    found.kills += 1
    if len(crash.victims) > 1:
        found.of_all += 1
    elif crash.victims == ("launcher",):
        found.of_the_launcher += 1
    else:
        found.of_a_rank += 1
    if "launcher" in crash.victims:
        return
    found.causes_due += 1
    number = crash.victims[0].removeprefix("rank")
    if re.search(rf"rank {number} of {ranks} was killed by SIGKILL", ended.last_lines):
        found.causes_named += 1
    else:
        found.failures.append(f"{what}: its cause is not named\n{ended.last_lines}")


def _hold_against(found: Figures, compared: Comparison, what: str) -> None:
    found.rows_lost, found.rows_doubled = compared.rows_lost, compared.rows_doubled
    found.damaged_checkpoints_taken = int(compared.other_losses)
    found.other_results = int(bool(compared.differences) and not compared.other_losses)
    if not compared.clean:
        found.failures.append(f"{what}: {compared}")


def trials(args: argparse.Namespace, folder: Path) -> Iterator[Figures]:
    """Until the kills or the time are spent."""
    small = make_job(folder / "job")
    jobs = {
        f"{layout} {mode}": replace(small, ranks=ranks, overrides=(*overrides, f"model.reference.mode={mode}"))
        for layout, (ranks, overrides) in LAYOUTS.items()
        for mode in MODES
    }
    wholes: dict[Job, tuple[Path, float]] = {}
    if args.trial is not None:
        yield run_trial(args.trial, jobs, wholes, folder / "trial")
        return
    end, kills, number = time.monotonic() + 60 * args.minutes, 0, args.seed
    while kills < args.kills and time.monotonic() < end:
        found = run_trial(number, jobs, wholes, folder / f"trial_{number}")
        if not found.failures:
            shutil.rmtree(folder / f"trial_{number}")
        kills += found.kills
        number += 1
        yield found


ROWS_OF_TABLE = [
    ("kills (SIGKILL)", "kills"),
    ("of one rank", "of_a_rank"),
    ("of the launcher", "of_the_launcher"),
    ("of all processes at once", "of_all"),
    ("jobs, each killed up to four times", "trials"),
    ("starts of these jobs", "starts"),
    ("rows lost", "rows_lost"),
    ("rows used twice within an epoch", "rows_doubled"),
    ("damaged checkpoints taken", "damaged_checkpoints_taken"),
    ("other differences: exported files, leftovers", "other_results"),
    ("starts that failed though nothing was done to them", "failed_starts"),
    ("hangs", "hangs"),
    ("processes left running", "left_running"),
]
BEGIN, END = "<!-- figures: make chaos -->", "<!-- end of figures -->"


def table(all_of_it: Figures, seed: int) -> str:
    """The figures in Markdown."""
    named = f"{all_of_it.causes_named} of {all_of_it.causes_due}"
    lines = [
        f"Measured on {date.today().isoformat()} with seeds {seed} to {seed + all_of_it.trials - 1}, on {os.cpu_count()} "
        f"cores ({platform.machine()}), in {all_of_it.seconds / 60:.0f} minutes:",
        "",
        "| | |",
        "|---|---:|",
        *(f"| {text} | {getattr(all_of_it, name)} |" for text, name in ROWS_OF_TABLE),
        f"| cause within the last {SHOWN_LINES} lines, where the launcher lives to say it | {named} |",
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
    folder, figures = Path(tempfile.mkdtemp(prefix="chaos_")), Figures()
    for found in trials(args, folder):
        figures.add(found)
        print(f"{figures.kills} kills in {figures.trials} jobs, {figures.seconds:.0f} s", flush=True)
        for failure in found.failures:
            print(f"FAILED {failure}", flush=True)
    print(table(figures, args.seed))
    if args.page is not None:
        before, _, rest = args.page.read_text().partition(BEGIN)
        args.page.write_text(f"{before}{BEGIN}\n{table(figures, args.seed)}\n{END}{rest.partition(END)[2]}")
    if figures.failures:
        print(f"{len(figures.failures)} failures; what they left is in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
