"""Forms of data files, detected from their content and, where it leaves a choice, from their suffix."""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, cast

from nemo_kto.data.rows.records import DataError
from nemo_kto.utils.files import open_file, other_format

START_BYTES = 2**16  # of a file, from which its form is detected
SUFFIXES = (".jsonl", ".parquet", ".arrow", ".csv", ".tsv", ".json")  # of the data files in a folder; the first form counts
COMPRESSED = (".gz", ".zst")  # suffixes that may follow those of a text
_COMPRESSIONS: dict[bytes, Literal["gzip", "zstd"]] = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_TABLES: dict[bytes, Literal["parquet", "arrow file", "arrow"]] = {
    b"PAR1": "parquet",
    b"ARROW1": "arrow file",
    b"\xff\xff\xff\xff": "arrow",  # a stream of record batches, as the datasets library writes them
}
_DELIMITERS = ",\t;"
_OF_ARGUMENT = re.compile(r"(data[A-Za-z0-9_.]*)-[0-9a-f]{32}\.rows")  # see :func:`argument_file`
_EXCEL = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1")  # xlsx is a zip archive; xls


@dataclass(frozen=True, kw_only=True)
class Form:
    """Form of a data file."""

    kind: Literal["lines", "csv", "parquet", "arrow file", "arrow"]  # lines: one JSON object each
    compression: Literal["gzip", "zstd"] | None = None
    delimiter: str = ""  # of the cells in a line of ``csv``

    @property
    def is_table(self) -> bool:
        """Whether the file is binary and contains typed columns, which are read with pyarrow."""
        return self.kind in _TABLES.values()

    @property
    def unit(self) -> str:
        """What numbers of rows count: the lines of the file or, in a file without such lines, its rows."""
        return "line" if self.kind in ("lines", "csv") else "row"


def find_form(path: str | Path) -> Form:
    """Return the form of a data file; DataError if it cannot be opened, or is of a form that is not read."""
    try:
        with open_file(path) as file:
            start = file.read(START_BYTES)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}; correct the path, or give this user permission to read it"
        ) from error
    for magic, table in _TABLES.items():
        if start.startswith(magic):
            return Form(kind=table)
    compression = next((name for magic, name in _COMPRESSIONS.items() if start.startswith(magic)), None)
    name = Path(path).name.lower()
    if compression is not None:
        name = name.removesuffix(".gz").removesuffix(".zst")
        with open_text(path, compression) as text:
            start = text.read(START_BYTES)
    if start.startswith(_EXCEL) and (b"[Content_Types].xml" in start or b"xl/" in start or ".xls" in name):
        raise DataError(f"{path}:1: must be rows of text, but the file is an Excel workbook; save it as csv (UTF-8)")
    message = other_format(start)
    if start.startswith(tuple(_TABLES)):
        message = f"a table that is compressed with {compression}; decompress it"
    if message is not None:
        raise DataError(f"{path}:1: must be JSON, one object per line, but the file is {message}")
    text_start = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text_start.startswith(b"["):
        convert = {None: "jq -c '.[]' FILE", "gzip": "zcat FILE | jq -c '.[]'", "zstd": "zstdcat FILE | jq -c '.[]'"}
        remedy = f"convert it with: {convert[compression]} > converted.jsonl"
        raise DataError(f"{path}:1: must be JSON, one object per line, but the file is a JSON array; {remedy}")
    if text_start.startswith(b"{") or (delimiter := _delimiter(text_start, name)) is None:
        return Form(kind="lines", compression=compression)
    return Form(kind="csv", compression=compression, delimiter=delimiter)


def _delimiter(start: bytes, name: str) -> str | None:
    """Return the delimiter of a csv file; None if the name does not end in csv or tsv and the first line is no header."""
    first = start.split(b"\n", 1)[0].rstrip().decode("utf-8", "replace")
    try:
        columns = {delimiter: next(csv.reader([first], delimiter=delimiter), []) for delimiter in _DELIMITERS}
    except csv.Error:
        columns = {delimiter: [] for delimiter in _DELIMITERS}
    delimiter = max(_DELIMITERS, key=lambda each: len(columns[each]))
    if name.endswith((".csv", ".tsv")):
        return "\t" if name.endswith(".tsv") and len(columns[delimiter]) < 2 else delimiter
    is_header = all(each and each.replace("_", "").replace(" ", "").isalnum() for each in columns[delimiter])
    return delimiter if len(columns[delimiter]) > 1 and is_header else None


@contextmanager
def open_text(path: str | Path, compression: str | None, *, skip: int = 0) -> Iterator[BinaryIO]:
    """Open a text for reading from byte ``skip`` of its decompressed content; DataError if it cannot be decompressed."""
    try:
        with open_file(path) as file:
            if compression is None:
                file.seek(skip)
                yield file
                return
            if compression == "gzip":
                stream = cast(BinaryIO, gzip.GzipFile(fileobj=file))
            else:
                import pyarrow

                stream = cast(BinaryIO, io.BufferedReader(pyarrow.CompressedInputStream(file, compression)))
            skip_bytes(stream, skip)
            yield stream
    except (EOFError, OSError, ValueError, zlib.error) as error:
        if isinstance(error, DataError):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        what = "read" if compression is None else f"decompressed ({compression})"
        remedy = "correct the path, or give this user permission to read it" if compression is None else "write it again"
        raise DataError(f"{path} cannot be {what}: {reason}; {remedy}") from error


def skip_bytes(stream: BinaryIO, count: int) -> None:
    """Skip bytes of a stream, which are read if they are compressed."""
    if stream.seekable():
        stream.seek(count, io.SEEK_CUR)
        return
    while count and (passed := stream.read(min(count, START_BYTES))):
        count -= len(passed)


def row_place(path: str | Path, number: int) -> str:
    """Return the place of a row for a message: "rows.csv:17", or "rows.parquet row 17" for data without such lines."""
    name = data_name(path)
    try:
        has_lines = name == str(path) and find_form(path).unit == "line"
    except DataError:
        has_lines = True
    return f"{name}:{number}" if has_lines else f"{name} row {number}"


def data_name(path: str | Path) -> str:
    """Return the name of data for a message: the path, or the argument of the Python call whose rows the file contains."""
    written = _OF_ARGUMENT.fullmatch(Path(path).name)
    return str(path) if written is None else written[1]


def argument_file(name: str, content_hash: str) -> str:
    """Return the name of a file of rows that were passed in an argument, such as "data" or "data.train"."""
    return f"{re.sub(r'[^A-Za-z0-9_.]', '_', name)}-{content_hash[:32]}.rows"
