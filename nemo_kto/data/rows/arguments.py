"""Rows that are passed to the Python interface, written to files from which the ranks read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_kto.data.rows.forms import argument_file
from nemo_kto.errors import UserError, show
from nemo_kto.utils.files import make_folder, publish_file
from nemo_kto.utils.hashes import file_hash

if TYPE_CHECKING:
    import pyarrow

_BATCH = 1000


class _Tables(NamedTuple):
    schema: pyarrow.Schema  # with the features of the datasets library, such as the names of class labels
    tables: Iterable[pyarrow.Table]


def data_prefix_of(data: Any, folder: Path, name: str = "data") -> object:
    """Return the value of model.data.data_prefix for the argument ``data``, whose rows are written to files in ``folder``.

    A file is named after the argument, for messages, and the hash of its content, so that equal rows are written once.
    """
    if isinstance(data, str | Path):
        return str(data)
    if isinstance(data, Mapping):
        return {key: data_prefix_of(part, folder, f"{name}.{key}") for key, part in data.items()}
    if isinstance(data, list | tuple) and all(isinstance(item, str | Path | int | float) for item in data):
        return list(data)
    make_folder(folder, private=False)
    with publish_file(folder / "rows", private=True) as writing:
        if (found := _tables_of(data, name)) is None:
            with writing.open("wb") as file:
                file.writelines(_lines(_rows_of(data), name))
        else:
            import pyarrow

            with pyarrow.OSFile(str(writing), "wb") as sink, pyarrow.ipc.new_stream(sink, found.schema) as stream:
                for table in found.tables:
                    stream.write_table(table)
        return str(writing.replace(folder / argument_file(name, file_hash(writing))))


def _tables_of(data: Any, name: str) -> _Tables | None:
    """Return the content of a Dataset, a DataFrame or an Arrow table; None for rows that are not of one type by column."""
    if hasattr(data, "with_format"):  # of the datasets library; a transform is applied only to single rows
        is_transformed = getattr(data, "format", {}).get("type") == "custom"
        if data.features is None or is_transformed:
            return None
        schema = data.features.arrow_schema
        return _Tables(schema, (table.cast(schema) for table in data.with_format("arrow").iter(_BATCH)))
    if not (is_pandas := hasattr(data, "iloc")) and not hasattr(data, "__arrow_c_stream__"):
        return None
    import pyarrow

    names = list(map(str, data.columns)) if is_pandas else []
    if twice := [each for each in names if names.count(each) > 1]:
        raise UserError(f"{name} must name each column once, got {show(twice[0])} twice; rename one")
    try:
        table = pyarrow.Table.from_pandas(data, preserve_index=False) if is_pandas else pyarrow.table(data)
    except (pyarrow.ArrowException, ValueError, TypeError):  # texts and messages in one column, for example
        return None
    return _Tables(table.schema, [table])


def _rows_of(data: Any) -> Iterable[object]:
    if hasattr(data, "iloc"):
        return data.to_dict("records")
    if not isinstance(data, Iterable):
        kinds = "a path, a list of mappings, a datasets.Dataset, a DataFrame, or a mapping of splits"
        raise UserError(f"data must be {kinds}, got {show(data)}")
    return data


def _lines(rows: Iterable[object], name: str) -> Iterator[bytes]:
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise UserError(f"{name} must have mappings from column to value as rows, got {show(row)} as row {number}")
        # a missing value of a DataFrame is NaN
        values = {column: None if isinstance(value, float) and value != value else value for column, value in row.items()}
        try:
            yield json.dumps(values, ensure_ascii=False, allow_nan=False, default=_plain).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            reason = "a lone surrogate" if isinstance(error, UnicodeEncodeError) else error
            text = f"must have strings, numbers, lists and mappings as values, got {reason} in row {number}"
            raise UserError(f"{name} {text}; convert or remove it") from error


def _plain(value: Any) -> object:
    if hasattr(value, "tolist"):  # an array or a number of numpy
        return value.tolist()
    if type(value).__name__ in ("NAType", "NaTType"):  # a missing value of pandas
        return None
    raise TypeError(show(value))
