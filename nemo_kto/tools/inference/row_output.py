"""Append-only files of rows as JSON lines, which a killed process leaves complete up to its last whole line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from nemo_kto.data.rows.records import SOURCE, TextOrMessages
from nemo_kto.errors import UserError, refuse_broken
from nemo_kto.utils.files import MAX_LINE_BYTES, irregular, make_folder, read_lines
from nemo_kto.utils.locks import lock_content, locked

_START = b'{"prompt": '  # of every row
PERSON = "person"  # the labeller of rows whose label a person gave


class RowFile:
    """The rows of a file, to whose end rows are appended, or from which they are removed; threads may share it."""

    def __init__(self, *, path: Path, file: io.FileIO) -> None:
        """Read the rows of a file that is open for appending, without a buffer; UserError if a line is no object.

        A last line that a killed process left incomplete is removed.
        """
        self.path, self._target = path, os.path.realpath(path)
        self.rows: list[dict[str, Any]] = []
        self.lock = threading.RLock()
        self._file = file
        self._ends = [0]  # the byte after each row
        file.seek(0)
        reader, line = io.BufferedReader(file), b"\n"
        for number, line in enumerate(read_lines(reader), start=1):
            try:
                if len(line) > MAX_LINE_BYTES:
                    raise ValueError(f"it has more than {MAX_LINE_BYTES:,} bytes")
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("it is no object")
            except (ValueError, RecursionError) as error:
                is_cut = not line.endswith(b"\n") and len(line) <= MAX_LINE_BYTES
                if is_cut and line[: len(_START)] == _START[: len(line)]:  # written when the command was killed
                    file.truncate(self._ends[-1])
                    break
                text = f"{path}:{number}: must be a JSON object, but {error}"
                raise UserError(f"{text}; remove the line, or name another file") from error
            self.rows.append(row)
            self._ends.append(self._ends[-1] + len(line))
        else:
            if not line.endswith(b"\n"):  # of an editor
                self._write(b"\n")
                self._ends[-1] += 1
        reader.detach()

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Append rows, on disk when this returns; UserError, with the file as before, if they cannot be written."""
        lines = [self._line(row) for row in rows]
        with self.lock:
            self._refuse_other_writers()
            self._write(b"".join(lines))
            for row, line in zip(rows, lines, strict=True):
                self.rows.append(dict(row))
                self._ends.append(self._ends[-1] + len(line))

    def remove_last(self) -> None:
        """Remove the last row."""
        with self.lock:
            self._refuse_other_writers()
            self._file.truncate(self._ends[-2])
            self.rows.pop()
            self._ends.pop()

    def _line(self, row: Mapping[str, Any]) -> bytes:
        refuse_broken(f"{self.path}: a row", text := json.dumps(row, ensure_ascii=False) + "\n")
        if len(line := text.encode()) > MAX_LINE_BYTES:
            got = f"got {len(line):,}; leave its prompt out, or allow shorter answers"
            raise UserError(f"{self.path}: a row must have at most {MAX_LINE_BYTES:,} bytes, {got}")
        return line

    def _refuse_other_writers(self) -> None:
        found = os.fstat(self._file.fileno())
        try:
            is_here = os.path.samestat(os.stat(self._target), found)  # not after an editor that writes a new file
        except OSError:
            is_here = False
        if not is_here or found.st_size != self._ends[-1]:
            got = f"got {found.st_size:,} bytes instead of {self._ends[-1]:,}" if is_here else "got another file, or none"
            raise UserError(f"{self.path} must be changed by this command alone, {got}; start the command again")

    def _write(self, content: bytes) -> None:
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(self._file.fileno(), left) :]
            os.fsync(self._file.fileno())
        except BaseException as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._ends[-1])  # the next row must not follow a part of this one
            if not isinstance(error, OSError):
                raise
            text = f"{self.path} cannot be written: {error.strerror}; make room, and repeat the command, which continues"
            raise UserError(text) from error


@contextlib.contextmanager
def open_rows(path: Path, *, option: str) -> Iterator[RowFile]:
    """Open the file of an option for the block, created if it does not exist; UserError if it cannot be used.

    One process at a time may have it open, whatever links it has.
    """

    def refuse(who: str) -> NoReturn:
        text = f"{option} must be written by one process at a time, got {path}, but {who} writes it"
        raise UserError(f"{text}; wait until it has ended, or name another file")

    with contextlib.ExitStack() as opened:
        try:
            if (kind := irregular(path)) is not None:
                raise UserError(f"{option} must be a regular file, got {path}, which is {kind}; name another file")
            target = Path(os.path.realpath(path))
            make_folder(target.parent, private=False)
            opened.enter_context(locked(target.with_name(f".{target.name}.lock"), when_held=refuse))
            file = opened.enter_context(target.open("a+b", buffering=0))
            if not lock_content(file.fileno()):  # by another name of the same file
                refuse("another process")
        except OSError as error:
            remedy = "correct the path, or give this user permission to write there"
            raise UserError(
                f"{option} must be a file that can be written, got {path}: {error.strerror}; {remedy}"
            ) from error
        yield RowFile(path=path, file=file)


def thumb_row(
    prompt: TextOrMessages, answer: TextOrMessages, *, good: bool, source: Mapping[str, object]
) -> dict[str, object]:
    """Return the row of a labelled answer; ``source``: model, labeller and more, which the training ignores."""
    return {"prompt": prompt, "response": answer, "label": good, SOURCE: source}
