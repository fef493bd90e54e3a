"""Append-only files of JSON lines, which a killed process leaves complete up to its last whole line."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from nemo_kto.errors import UserError
from nemo_kto.utils.files import make_folder, read_lines
from nemo_kto.utils.locks import locked

_START = b'{"prompt": '  # of every row


class RowFile:
    """The rows of a file, to whose end rows are appended, or from which they are removed; threads may share it."""

    def __init__(self, *, path: Path, file: BinaryIO) -> None:
        """Read the rows of a file that is open for appending; UserError if a line is no object.

        A last line that a killed process left incomplete is removed.
        """
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.lock = threading.RLock()
        self._file = file
        self._ends = [0]  # the byte after each row
        file.seek(0)
        for number, line in enumerate(read_lines(file), start=1):
            is_whole = line.endswith(b"\n")
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("it is no object")
            except ValueError as error:
                if not is_whole and line[: len(_START)] == _START[: len(line)]:  # written when the command was killed
                    file.truncate(self._ends[-1])
                    break
                text = f"{path}:{number}: must be a JSON object, but {error}"
                raise UserError(f"{text}; remove the line, or name another file") from error
            self.rows.append(row)
            self._ends.append(self._ends[-1] + len(line))
            if not is_whole:  # of an editor
                self._ends[-1] += 1
                self._write(b"\n")

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Append rows; they are on disk when this returns."""
        lines = [(json.dumps(row, ensure_ascii=False) + "\n").encode() for row in rows]
        with self.lock:
            self._write(b"".join(lines))
            for row, line in zip(rows, lines, strict=True):
                self.rows.append(dict(row))
                self._ends.append(self._ends[-1] + len(line))

    def remove_last(self) -> None:
        """Remove the last row."""
        with self.lock:
            self._file.truncate(self._ends[-2])
            self.rows.pop()
            self._ends.pop()

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._file.flush()
        os.fsync(self._file.fileno())


@contextlib.contextmanager
def open_rows(path: Path, *, option: str) -> Iterator[RowFile]:
    """Open the file of an option for the block, created if it does not exist; UserError if it cannot be used.

    One process at a time may have it open.
    """

    def refuse(who: str) -> NoReturn:
        text = f"{option} must be written by one process at a time, got {path}, but {who} writes it"
        raise UserError(f"{text}; wait until it has ended, or name another file")

    with contextlib.ExitStack() as opened:
        try:
            make_folder(path.parent, private=False)
            opened.enter_context(locked(path.with_name(f".{path.name}.lock"), when_held=refuse))
            file = opened.enter_context(path.open("a+b"))
        except OSError as error:
            remedy = "correct the path, or give this user permission to write there"
            raise UserError(
                f"{option} must be a file that can be written, got {path}: {error.strerror}; {remedy}"
            ) from error
        yield RowFile(path=path, file=file)
