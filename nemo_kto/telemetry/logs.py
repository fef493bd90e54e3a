"""Setup of Python logging for the commands; importing the package sets up nothing.

Rank 0 shows INFO messages of this package, without a prefix. All ranks show warnings and errors with a prefix, including
those of the module ``warnings``. Messages of other libraries are shown from level WARNING.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable
from typing import TextIO

_PACKAGE = "nemo_kto"
# All ranks read the same rows and checkpoints, so that only rank 0 shows messages of these modules, except for errors.
_ALIKE_ON_ALL_RANKS = (f"{_PACKAGE}.data", f"{_PACKAGE}.checkpoint")
_HAVE_HANDLERS = ("transformers", "datasets", "huggingface_hub")
_YELLOW, _RED, _PLAIN = "\x1b[33m", "\x1b[31m", "\x1b[0m"


class _Handler(logging.StreamHandler[TextIO]):
    """Handler that writes to the terminal, above a progress bar if there is one, and shows each warning only once."""

    def __init__(self, *, stream: TextIO | None, rank: int) -> None:
        """Create the handler.

        Args:
            stream: output stream; None for sys.stderr as it is when a record is written.
            rank: rank of this process.
        """
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
        rank: rank of this process.
        stream: output stream; stderr if None.
    """
    for handler in [handler for handler in logging.root.handlers if isinstance(handler, _Handler)]:
        logging.root.removeHandler(handler)
    logging.root.addHandler(_Handler(stream=stream, rank=rank))
    logging.getLogger(_PACKAGE).setLevel(logging.INFO if rank == 0 else logging.WARNING)
    warnings.formatwarning = _one_line
    logging.captureWarnings(True)


def take_over(libraries: Iterable[str] = _HAVE_HANDLERS) -> None:
    """Remove the handlers that libraries install on import, so that their logs are shown once, in the common format.

    Call it after the libraries are imported.
    """
    for library in map(logging.getLogger, libraries):
        for handler in [handler for handler in library.handlers if type(handler) is logging.StreamHandler]:
            library.removeHandler(handler)
        library.propagate = True


def _one_line(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """Format a warning in one line, without the source line that raised it."""
    return f"{message} ({category.__name__}, {filename}:{lineno})"
