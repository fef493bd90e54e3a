"""Command `nemo-kto report`: a page about a run, or a comparison of several.

It reads the files of the run folders and does not load torch, so that it works while a run is in progress.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from nemo_kto.cli import number
from nemo_kto.errors import UserError
from nemo_kto.records.run_record import REPORT_FILE, RUNNING, RunRecord, read_run
from nemo_kto.tools.report.report_page import write_report
from nemo_kto.utils.text import terminal_line


def main(argv: Sequence[str]) -> None:
    """Run the command; UserError if a folder is not that of a run, or the report cannot be written."""
    arguments = _parser().parse_args(list(argv))
    runs = [read_run(folder.resolve()) for folder in dict.fromkeys(arguments.runs)]
    out: Path = arguments.out or (runs[0].folder if len(runs) == 1 else Path()) / REPORT_FILE
    if not out.parent.is_dir():
        raise UserError(f"--out must be a file in a folder that exists, got {out}; create the folder, or choose another")
    if out.suffix != ".html":
        raise UserError(f"--out must be a file that ends in .html, got {out}; e.g. --out {out.with_suffix('.html')}")
    _write(runs, out, arguments.watch)
    print(terminal_line(str(out)), flush=True)
    while arguments.watch is not None and any(run.state.word == RUNNING for run in runs):
        time.sleep(arguments.watch)
        runs = [read_run(run.folder) for run in runs]
        _write(runs, out, arguments.watch)


def _write(runs: Sequence[RunRecord], out: Path, watch: float | None) -> None:
    in_progress = any(run.state.word == RUNNING for run in runs)
    try:
        write_report(runs, out, refresh=watch if in_progress else None)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}; choose another file with --out") from error


def _parser() -> argparse.ArgumentParser:
    description = "Write a page about a run, or a comparison of several, which needs no other file and no network."
    parser = argparse.ArgumentParser(prog="nemo-kto report", description=description)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run folder; the run may still be in progress")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the page; default: RUN/report.html, or ./report.html for several runs"
    )
    seconds = number("above 0", lambda value: value > 0, remedy="; e.g. --watch 30")
    parser.add_argument(
        "--watch",
        type=seconds,
        nargs="?",
        const=30,
        metavar="SECONDS",
        help="write it again every 30 s until the runs end",
    )
    return parser
