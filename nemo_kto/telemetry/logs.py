"""Python's logging as the commands show it; importing the package sets up nothing.

On rank 0: what the package tells (INFO), in plain words. On every rank: warnings, marked as such, those of the module
``warnings`` too. Other libraries are heard from WARNING on.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable
from typing import TextIO

_PACKAGE = "nemo_kto"
# Every rank reads the same rows and the same checkpoints, so that rank 0 speaks for all.
_ALIKE_ON_ALL_RANKS = (f"{_PACKAGE}.data", f"{_PACKAGE}.checkpoint")
_HAVE_HANDLERS = ("transformers", "datasets", "huggingface_hub")
_YELLOW, _RED, _PLAIN = "\x1b[33m", "\x1b[31m", "\x1b[0m"


class _Handler(logging.StreamHandler[TextIO]):
    """Writes to the terminal, above a progress bar where there is one; the same warning is written once."""

    def __init__(self, *, stream: TextIO | None, rank: int) -> None:
        """``stream``: where to; whatever sys.stderr is at the time if None."""
        super().__init__(stream)
        self._follows_stderr = stream is None
        self._rank = rank
        self._warned: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if self._rank > 0 and record.levelno < logging.ERROR and record.name.startswith(_ALIKE_ON_ALL_RANKS):
            return False
        text = record.getMessage()
        if record.levelno == logging.WARNING and text in self._warned:
            return False
        self._warned |= {text} if record.levelno == logging.WARNING else set()
        return bool(super().filter(record))

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record).rstrip()
        if record.levelno < logging.WARNING:
            return text
        mark, colour = ("error", _RED) if record.levelno >= logging.ERROR else ("warning", _YELLOW)
        mark = f"{mark}:" if self._rank == 0 else f"{mark} on rank {self._rank}:"
        coloured = self.stream.isatty() and not os.environ.get("NO_COLOR")
        return f"{colour}{mark}{_PLAIN} {text}" if coloured else f"{mark} {text}"

    def emit(self, record: logging.LogRecord) -> None:
        if self._follows_stderr:
            self.stream = sys.stderr
        if "tqdm" not in sys.modules or not self.stream.isatty():
            super().emit(record)
            return
        from tqdm import tqdm

        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


def set_up_logging(*, rank: int, stream: TextIO | None = None) -> None:
    """Show the logs of this process on its terminal; a second call replaces the first.

    Args:
        rank: of this process.
        stream: where to; stderr if None.
    """
    for handler in [handler for handler in logging.root.handlers if isinstance(handler, _Handler)]:
        logging.root.removeHandler(handler)
    logging.root.addHandler(_Handler(stream=stream, rank=rank))
    logging.getLogger(_PACKAGE).setLevel(logging.INFO if rank == 0 else logging.WARNING)
    warnings.formatwarning = _one_line
    logging.captureWarnings(True)


def take_over(libraries: Iterable[str] = _HAVE_HANDLERS) -> None:
    """Let libraries that show their logs themselves, once they are imported, be shown as all others are, and only once."""
    for library in map(logging.getLogger, libraries):
        for handler in [handler for handler in library.handlers if type(handler) is logging.StreamHandler]:
            library.removeHandler(handler)
        library.propagate = True


def _one_line(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """A warning without the source line that raised it."""
    return f"{message} ({category.__name__}, {filename}:{lineno})"
