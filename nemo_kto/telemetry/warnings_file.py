"""The warnings of a run as a file of its folder."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from nemo_kto.telemetry.loggers import JsonLines
from nemo_kto.utils.saved_records import Count, Record, read_lines_as

WARNINGS_FILE = "warnings.jsonl"
_MAX_READ = 10_000  # of a file that are read
_MAX_LINES = 1000  # a program that warns more often says nothing new


class LoggedWarning(Record):
    """A line of warnings.jsonl."""

    step: Count
    text: str


def read_warnings(file: Path, damaged: list[str] | None = None) -> list[LoggedWarning]:
    """Read a file of warnings; damaged lines are skipped and described in ``damaged``, and a missing file has none."""
    return list(islice(read_lines_as(LoggedWarning, file, damaged), _MAX_READ))


class WarningsFile(logging.Handler):
    """Handler that writes warnings and errors to warnings.jsonl: {"step", "time", "level", "text"}, each text once.

    Warnings before :meth:`open_file`, such as those about the data, are kept until then: a run whose checks fail leaves its
    folder as it was.
    """

    def __init__(self, *, redact: Callable[[str], str] = str) -> None:
        """``redact`` removes secrets from a text."""
        super().__init__(logging.WARNING)
        self._redact = redact
        self._waiting: list[dict[str, object]] = []
        self._seen: set[str] = set()
        self._lines: JsonLines | None = None
        self._step: Callable[[], int] = int

    def open_file(self, folder: Path, *, step: Callable[[], int], resumed_step: int | None) -> None:
        """Write to the run folder from now on; ``step`` returns the number of steps done.

        In a resumed run, the warnings after its step are dropped first.
        """
        self._lines, self._step = JsonLines(file=folder / WARNINGS_FILE, resumed_step=resumed_step), step
        self._lines.add_lines({**line, "step": step()} for line in self._waiting)
        self._waiting = []

    def emit(self, record: logging.LogRecord) -> None:
        text = self._redact(record.getMessage())
        if text in self._seen or len(self._seen) >= _MAX_LINES:
            return
        self._seen.add(text)
        level = "error" if record.levelno >= logging.ERROR else "warning"
        line = {"step": self._step(), "time": round(record.created, 3), "level": level, "text": text}
        if self._lines is None:
            self._waiting.append(line)
        else:
            self._lines.add_lines([line])

    def close(self) -> None:
        if self._lines is not None:
            self._lines.finalize("")
            self._lines = None
        super().close()


@contextlib.contextmanager
def collect_warnings(*, redact: Callable[[str], str] = str) -> Iterator[WarningsFile]:
    """Collect all warnings and errors of the process within the block, for the file of a run."""
    handler = WarningsFile(redact=redact)
    logging.root.addHandler(handler)
    try:
        yield handler
    finally:
        logging.root.removeHandler(handler)
        handler.close()
