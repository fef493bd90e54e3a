"""RUN/run.json: the state of a run, written at its start and at its end."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_kto.report.record import DATA_FILE, FAILED, RUN_FILE, RUNNING, RunFile
from nemo_kto.utils.files import publish_file
from nemo_kto.utils.saved_records import read_object_as
from nemo_kto.utils.text import terminal_text

_MAX_TEXT = 10_000  # characters of an error


def begin_run(folder: Path, *, run: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Record that a run has begun or was resumed, what it is (``run``), and the statistics of its data."""
    _write(folder / DATA_FILE, data)
    _write(folder / RUN_FILE, {"state": RUNNING, "text": "", "started": time.time(), **run})


def end_run(folder: Path, state: str, text: str = "") -> None:
    """Record the end of a run that :func:`begin_run` recorded: its state, and why it ended; without it, do nothing."""
    if run := read_object_as(RunFile, folder / RUN_FILE):
        text = terminal_text(text[-_MAX_TEXT:])  # without lone surrogates, which no reader of JSON accepts
        _write(folder / RUN_FILE, {**run, "state": state, "text": text, "ended": time.time()})


def record_failure(folder: Path, text: str, *, since: float) -> None:
    """Record the error of the rank that failed first, if a run began in the folder after ``since``, in seconds since 1970.

    Rank 0 may have been ended before it could, or recorded that it missed the rank that failed.
    """
    run = read_object_as(RunFile, folder / RUN_FILE)
    if run.get("state") in (RUNNING, FAILED) and run.get("started", 0.0) >= since:
        end_run(folder, FAILED, text)


def _write(file: Path, content: Mapping[str, Any]) -> None:
    with publish_file(file) as writing:
        writing.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
