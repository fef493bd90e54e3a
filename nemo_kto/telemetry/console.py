"""Output and logging of the commands; importing the package sets up nothing.

Output that cannot be written is dropped, because a run must not end when a terminal is closed, a disk is full, or the reader
of a pipe has exited (``| head``). Rank 0 shows INFO messages of this package, without a prefix. All ranks show warnings and
errors with a prefix, including those of ``warnings``; other libraries are shown from level WARNING.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, cast

from nemo_kto.redaction import redacted
from nemo_kto.utils.text import terminal_text

DEFAULT_WIDTH = 80  # of a terminal that does not report its width
LOST = 1  # exit status of a command whose result is its output, if the output could not be written
_PACKAGE = "nemo_kto"
# All ranks read the same rows and checkpoints, so that only rank 0 shows messages of these modules, except for errors.
_SAME_ON_ALL_RANKS = (f"{_PACKAGE}.data", f"{_PACKAGE}.checkpoint")
_HAVE_HANDLERS = ("transformers", "datasets", "huggingface_hub")
_YELLOW, _RED, _PLAIN = "\x1b[33m", "\x1b[31m", "\x1b[0m"


def terminal_width(stream: TextIO) -> int | None:
    """Return the number of columns of the terminal that ``stream`` writes to; None if it is not a terminal."""
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or DEFAULT_WIDTH
    except OSError:  # a terminal without a size
        return DEFAULT_WIDTH


class _Tolerant:
    """Stream that drops text which cannot be written; ``problem`` holds the first error, ``public`` removes secrets."""

    def __init__(self, stream: TextIO, *, public: Callable[[str], str]) -> None:
        self._stream, self._public = stream, public
        self.problem: OSError | None = None

    def write(self, text: str) -> int:
        with self._tolerated():
            self._stream.write(self._public(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        with self._tolerated():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _tolerated(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:  # the reader is slow, and another process has set the stream to non-blocking
            pass
        except OSError as error:
            first, self.problem = self.problem is None, self.problem or error
            with contextlib.suppress(OSError):  # a stream without a file has no file descriptor
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)
                self._stream.flush()  # buffered text must not raise again when the interpreter exits
            if first and sys.stdout is cast(TextIO, self) and not isinstance(error, BrokenPipeError):
                print(f"nemo-kto: standard output cannot be written: {error.strerror}; the rest is lost", file=sys.stderr)


def protect() -> None:
    """Make stdout, stderr and warnings of this process fault-tolerant and readable; a second call has no effect."""
    logging.lastResort = _Handler(stream=None, rank=0)  # of commands that do not set up logging
    logging.lastResort.setLevel(logging.WARNING)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # closed: the next opened file or socket would get this descriptor, and the output with it
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # for characters that the encoding of the terminal lacks
        if not isinstance(stream, _Tolerant):
            setattr(sys, name, _Tolerant(stream, public=redacted if name == "stderr" else str))


@contextlib.contextmanager
def exit_if_output_lost() -> Iterator[None]:
    """Exit with status 1 if the output of the block could not be written; for commands whose result is their output.

    The status is unchanged if the reader has closed the pipe, because it has read all that it needs.
    """
    status: str | int | None = None
    try:
        yield
    except SystemExit as end:
        status = end.code
    sys.stdout.flush()
    problem = getattr(sys.stdout, "problem", None)
    lost = problem is not None and not isinstance(problem, BrokenPipeError)
    if status or lost:
        sys.exit(status or LOST)


class _Handler(logging.StreamHandler[TextIO]):
    """Handler that writes to the terminal, above a progress bar if there is one, and shows each warning only once."""

    def __init__(self, *, stream: TextIO | None, rank: int) -> None:
        """``stream`` is None for sys.stderr as it is when a record is written."""
        super().__init__(stream)
        self._follows_stderr = stream is None
        self._rank = rank
        self._warned: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if self._rank > 0 and record.levelno < logging.ERROR and record.name.startswith(_SAME_ON_ALL_RANKS):
            return False
        text = record.getMessage()
        if record.levelno == logging.WARNING and text in self._warned:
            return False
        self._warned |= {text} if record.levelno == logging.WARNING else set()
        return bool(super().filter(record))

    def format(self, record: logging.LogRecord) -> str:
        text = terminal_text(redacted(super().format(record).rstrip()))
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
    """Show the logs of this process on ``stream``, by default stderr; a second call replaces the first."""
    for handler in [handler for handler in logging.root.handlers if isinstance(handler, _Handler)]:
        logging.root.removeHandler(handler)
    logging.root.addHandler(_Handler(stream=stream, rank=rank))
    logging.getLogger(_PACKAGE).setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_not_about_missing_gpu)
    # one line, without the source line that raised the warning
    warnings.formatwarning = lambda message, category, filename, lineno, line=None: (
        f"{message} ({category.__name__}, {filename}:{lineno})"
    )
    logging.captureWarnings(True)


def _is_not_about_missing_gpu(record: logging.LogRecord) -> bool:
    """Filter what torch logs at its import on a machine with a CUDA toolkit and without a GPU."""
    return not record.getMessage().startswith("No CUDA runtime is found")


def take_over() -> None:
    """Remove the handlers that imported libraries have installed, so that logs are shown once, in the common format."""
    for library in map(logging.getLogger, _HAVE_HANDLERS):
        for handler in [handler for handler in library.handlers if type(handler) is logging.StreamHandler]:
            library.removeHandler(handler)
        library.propagate = True
