"""Fault-tolerant standard output and error: text that cannot be written is dropped, and the command continues.

A run must not end because a terminal is closed, a disk is full, or the reader of a pipe has exited (``| head``).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

LOST = 1  # exit status of a command whose result is its output, if the output could not be written


class _Tolerant:
    """Stream that drops text which cannot be written; ``problem`` holds the first error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.problem: OSError | None = None

    def write(self, text: str) -> int:
        with self._tolerated():
            self._stream.write(text)
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
                print(f"nemo-kto: standard output cannot be written: {error.strerror}; its rest is dropped", file=sys.stderr)


def protect() -> None:
    """Make stdout and stderr of this process fault-tolerant; a second call has no effect."""
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
            setattr(sys, name, _Tolerant(stream))


@contextlib.contextmanager
def is_the_result() -> Iterator[None]:
    """Exit with status 1 if the output of the block could not be written; for commands whose result is their output.

    The status is unchanged if the reader has closed the pipe, because the reader then has all that it needs.
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
