"""Rows of data files in any form, and parts of files: ranges of rows that are read independently of each other."""

from __future__ import annotations

import codecs
import contextlib
import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from nemo_kto.data.rows.forms import Form, find_form, open_text, skip_bytes
from nemo_kto.data.rows.normalise import without_nulls
from nemo_kto.data.rows.records import DataError, LastRowError, Row, RowError
from nemo_kto.errors import printable, show
from nemo_kto.utils.files import MAX_LINE_BYTES, read_lines

if TYPE_CHECKING:
    import pyarrow

MIN_BYTES = 2**22  # minimum size of a part, which takes a few seconds to process
_MAX_PARTS = 1000  # approximate maximum per file; a large file has larger parts
_MAX_COMPRESSED_PARTS = 64  # fewer, because reading a part decompresses everything before it
_RATIO = 4  # typical of the compression of text
_SCAN_BYTES = 2**20
_MAX_BLANK_BYTES = 2**20  # in succession; a compressed file of a megabyte may contain a gigabyte of them
_TABLE_ROWS = 1000  # rows of a table that are in memory at a time
_EXTENSION = b"ARROW:extension:name"  # of a type that this version of pyarrow does not know


class _CsvRow(NamedTuple):
    """Row of a csv file, or why it cannot be used."""

    number: int  # of its first line, or of the row
    row: Row | RowError
    stop: int  # byte after it
    next_number: int


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """Range of whole rows of a file: of bytes of the (decompressed) text, of row groups or of record batches."""

    number: int = 0  # index of the part, from 0
    start: int = 0
    stop: int | None = None  # None for the end of the file
    first_line: int = 1  # number of its first line or row, from 1


WHOLE_FILE = FilePart()


def read_rows(path: str | Path, part: FilePart = WHOLE_FILE) -> Iterator[tuple[int, Row | RowError]]:
    """Yield number and row, or the error, of each row in a part of a file.

    After an error that makes the rest of the part unreadable, such as a line above the length limit, nothing follows. Cells
    of a csv file are strings; null values of objects are left out. DataError if the file cannot be opened or is of another
    form.
    """
    form = find_form(path)
    if form.is_table:
        yield from _table_rows(path, form, part)
        return
    with open_text(path, form.compression, skip=0 if form.kind == "csv" else part.start) as text:
        if form.kind == "csv":
            yield from ((found.number, found.row) for found in _csv_rows(text, form.delimiter, part))
        else:
            yield from _line_rows(text, part)


def file_parts(path: Path) -> Iterator[FilePart]:
    """Yield the parts of a file while reading it once; they depend only on the file. DataError as in :func:`read_rows`.

    A part whose rest cannot be read is the last one.
    """
    form = find_form(path)
    if form.is_table:
        yield from _table_parts(path, form)
        return
    part_bytes = _part_bytes(path, form)
    if part_bytes is None:
        yield WHOLE_FILE
        return
    with open_text(path, form.compression) as text:
        if form.kind == "lines":
            yield from _line_parts(text, part_bytes)
            return
        part, stop = FilePart(), 0
        for each in _csv_rows(text, form.delimiter, WHOLE_FILE):
            stop = each.stop
            if stop - part.start >= part_bytes:
                yield replace(part, stop=stop)
                part = FilePart(number=part.number + 1, start=stop, first_line=each.next_number)
        if stop > part.start or part.number == 0:
            yield part


def number_of_parts(path: Path) -> int:
    """Return the approximate number of parts that :func:`file_parts` yields; 1 only if there is no second part."""
    form = find_form(path)
    if form.is_table:
        return len(_table_parts(path, form))
    part_bytes, size = _part_bytes(path, form), path.stat().st_size
    if part_bytes is None:
        return 1
    return max(1, -(-size * (1 if form.compression is None else _RATIO) // part_bytes))


def _part_bytes(path: Path, form: Form) -> int | None:
    """Return the size of a part of a text; None if a compressed file is too small to be divided."""
    size = path.stat().st_size
    if form.compression is None:
        return max(MIN_BYTES, size // _MAX_PARTS)
    return None if size <= MIN_BYTES else max(MIN_BYTES, size // _MAX_COMPRESSED_PARTS) * _RATIO


def _parse_json(raw: bytes) -> Row:
    if len(raw) > MAX_LINE_BYTES:
        raise RowError(f"a line must have at most {MAX_LINE_BYTES:,} bytes, got more; write one object per line")
    try:
        text = raw.decode("utf-8-sig")
        row = json.loads(text)
        if "\\u" in text:  # only an escape can encode a lone surrogate, which no tokenizer accepts
            json.dumps(row, ensure_ascii=False).encode("utf-8")
        if "null" in text and isinstance(row, dict):
            row = _without_nested_nulls(row)
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise RowError(f"not valid UTF-8 ({error.reason}); save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:  # not JSON, a huge integer, or too deep nesting
        raise RowError(f"not valid JSON ({error}); write one object per line") from error
    if not isinstance(row, dict):
        raise RowError(f"a row must be a JSON object, got {show(row)}")
    return row


def _line_rows(text: BinaryIO, part: FilePart) -> Iterator[tuple[int, Row | RowError]]:
    """Yield the rows of JSON lines that are not empty; ``text`` is at the start of the part."""
    place, blank = part.start, 0
    for line, raw in enumerate(read_lines(text), start=part.first_line):
        blank = blank + len(raw) if raw.isspace() else 0
        if not blank:
            row: Row | RowError
            try:
                row = _parse_json(raw)
            except RowError as error:
                row = error
            yield line, row
        elif blank > _MAX_BLANK_BYTES:
            yield line, _too_many_blank_lines()
            return
        place += len(raw)
        if part.stop is not None and place >= part.stop:
            return


def _too_many_blank_lines() -> LastRowError:
    return LastRowError(
        f"a file must have at most {_MAX_BLANK_BYTES:,} bytes of empty lines together, got more; remove them"
    )


def _line_parts(text: BinaryIO, part_bytes: int) -> Iterator[FilePart]:
    """Yield the parts of JSON lines; only the ends of lines are searched, which is faster than reading the rows."""
    number, start, line = 0, 0, 1
    while True:
        lines, left, rest, stop = 0, part_bytes, b"\n", start
        while left and (chunk := text.read(min(_SCAN_BYTES, left))):
            lines += chunk.count(b"\n")
            left -= len(chunk)
            stop += len(chunk)
        if not left and chunk[-1:] != b"\n":
            rest = text.readline(MAX_LINE_BYTES)
            lines += rest.endswith(b"\n")
            stop += len(rest)
        if stop > start or number == 0:
            yield FilePart(number=number, start=start, stop=stop, first_line=line)
        if left or not rest.endswith(b"\n"):
            return
        number, start, line = number + 1, stop, line + lines


@dataclass(kw_only=True)
class _CountedLines:
    """Lines of a text for the csv module, and their number and bytes so far; a byte that is not UTF-8 is a surrogate."""

    text: BinaryIO
    lines: int = 0
    bytes: int = 0
    row_start: int = 0  # byte at which the row begins that is read now

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        raw = self.text.readline(MAX_LINE_BYTES + 1)
        if not raw:
            raise StopIteration
        self.lines += 1
        self.bytes += len(raw)
        if self.lines == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)  # before a quote, which must begin its cell
        if self.bytes - self.row_start > MAX_LINE_BYTES:
            raise LastRowError(f"a row must have at most {MAX_LINE_BYTES:,} bytes, got more; does a quoted cell not end?")
        return raw.decode("utf-8", "surrogateescape")


def _csv_rows(text: BinaryIO, delimiter: str, part: FilePart) -> Iterator[_CsvRow]:
    """Yield the rows of a csv file as strings by column; rows of empty cells are left out. ``text`` is at its beginning."""
    csv.field_size_limit(MAX_LINE_BYTES)
    lines, names, filled = _CountedLines(text=text), list[str](), 0  # filled: byte after the last row that is not empty
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while part.stop is None or lines.bytes < part.stop or not names:
        row: Row | RowError
        number, lines.row_start = lines.lines + 1, lines.bytes
        try:
            if (cells := next(reader, None)) is None:
                return
            "".join(cells).encode("utf-8")
            if not any(map(str.strip, cells)):
                if lines.bytes - filled > _MAX_BLANK_BYTES:
                    raise _too_many_blank_lines()
                continue
            filled = lines.bytes
            if not names:
                names = _column_names(cells)
                if part.start > lines.bytes:
                    skip_bytes(text, part.start - lines.bytes)
                    filled, lines.bytes, lines.lines = part.start, part.start, part.first_line - 1
                continue
            if len(cells) != len(names):
                remedy = f'quote cells that contain "{delimiter}" or a line break'
                raise RowError(f"a row must have {len(names)} cells, as the header has, got {len(cells)}; {remedy}")
            row = dict(zip(names, cells, strict=True))
        except RowError as error:
            row = error
        except UnicodeEncodeError:
            row = RowError("not valid UTF-8; save the file as UTF-8")
        except csv.Error as error:
            row = RowError(f'not valid csv ({error}); quote cells that contain quotes, and write each of these as ""')
        yield _CsvRow(number, row, lines.bytes, lines.lines + 1)
        if isinstance(row, LastRowError) or not names:
            return


def _column_names(cells: Sequence[str]) -> list[str]:
    """Return the names in a header; a column without a name, as an index of pandas, is named by its position."""
    names = [cell.strip() or f"column {number}" for number, cell in enumerate(cells, start=1)]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise LastRowError(f"the header must name each column once, got {show(twice)} twice; rename one")
    return names


class _Table(NamedTuple):
    """Table in units that are read separately: row groups of a Parquet file, or record batches of an Arrow file."""

    sizes: Callable[[], Iterator[tuple[int, int]]]  # rows and bytes of each unit
    read: Callable[[int, int | None], Iterator[pyarrow.RecordBatch]]  # units [start, stop)
    schema: pyarrow.Schema

    def parts(self) -> Iterator[FilePart]:
        part, row, size, unit = FilePart(), 1, 0, 0
        for unit, (rows, size_of_unit) in enumerate(self.sizes(), start=1):
            row, size = row + rows, size + size_of_unit
            if size >= MIN_BYTES:
                yield replace(part, stop=unit)
                part, size = FilePart(number=part.number + 1, start=unit, first_line=row), 0
        if unit > part.start or part.number == 0:
            yield replace(part, stop=unit)

    def class_names(self) -> Mapping[str, Sequence[str]]:
        """Return the names of the integers in columns that the datasets library calls class labels."""
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):  # of another program
            features = json.loads((self.schema.metadata or {})[b"huggingface"])["info"]["features"]
            return {name: each["names"] for name, each in features.items() if each.get("_type") == "ClassLabel"}
        return {}


@contextmanager
def _open_table(path: str | Path, form: Form) -> Iterator[_Table]:
    """Open a Parquet or Arrow file; DataError if it is damaged."""
    import pyarrow
    from pyarrow import ipc, parquet

    try:
        file = pyarrow.OSFile(str(path)) if form.kind == "parquet" else pyarrow.memory_map(str(path))
        if form.kind == "parquet":
            rows = parquet.ParquetFile(file)
            groups = [rows.metadata.row_group(number) for number in range(rows.metadata.num_row_groups)]

            def read_groups(start: int, stop: int | None) -> Iterator[pyarrow.RecordBatch]:
                return rows.iter_batches(_TABLE_ROWS, row_groups=[*range(len(groups))][start:stop])

            sizes = partial(iter, [(group.num_rows, group.total_byte_size) for group in groups])
            table = _Table(sizes, read_groups, rows.schema_arrow)
        else:
            open_batches = partial(_record_batches, file, is_stream=form.kind == "arrow")
            schema = (ipc.open_stream if form.kind == "arrow" else ipc.open_file)(file).schema
            table = _Table(
                lambda: ((batch.num_rows, batch.nbytes) for batch in open_batches()),
                lambda start, stop: islice(open_batches(), start, stop),
                schema,
            )
    except Exception as error:  # for damaged files pyarrow may raise any exception
        raise _damaged(path, form, error) from error
    with file:
        yield table


def _damaged(path: str | Path, form: Form, error: Exception) -> DataError:
    name = "a Parquet file" if form.kind == "parquet" else "an Arrow file"
    return DataError(f"{path} is not valid as {name}: {printable(str(error))}; write it again")


def _table_parts(path: str | Path, form: Form) -> list[FilePart]:
    with _open_table(path, form) as table:
        try:
            return list(table.parts())
        except Exception as error:  # of a record batch
            raise _damaged(path, form, error) from error


def _record_batches(file: pyarrow.NativeFile, *, is_stream: bool) -> Iterator[pyarrow.RecordBatch]:
    from pyarrow import ipc

    file.seek(0)
    if is_stream:
        yield from ipc.open_stream(file)
    else:
        batches = ipc.open_file(file)
        yield from map(batches.get_batch, range(batches.num_record_batches))


def _table_rows(path: str | Path, form: Form, part: FilePart) -> Iterator[tuple[int, Row | RowError]]:
    number = part.first_line
    with _open_table(path, form) as table:
        class_names = table.class_names()
        decoders = {field.name: decode for field in table.schema if (decode := _json_decoder(field)) is not None}
        try:
            for batch in table.read(part.start, part.stop):
                batch.validate(full=True)
                for start in range(0, batch.num_rows, _TABLE_ROWS):
                    for row in batch.slice(start, _TABLE_ROWS).to_pylist():
                        for column in class_names.keys() & row.keys():
                            names, label = class_names[column], row[column]
                            if label is not None and label < len(names):  # the library writes -1 for a missing label
                                row[column] = names[label] if label >= 0 else None
                        row |= {column: decode(row[column]) for column, decode in decoders.items()}
                        yield number, _without_nested_nulls(row)
                        number += 1
        except Exception as error:  # for damaged files pyarrow may raise any exception
            yield number, RowError(f"the rest of the file is damaged ({printable(str(error))}); write it again")


def _json_decoder(field: pyarrow.Field) -> Callable[[Any], Any] | None:
    """Return a function that decodes all JSON in values of a column; None if its type has none.

    The datasets library stores values of mixed types as JSON, also within lists and structures.
    """
    from pyarrow import types

    kind = field.type
    if "arrow.json" in (getattr(kind, "extension_name", None), (field.metadata or {}).get(_EXTENSION, b"").decode()):
        return _decoded
    if types.is_struct(kind):
        decoders = {each.name: decode for each in kind.fields if (decode := _json_decoder(each)) is not None}
        if not decoders:
            return None
        return lambda value: value and value | {name: decode(value[name]) for name, decode in decoders.items()}
    if types.is_nested(kind) and hasattr(kind, "value_field"):
        decode_item = _json_decoder(kind.value_field)
        return decode_item and (lambda values: values and [decode_item(each) for each in values])
    return None


def _decoded(text: str | None) -> Any:
    value = None if text is None else json.loads(text)
    if "\\u" in (text or ""):  # see :func:`_parse_json`
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def _without_nested_nulls(row: Row) -> Row:
    """Return a row without null values in its objects: a table has all fields of any row in every row."""
    return {column: without_nulls(value) for column, value in row.items()}
