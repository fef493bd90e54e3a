"""Files of prompts without answers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from nemo_kto.data.rows.forms import find_form
from nemo_kto.data.rows.other_formats import in_our_form
from nemo_kto.data.rows.reader import RowErrors
from nemo_kto.data.rows.records import DataError, PromptRecord, RowError, prompt_of_row
from nemo_kto.data.rows.row_files import read_rows
from nemo_kto.data.rows.values import read_values
from nemo_kto.utils.files import MAX_LINE_BYTES, open_file, read_lines

MAX_PROMPTS = 1000


def read_prompts(
    path: str | Path, json_columns: Collection[str] | None = None, *, limit: int | None = MAX_PROMPTS
) -> list[PromptRecord]:
    """Read the prompts of a file: a text (.txt) with one prompt per line, or a data file in any form.

    A row has a "prompt", a string or messages, or "messages"; if its last message is one of the assistant, this is an answer
    and left out, as are all other columns. DataError if the file cannot be read, has broken rows, no prompt or more than
    ``limit``.
    """
    broken, prompts = RowErrors(), list[PromptRecord]()
    for record in _lines(Path(path)) if str(path).endswith(".txt") else _rows(path, json_columns, broken):
        prompts.append(record)
        if limit is not None and len(prompts) > limit:
            raise DataError(f"{path} must have at most {limit:,} prompts, got more; leave some out")
    broken.raise_if_any()
    if not prompts:
        raise DataError(f"{path} must have at least one prompt, got an empty file; write one prompt per line")
    return prompts


def _lines(path: Path) -> Iterator[PromptRecord]:
    number = 1
    try:
        with open_file(path) as file:
            for number, line in enumerate(read_lines(file), start=1):
                if len(line) > MAX_LINE_BYTES:
                    got = "got more; write one prompt per line"
                    raise DataError(f"{path}:{number}: a line must have at most {MAX_LINE_BYTES:,} bytes, {got}")
                if text := line.decode("utf-8-sig").strip():
                    yield PromptRecord(prompt=text, line=number)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; correct the path") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number}: must be text in UTF-8, got a byte that is not; save it as UTF-8") from error


def _rows(path: str | Path, json_columns: Collection[str] | None, broken: RowErrors) -> Iterator[PromptRecord]:
    has_cells = find_form(path).kind == "csv"
    for line, row in read_rows(path):
        try:
            if isinstance(row, RowError):
                raise row
            yield prompt_of_row(in_our_form(read_values(row, json_columns, has_cells=has_cells))[0], line)
        except RowError as error:
            broken.add(path, line, str(error))
