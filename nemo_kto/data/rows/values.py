"""Values in the columns of a row, the same for all forms of data: missing values, and messages that are written as text."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import warnings
from collections.abc import Collection
from itertools import chain
from typing import Any

from nemo_kto.data.rows.records import (
    ANSWERS,
    LABEL_COLUMNS,
    PAIR_KEYS,
    REWARDS,
    TEMPLATE_KEYS,
    WEIGHT,
    DataError,
    Row,
    RowError,
)
from nemo_kto.errors import printable, show

TEXT_COLUMNS = ("prompt", *ANSWERS, *chain(*PAIR_KEYS))  # may be a text, or messages
_NEVER_TEXT = frozenset({"messages", *TEMPLATE_KEYS})
_EMPTY_IS_A_VALUE = frozenset({*TEXT_COLUMNS, *LABEL_COLUMNS})
_OBJECT = re.compile(r"\s*\[?\s*\{")
_MESSAGE_KEYS = (re.compile(r"""["']role["']\s*:\s*["']\w"""), re.compile(r"""["']content["']\s*:"""))
_KEY = "model.data.json_columns"


def check_json_columns(columns: Collection[str] | None) -> None:
    """Raise a DataError unless the columns (``model.data.json_columns``) are such that may contain messages."""
    if wrong := sorted(set(columns or ()) - set(TEXT_COLUMNS)):
        text = f"must list names out of {', '.join(TEXT_COLUMNS)}, got {printable(wrong[0], 60)}"
        raise DataError(f"{text}; for a column of another name, write the name that model.data.fields maps to it")


def without_nulls(value: Any) -> Any:
    """Return a value without null values in its objects: a table has all fields of any row in every row."""
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def read_values(row: Row, json_columns: Collection[str] | None, *, has_cells: bool) -> Row:
    """Return a row without missing values, in which JSON, and the numbers of a csv file, are read from their text.

    Null is missing, and so is an empty text, except in the columns of texts. A row whose only labels are missing has an
    empty label. RowError if a value that must be JSON is not, or if, without ``json_columns``, a text is one of messages.
    """
    empty = {name for name, value in row.items() if value is None or (isinstance(value, str) and not value.strip())}
    empty |= {name for name in LABEL_COLUMNS if name in row and row[name] != row[name]}  # not a number
    missing = {name for name in empty if row[name] is None or name not in _EMPTY_IS_A_VALUE}
    missing |= {*chain(*(keys for keys in PAIR_KEYS if empty.issuperset(keys))), *empty.intersection(LABEL_COLUMNS)}
    values = {name: value for name, value in row.items() if name not in missing}
    if not values.keys() & set(LABEL_COLUMNS):
        values |= dict.fromkeys(empty.intersection(LABEL_COLUMNS[:1]) or empty.intersection(LABEL_COLUMNS), "")
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    if json_columns is None and (wrong := [name for name in TEXT_COLUMNS if _is_of_messages(texts.get(name, ""))]):
        remedy = f"read it with '{_KEY}=[{','.join(wrong)}]', or keep it as text with '{_KEY}=[]'"
        raise RowError(f'"{wrong[0]}" must be a text or a list of messages, got a list of messages as text; {remedy}')
    for name in texts.keys() & _NEVER_TEXT.union(json_columns or ()):
        values[name] = _parsed(name, texts[name])
    for name in texts.keys() & {WEIGHT, *REWARDS} if has_cells else ():
        with contextlib.suppress(ValueError):  # reported as no number
            values[name] = float(texts[name])
    return values


def _is_of_messages(text: str) -> bool:
    return _OBJECT.match(text) is not None and all(key.search(text) for key in _MESSAGE_KEYS)


def _parsed(name: str, text: str) -> object:
    """Return the value of a text in JSON, or in the notation in which Python and pandas write lists into a csv file."""
    value: object = None
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
    if value is None and _OBJECT.match(text):
        with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes
            value = ast.literal_eval(text.strip())
    try:
        if value is None:
            raise ValueError("it is not JSON")
        json.dumps(value, ensure_ascii=False).encode()  # an escape may have been a lone surrogate
    except (ValueError, TypeError, RecursionError) as error:
        reason = "a lone surrogate" if isinstance(error, UnicodeEncodeError) else f"a string that is not: {show(text)}"
        raise RowError(f'"{name}" must be a list or an object in JSON, got {reason}; write it with json.dumps') from error
    return without_nulls(value)
