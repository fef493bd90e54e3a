"""Labels: common values, values of one's own, and errors that count every value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.data.rows.labels import Labels, label_text
from nemo_kto.data.rows.reader import Fields, FileColumns, FileReader, RowErrors
from nemo_kto.data.rows.records import DataError
from nemo_kto.errors import UserError
from tests.helpers.messages import Message, raises
from tests.unit.data.tiny_data import write_rows


def read(path: Path, values: list[Any], fields: Fields | None = None, column: str = "label") -> tuple[list[bool], str, str]:
    """Whether each row is desirable, which value is taken for which, and the error."""
    write_rows(path, [{"prompt": "p", "response": "r", column: value} for value in values])
    fields, broken, columns = fields or Fields(drop=()), RowErrors(), FileColumns()
    records = list(FileReader(fields=fields, broken=broken).kto_records(path, columns))
    columns.add_label_errors(path, fields.labels, broken)
    error = ""
    try:
        broken.raise_if_any()
    except DataError as caught:
        error = str(caught)
    return [record.desirable for record in records], fields.labels.text(columns.labels), error


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("true", "false"),
        ("up", "down"),
        ("good", "bad"),
        ("like", "dislike"),
        ("chosen", "rejected"),
        ("desirable", "undesirable"),
        (True, False),
        (1, 0),
        (1, -1),
        (1.0, 0.0),
        ("+1", "-1"),
        (" Yes ", "NO"),
        ("Thumbs up", "thumbs-down"),
        ("1.0", "0"),
        ("THUMBS_UP", "Thumbs Down"),
    ],
)
def test_common_values(good: object, bad: object, tmp_path: Path) -> None:
    found, text, error = read(tmp_path / "rows.jsonl", [good, bad, good])
    assert (found, error) == ([True, False, True], "")
    assert text == f"label: {label_text(good)} is desirable; {label_text(bad)} is undesirable"
    assert read(tmp_path / "rows.jsonl", [good, bad], column="preference")[0] == [True, False]


@pytest.mark.parametrize(
    ("values", "total", "line", "got"),
    [
        ([1, 0, 0.5, 1, 1], 1, 3, "1 (3 rows), 0 (1 row), 0.5 (1 row)"),
        ([1, 0, -1, 1], 1, 3, "1 (2 rows), -1 (1 row), 0 (1 row)"),  # a third value
        (["up", "down", "yes", "up"], 1, 3, "up (2 rows), down (1 row), yes (1 row)"),
        (["up", "down", True, 1, 0, "up"], 3, 3, "up (2 rows), 0 (1 row), 1 (1 row), down (1 row), true (1 row)"),
        (["A", "B", "A"], 3, 1, "a (2 rows), b (1 row)"),
        ([None, "", " ", "good"], 3, 1, '"" (3 rows), good (1 row)'),
    ],
)
def test_values_that_do_not_fit_are_counted(values: list, total: int, line: int, got: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    _, _, error = read(path, values)
    first, fault = error.splitlines()
    assert first == f"{total} broken row{'s' * (total > 1)}:"
    assert fault.startswith(f"  {path}:{line}: ")
    remedy = "model.data.drop=[unlabelled]" if None in values else "model.data.labels"
    assert fault == Message(f"got {got}", "label", "true and false", remedy)


def test_values_of_the_setting(tmp_path: Path) -> None:
    fields = Fields(labels=Labels.of({"desirable": [4, 5.0], "undesirable": ["1", "2", True]}))
    found, text, error = read(tmp_path / "rows.jsonl", [4, "5", 1, 2, "true"], fields)
    assert (found, error) == ([True, True, False, False, False], "")
    assert text == "label: 4, 5 is desirable; 1, 2, true is undesirable"
    assert Labels.parse("{desirable:[4,5],undesirable:[1, '2',\"true\"]}") == fields.labels
    _, _, error = read(tmp_path / "rows.jsonl", [4, 3, 1], fields)
    assert error == Message("rows.jsonl:2:", "4, 5, 1, 2, true (model.data.labels)", "3 (1 row)")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"desirable": [1]}, ["both classes", "undesirable"]),
        ({"desirable": [1, 2], "undesirable": ["2"]}, ["one class", "2"]),
        ({"good": [1], "undesirable": [2]}, ["good", "{desirable:[up],undesirable:[down]}"]),
    ],
)
def test_invalid_settings(values: dict, words: list[str]) -> None:
    with raises(UserError, *words):
        Labels.of(values)


@pytest.mark.parametrize(
    ("row", "setting"),
    [
        ({"question": "q", "answer": "a", "thumb": "up"}, "prompt:question,response:answer,label:thumb"),
        ({"prompt": "q", "response": "a", "rating": 4, "liked": True}, "label:liked"),
        ({"prompt": "q", "output": "a", "label": 1}, "response:output"),
        ({"query": "q", "winner": "a", "loser": "b"}, "prompt:query,chosen:winner,rejected:loser"),
    ],
)
def test_unknown_columns_are_suggested_in_one_setting(row: dict, setting: str, tmp_path: Path) -> None:
    write_rows(path := tmp_path / "rows.jsonl", [row])
    broken = RowErrors()
    assert list(FileReader(fields=Fields(), broken=broken).kto_records(path, FileColumns())) == []
    with raises(DataError, f"'fields={setting}'", json.dumps(path.name).strip('"')):
        broken.raise_if_any()
    fields = dict(pair.split(":") for pair in setting.split(","))
    broken = RowErrors()
    columns = FileColumns()
    assert (
        len([*FileReader(fields=Fields(columns=fields), broken=broken).kto_records(path, columns)]) + len(columns.labels) > 0
    )
    assert broken.total == 0


def test_values_that_are_no_label_are_left_out_by_name(tmp_path: Path) -> None:
    """The remedy of the error about them is executed."""
    file = tmp_path / "rows.jsonl"
    *_, error = read(file, ["👍", "👎🏽", "n/a", "skip it", "👍️"])
    setting = '{desirable:[👍],undesirable:[👎],unlabelled:["n/a",skip_it]}'.replace("👍", '"👍"').replace("👎", '"👎"')
    assert f"set 'model.data.labels={setting}'" in error
    fields = Fields(labels=Labels.parse(setting))
    found, _, error = read(file, ["👍", "👎🏽", "n/a", "skip it", "👍️"], fields)
    assert (found, error) == ([True, False, True], "")
    with pytest.raises(UserError, match="got n/a in two"):
        Labels.of({"desirable": ["up"], "undesirable": ["n/a"], "unlabelled": ["n/a"]})
