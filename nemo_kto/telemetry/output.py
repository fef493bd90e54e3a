"""Standard output and error of the commands: what can no longer be written is dropped, and the command continues.

A terminal may be closed, a disk full, or the reader of a pipe gone (``| head``). None of these ends a run.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

LOST = 1  # exit status of a command whose output is all that it does, and could not be written


class _Tolerant:
    """A stream that drops what cannot be written. The first error is in ``problem``."""

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
        except BlockingIOError:  # the reader is slow, and others have switched off waiting for it
            pass
        except OSError as error:
            first, self.problem = self.problem is None, self.problem or error
            with contextlib.suppress(OSError):  # a stream without a file has no number
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)
                self._stream.flush()  # what is buffered must not fail once more, when the interpreter ends
            if first and sys.stdout is cast(TextIO, self) and not isinstance(error, BrokenPipeError):
                print(f"nemo-kto: standard output cannot be written: {error.strerror}; its rest is dropped", file=sys.stderr)


def protect() -> None:
    """Let this process go on where its output cannot be written, from now on; a second call changes nothing."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # it is closed, and the next file or socket would get its number and what is written there
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a character that the terminal's encoding lacks
        if not isinstance(stream, _Tolerant):
            setattr(sys, name, _Tolerant(stream))


@contextlib.contextmanager
def is_the_result() -> Iterator[None]:
    """Around a command whose output is all that it does: if that could not be written, it ends with status 1.

    A reader that has closed the pipe has what it wanted: then the status stays as it is.
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
