"""Command `nemo-kto report`: a page about a run, or a comparison of several.

It reads the files of the run folders and does not load torch, so that it works while a run is in progress.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click

from nemo_kto.cli.command import File, command, number
from nemo_kto.errors import UserError
from nemo_kto.records.run_record import REPORT_FILE, RUNNING, RunRecord, read_run
from nemo_kto.tools.report.report_page import write_report
from nemo_kto.utils.text import terminal_line

_OUT = "the page; default: RUN/report.html, or ./report.html for several runs"
_SECONDS = number("above 0", lambda value: value > 0, remedy="; e.g. --watch 30")


@command("report", "Write a page about a run, or a comparison of several, which needs no other file and no network.")
@click.argument(
    "runs", metavar="RUN", nargs=-1, required=True, type=File(), help="a run folder; the run may still be in progress"
)
@click.option("--out", metavar="FILE", type=File(), help=_OUT)
@click.option(
    "--watch",
    is_flag=False,
    flag_value=30.0,
    type=_SECONDS,
    metavar="SECONDS",
    help="write it again every 30 s until the runs end",
)
def main(runs: Sequence[Path], out: Path | None, watch: float | None) -> None:
    """Run the command; UserError if a folder is not that of a run, or the report cannot be written."""
    records = [read_run(folder.resolve()) for folder in dict.fromkeys(runs)]
    page = out or (records[0].folder if len(records) == 1 else Path()) / REPORT_FILE
    if not page.parent.is_dir():
        raise UserError(f"--out must be a file in a folder that exists, got {page}; create the folder, or choose another")
    if page.suffix != ".html":
        raise UserError(f"--out must be a file that ends in .html, got {page}; e.g. --out {page.with_suffix('.html')}")
    _write(records, page, watch)
    print(terminal_line(str(page)), flush=True)
    while watch is not None and any(run.state.word == RUNNING for run in records):
        time.sleep(watch)
        records = [read_run(run.folder) for run in records]
        _write(records, page, watch)


def _write(runs: Sequence[RunRecord], out: Path, watch: float | None) -> None:
    in_progress = any(run.state.word == RUNNING for run in runs)
    try:
        write_report(runs, out, refresh=watch if in_progress else None)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}; choose another file with --out") from error
