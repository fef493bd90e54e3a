"""Columns of a row: renamed, counted, or refused because they would be lost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.data.rows.reader import Fields, FileColumns
from nemo_kto.data.rows.records import DataError, DPORecord
from nemo_kto.errors import error_of
from tests.helpers.messages import Message
from tests.unit.data.tiny_data import read_file, write_rows

USER = {"role": "user", "content": "What is the capital of France?"}
PARIS, LYON = "The capital of France is Paris.", "The capital of France is Lyon."
QUESTION = "What is the capital of France?"


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def read(
    tmp_path: Path, *rows: dict, fields: dict[str, str] | None = None, pairs: bool = False
) -> tuple[list[Any], FileColumns, str]:
    """Records and columns of a file, and the errors of its rows."""
    path = write_rows(tmp_path / "rows.jsonl", rows)
    records, columns, broken = read_file(path, Fields(columns=fields or {}), as_pairs=pairs)
    return records, columns, (error_of(broken.raise_if_any) or "").replace(f"{path}:", "")


@pytest.mark.parametrize("pairs", [False, True])
def test_a_prompt_is_never_dropped_from_a_pair(tmp_path: Path, pairs: bool) -> None:
    row = {"question": QUESTION, "chosen": PARIS, "rejected": LYON}
    records, _, wrong = read(tmp_path, *[row] * 3, pairs=pairs)
    assert records == []
    assert wrong == Message("3", "1", "question", "prompt", "fields=prompt:question", "2", "line 3")


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            {"instruction": "Translate.", "input": "chat", "chosen": "a cat", "rejected": "a dog"},
            Message("instruction", "prompt", "input"),
        ),
        (
            {
                "Question": QUESTION,
                "chosen": [USER, assistant("a")],
                "rejected": [USER, assistant("b")],
                "context": "Europe",
            },
            Message("context", "prompt", "Question"),
        ),
        (
            {"system": "Be brief.", "chosen": [USER, assistant("a")], "rejected": [USER, assistant("b")]},
            Message("system", "prompt"),
        ),
        (
            {"messages": [USER], "chosen": PARIS, "rejected": LYON},
            Message("messages", "prompt", "fields=prompt:messages"),
        ),
        (
            {"prompt": "", "question": QUESTION, "chosen": "a", "rejected": "b"},
            Message("question", "prompt", "fields=prompt:question"),
        ),
        (
            {"question": QUESTION, "answer": PARIS, "label": True},
            Message(
                "prompt",
                "response",
                "completion",
                "messages",
                "chosen",
                "rejected",
                "keys",
                "answer",
                "label",
                "question",
                "fields=prompt:question,response:answer",
            ),
        ),
        (
            {"question": QUESTION, "chosen": assistant(PARIS), "rejected": assistant(LYON)},
            Message("chosen", "fields=prompt:question"),
        ),
        (
            {"prompt": QUESTION, "system": "Be brief.", "response": PARIS, "label": True},
            Message("system", "prompt", "list", "role", "content", "first"),
        ),
        ({"messages": [USER, assistant("a")], "history": [["hi", "hello"]], "label": True}, Message("history", "prompt")),
        (
            {"prompt": QUESTION, "images": ["a.png"], "response": PARIS, "label": True},
            Message("images", "supported", "leave"),
        ),
    ],
)
def test_a_row_whose_prompt_would_lose_text_is_refused(tmp_path: Path, row: dict, text: str) -> None:
    _, _, wrong = read(tmp_path, row)
    assert wrong == text


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": QUESTION, "question": "What?", "response": PARIS, "label": True},
        {"prompt": QUESTION, "system": "", "images": [], "context": None, "response": PARIS, "label": True},
        {"prompt": f"Be brief. {QUESTION}", "system": " Be brief. ", "response": PARIS, "label": True},
        {"question": QUESTION, "chosen": [USER, assistant("a")], "rejected": [USER, assistant("b")]},
        {"messages": [USER, assistant("a")], "chosen": [USER, assistant("a")], "rejected": [USER, assistant("b")]},
        {
            "system": "Be brief.",
            "prompt": [{"role": "system", "content": "Be brief."}, USER],
            "response": "a",
            "label": True,
        },
    ],
)
def test_columns_that_repeat_the_prompt_or_are_empty_are_accepted(tmp_path: Path, row: dict) -> None:
    records, _, wrong = read(tmp_path, row)
    assert wrong == ""
    assert len(records) >= 1


def test_a_renamed_column_has_priority(tmp_path: Path) -> None:
    row = {"question": QUESTION, "prompt": "other", "good": PARIS, "bad": LYON}
    fields = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    records, columns, wrong = read(tmp_path, row, fields=fields, pairs=True)
    assert wrong == ""
    (record,) = records
    assert isinstance(record, DPORecord)
    assert (record.prompt, record.chosen, record.rejected) == (QUESTION, PARIS, LYON)
    assert columns.unused == {"prompt": 1}


def test_a_file_without_a_renamed_column_is_read_unchanged(tmp_path: Path) -> None:
    records, _, wrong = read(tmp_path, {"prompt": "p", "response": "r", "label": False}, fields={"prompt": "question"})
    assert wrong == ""
    assert [record.prompt for record in records] == ["p"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"promt": "question"}, Message("promt", "prompt", "mean")),
        ({"question": "prompt"}, Message("question", "{prompt:question}")),
        ({"xyz": "question"}, Message("xyz", "{OURS:COLUMN}")),
        ({"prompt": "q", "response": "q"}, Message("q", "leave")),
    ],
)
def test_invalid_fields(fields: dict[str, str], text: str) -> None:
    with pytest.raises(DataError) as error:
        Fields(columns=fields)
    assert str(error.value) == text


def test_unused_columns_are_counted_per_row_format(tmp_path: Path) -> None:
    row = {"prompt": "p", "response": "r", "label": True, "id": 1, "source": "web"}
    pair = {"prompt": "p", "chosen": "a", "rejected": "b", "chosen_reward": 1, "rejected_reward": 0, "id": 3}
    _, columns, _ = read(tmp_path, row, row, pair)
    assert columns.rows == 3
    assert columns.found == {
        "prompt": 3,
        "response": 2,
        "label": 2,
        "id": 3,
        "source": 2,
        "chosen": 1,
        "rejected": 1,
        "chosen_reward": 1,
        "rejected_reward": 1,
    }
    assert columns.unused == {"id": 3, "source": 2, "chosen_reward": 1, "rejected_reward": 1}
    assert columns.unused_text() == "id (3 rows), source (2 rows), chosen_reward, rejected_reward (1 row)"
    _, columns, _ = read(tmp_path, pair, pairs=True)
    assert columns.unused == {"id": 1}
    _, columns, _ = read(tmp_path, {**row, "source": {"labeller": "person"}})  # of nemo-kto label
    assert columns.unused == {"id": 1}
    _, columns, _ = read(tmp_path, {"messages": [USER, assistant("a")], "prompt": QUESTION, "label": True})
    assert columns.unused_text() == "prompt (1 row)"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tools": 3}, Message("tools", "list", "JSON", "string", "3")),
        ({"tools": ["f"]}, Message("string", "JSON", "['f']")),
        ({"tools": "{"}, Message("tools", "list", "JSON", "string")),
        ({"chat_template_kwargs": "x"}, Message("chat_template_kwargs", "object", "x")),
        ({"chat_template_kwargs": {"tokenize": True}}, Message("chat_template_kwargs", "template", "tokenize", "remove")),
    ],
)
def test_invalid_chat_template_arguments(tmp_path: Path, given: dict, text: str) -> None:
    _, _, wrong = read(tmp_path, {"messages": [USER, assistant("a")], "label": True, **given})
    assert wrong == text


def test_plain_strings_cannot_have_tools(tmp_path: Path) -> None:
    row = {"prompt": "p", "chosen": "a", "rejected": "b"}
    additions: tuple[dict[str, Any], ...] = ({"tools": [{}]}, {"chat_template_kwargs": {"x": 1}})
    for given in additions:
        (name,) = given
        for pairs in (False, True):
            _, _, wrong = read(tmp_path, row | given, pairs=pairs)
            assert wrong == Message(name, "template", "prompt", "list")
    assert read(tmp_path, row | {"tools": [], "chat_template_kwargs": None})[2] == ""


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(
    "row",
    [
        {"question": QUESTION, "answer": PARIS, "thumb": "up"},
        {"user_question": QUESTION, "bot_answer": PARIS, "customer_rating": "good"},
        {"query": QUESTION, "output": PARIS, "is_good": 1},
        {"conversations": [USER, assistant(PARIS)], "feedback": True},
        {"input": QUESTION, "preferred": PARIS, "dispreferred": LYON},
        {"instruction": QUESTION, "winner": PARIS, "loser": LYON},
        {"prompt": QUESTION, "response": PARIS, "helpfulness": 1},
        {"messages": [USER, assistant(PARIS)], "liked": True},
        {"messages": [USER, assistant(PARIS)], "chosen": PARIS},
        {"messages": [USER], "chosen": PARIS, "rejected": LYON},
    ],
    ids=lambda row: ",".join(row),
)
def test_the_mapping_that_an_error_prints_reads_the_row(tmp_path: Path, row: dict, pairs: bool) -> None:
    """None is printed that changes nothing, and no error leads back to itself."""
    _, _, wrong = read(tmp_path, row, pairs=pairs)
    if (found := re.search(r"'fields=(.*)'", wrong)) is None:
        assert "chosen" in wrong, "a labelled answer is no pair, and a pair without one side has no remedy but this side"
        return
    fields = dict(each.split(":") for each in found[1].split(","))
    assert all(name != column for name, column in fields.items())
    records, _, left = read(tmp_path, row, fields=fields, pairs=pairs)
    is_pair = {"chosen", "rejected"} <= {*row, *fields}
    assert (bool(records), left == "") == ((True, True) if is_pair or not pairs else (False, False))
    assert "model.data.fields" not in left
