"""Values of columns: what is missing, empty, text or messages is the same in every form, also of the Python interface."""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow
import pytest
from hypothesis import example, settings
from hypothesis import given as drawn
from hypothesis import strategies as st
from pyarrow import parquet

from nemo_kto.data.rows.data_sources import data_prefix_of
from nemo_kto.data.rows.reader import Fields
from nemo_kto.data.rows.records import DataError, KTORecord
from nemo_kto.data.rows.row_files import read_rows
from nemo_kto.errors import UserError
from tests.helpers.messages import Message, raises
from tests.unit.data.tiny_data import read_file, write_rows

ASK, ANSWER = {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "Rain."}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"city": "Oslo"}}}]}
TOOLS = [
    {"function": {"name": "f", "parameters": {"city": {"type": "string"}}}},
    {"function": {"name": "g", "parameters": {"day": {"enum": ["a", "b"]}}}},
]
CHATS: list[dict[str, Any]] = [
    {"messages": [ASK, CALL, {"role": "tool", "name": "f", "content": "rain"}, ANSWER], "tools": TOOLS, "label": True},
    {"messages": [ASK, ANSWER], "tools": TOOLS[:1], "label": False},
]


def read(path: object, **fields: Any) -> list[KTORecord]:
    records, _, broken = read_file(Path(str(path)), Fields(**{"drop": (), **fields}))
    broken.raise_if_any()
    return records


def write_csv(path: Path, rows: Sequence[dict], encoding: str = "utf-8", quoting: int = csv.QUOTE_MINIMAL) -> Path:
    pd.DataFrame(rows).to_csv(path, index=False, encoding=encoding, quoting=quoting)
    return path


def by_column(rows: Sequence[dict]) -> dict[str, list]:
    return {name: [row.get(name) for row in rows] for each in rows for name in each}


def write_parquet(path: Path, rows: Sequence[dict]) -> Path:
    parquet.write_table(pyarrow.table(by_column(rows)), path)
    return path


def all_forms(rows: Sequence[dict], folder: Path) -> dict[str, object]:
    """The rows as files, and as arguments of the Python interface."""
    data = datasets.Dataset.from_dict(by_column(rows))
    data.to_json(folder / "dataset.jsonl")
    arguments = {"list": rows, "frame": pd.DataFrame(rows), "dataset": data, "stream": data.to_iterable_dataset()}
    files = {"jsonl": write_rows(folder / "a.jsonl", rows), "parquet": write_parquet(folder / "a.parquet", rows)}
    written = {name: data_prefix_of(value, folder / "rows") for name, value in arguments.items()}
    return {**files, "to_json": folder / "dataset.jsonl", **written}


def test_nulls_of_nested_structures_are_dropped_in_every_form(tmp_path: Path) -> None:
    forms = all_forms(CHATS, tmp_path)
    nulls = [{**CHATS[0], "tools": json.dumps([{**TOOLS[0], "strict": None}, TOOLS[1]])}, CHATS[1]]
    forms["tools as text"] = write_rows(tmp_path / "text.jsonl", nulls)
    expected = [([ASK, CALL, CHATS[0]["messages"][2]], TOOLS), ([ASK], TOOLS[:1])]
    for form, path in forms.items():
        assert [(record.prompt, record.template["tools"]) for record in read(path)] == expected, form


# Strings are letters alone: a string that is itself JSON, such as "3", is another value in a Json column of datasets.
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.text("abcé\u2028", min_size=1, max_size=4).filter("null".__ne__),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=5,
)
ARGUMENTS = st.lists(st.dictionaries(st.sampled_from(["city", "days"]), VALUES, min_size=1), min_size=2, max_size=3)


@settings(deadline=None, max_examples=25)
@example([{"city": "Oslo", "days": 2}, {"days": "two", "city": ["x", 1]}])
@example([{"city": {"type": "integer", "default": 3}}, {"city": {"type": ["string", "null"]}}])
@drawn(ARGUMENTS)
def test_json_columns_of_datasets_are_those_of_jsonl(arguments: list[dict]) -> None:
    """The library stores values that differ in type as JSON; the text of that JSON is not the value."""
    rows = [
        {
            "prompt": [ASK],
            "response": [{**CALL, "tool_calls": [{"function": {"name": "f", "arguments": each}}]}],
            "label": True,
        }
        for each in arguments
    ]
    text, whole = datasets.Value("string"), datasets.Json()
    message = {"role": text, "content": text}
    called = {"role": text, "tool_calls": datasets.List({"function": {"name": text, "arguments": whole}})}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        expected = [row for _, row in read_rows(write_rows(folder / "a.jsonl", rows))]
        for name, prompt, response in (("nested", datasets.List(message), datasets.List(called)), ("columns", whole, whole)):
            features = datasets.Features(prompt=prompt, response=response, label=datasets.Value("bool"))
            data = datasets.Dataset.from_list(rows, features=features)
            data.to_parquet(folder / f"{name}.parquet")
            data.save_to_disk(folder / name)
            passed = Path(str(data_prefix_of(data, folder / "rows")))
            for form in (folder / f"{name}.parquet", *(folder / name).glob("*.arrow"), passed):
                assert [row for _, row in read_rows(form)] == expected, form.name


def test_a_lone_surrogate_in_a_json_column_is_refused(tmp_path: Path) -> None:
    column = pyarrow.array(['"fine"', '"\\ud800"'], pyarrow.json_())
    parquet.write_table(
        pyarrow.table({"prompt": ["a", "b"], "response": column, "label": [True, False]}), tmp_path / "a.parquet"
    )
    (_, first), (number, error) = read_rows(tmp_path / "a.parquet")
    assert first == {"prompt": "a", "response": "fine", "label": True}
    assert number == 2
    assert "surrogates not allowed" in str(error)


@pytest.mark.parametrize("names", [["undesirable", "desirable"], ["desirable", "undesirable"]])
def test_class_labels_keep_their_names(names: list[str], tmp_path: Path) -> None:
    features = datasets.Features(
        prompt=datasets.Value("string"), response=datasets.Value("string"), label=datasets.ClassLabel(names=names)
    )
    rows = [{"prompt": "p", "response": str(n), "label": n} for n in (0, 1, 1)]
    data = datasets.Dataset.from_list(rows, features=features)
    for given in (data, data.to_iterable_dataset(), data.select([0, 1, 2]), data.with_format("numpy")):
        found = [record.desirable for record in read(data_prefix_of(given, tmp_path))]
        assert found == [names[number] == "desirable" for number in (0, 1, 1)]
    unlabelled = datasets.Dataset.from_list([{**rows[0], "label": -1}], features=features)
    with raises(DataError, "data row 1", "label", '"" (1 row)'):
        read(data_prefix_of(unlabelled, tmp_path))


ROW = {"prompt": "p", "response": "r", "label": 1}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"response": ""}, ("p", "", True)),
        ({"label": None}, Message("row 2", "label", '"" (1 row)')),
        ({"label": None, "preference": "rejected"}, ("p", "r", False)),
        ({"response": None}, Message("row 2", "response", "completion")),
        ({"response": None, "completion": "c"}, ("p", "c", True)),
        ({"weight": None, "chosen": None, "rejected": None, "system": None}, ("p", "r", True)),
    ],
)
def test_missing_and_empty_values_are_alike_in_every_form(change: dict, expected: object, tmp_path: Path) -> None:
    other = {"weight": 1.0, "unused": "x", **({"preference": None} if "preference" in change else {})}
    rows = [{**ROW, "response": "r", **other}, {**ROW, **change}]
    for form, path in all_forms(rows, tmp_path).items():
        if isinstance(expected, tuple):
            record = read(path)[1]
            assert (record.prompt, record.response, record.desirable) == expected, form
        else:
            with pytest.raises(DataError) as error:
                read(path)
            assert str(error.value).replace(".jsonl:", " row ") == expected, form


def test_a_frame_with_other_values_than_json(tmp_path: Path) -> None:
    """Times, missing values of pandas and categories; and texts beside messages, which no column of Arrow can contain."""
    frame = pd.DataFrame([ROW, ROW])
    frame["time"], frame["flag"] = pd.Timestamp("2026-01-01"), pd.array([True, pd.NA], dtype="boolean")
    frame["label"] = pd.Categorical(["up", "down"])
    assert [record.desirable for record in read(data_prefix_of(frame, tmp_path))] == [True, False]
    mixed = pd.DataFrame([ROW, {**ROW, "prompt": [ASK], "flag": pd.NA}])
    assert [record.prompt for record in read(data_prefix_of(mixed, tmp_path))] == ["p", [ASK]]
    with raises(UserError, "data.train", "response", "twice"):
        data_prefix_of(
            {"train": frame.set_axis(["prompt", "response", "response", *"abc"[: frame.shape[1] - 3]], axis=1)}, tmp_path
        )


def test_messages_name_the_row_that_was_passed(tmp_path: Path) -> None:
    wrong = [ROW, {**ROW, "weight": -1.0}]
    for data in (wrong, pd.DataFrame(wrong), datasets.Dataset.from_dict(by_column(wrong))):
        path = data_prefix_of({"train": data}, tmp_path)["train"]  # type: ignore[index]
        with raises(DataError, "data.train row 2: ", "weight", "-1.0"):
            read(path)
    with raises(UserError, "data", "lone surrogate", "row 2"):
        data_prefix_of([ROW, {**ROW, "prompt": "\ud800"}], tmp_path)
    with raises(UserError, "data", "lone surrogate", "row 2"):
        data_prefix_of(pd.DataFrame([ROW, {**ROW, "prompt": "\ud800"}], dtype=object), tmp_path)


@pytest.mark.parametrize("write", [str, json.dumps], ids=["python", "json"])
@pytest.mark.parametrize("columns", [["prompt"], ["prompt", "response"]])
def test_messages_as_text_need_the_setting(write: Any, columns: list[str], tmp_path: Path) -> None:
    values = {"prompt": [ASK], "response": [ANSWER]}
    rows = [{**ROW, **{name: write(values[name]) for name in columns}}]
    forms = {**all_forms(rows, tmp_path), "csv": write_csv(tmp_path / "a.csv", rows)}
    setting = f"model.data.json_columns=[{','.join(columns)}]"
    for form, path in forms.items():
        with raises(DataError, "1", "prompt", f"'{setting}'", "model.data.json_columns=[]"):
            read(path)
        (record,) = read(path, json_columns=columns)
        assert (record.prompt, record.response) == (
            [ASK],
            [{"role": "assistant", "content": "r"}] if len(columns) == 1 else [ANSWER],
        ), form
        (record,) = read(path, json_columns=[])
        assert record.prompt == rows[0]["prompt"], form


def test_other_json_is_text(tmp_path: Path) -> None:
    """Text that looks like JSON stays as written, unless its column is said to hold JSON."""
    texts = ['{"city": "Oslo"}', '[{"role": "admin", "name": "Bo"}]', "[1, 2]", '"x"', "{'a': 1}", "[{"]
    rows = [{**ROW, "response": text} for text in texts]
    for form, path in {**all_forms(rows, tmp_path), "csv": write_csv(tmp_path / "a.csv", rows)}.items():
        assert [record.response for record in read(path)] == texts, form
    with raises(DataError, "a.csv:7", "response", "JSON", "'[{'", "json.dumps"):
        read(tmp_path / "a.csv", json_columns=["response"])


def test_columns_that_are_never_text_are_read_in_either_notation(tmp_path: Path) -> None:
    notations: list[Callable[[object], str]] = [str, json.dumps]
    rows = [
        {**row, "messages": write(row["messages"]), "tools": write(row["tools"])}
        for row, write in zip(CHATS, notations, strict=True)
    ]
    found = read(write_csv(tmp_path / "a.csv", rows))
    assert [record.template["tools"] for record in found] == [TOOLS, TOOLS[:1]]
    surrogate = {**rows[1], "messages": rows[1]["messages"].replace("Rain", "\\ud800")}
    with raises(DataError, "b.csv:2", "messages", "lone surrogate"):
        read(write_csv(tmp_path / "b.csv", [surrogate]))


def test_a_mark_before_a_quoted_header(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", [ROW], encoding="utf-8-sig", quoting=csv.QUOTE_ALL)
    assert [record.prompt for record in read(path)] == ["p"]
