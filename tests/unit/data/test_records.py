"""Every row format, and errors of rows in no known format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_kto.data.rows.reader import Fields, FileColumns, FileReader, RowErrors
from nemo_kto.data.rows.records import DataError, KTORecord, RowError, records_of_row
from tests.helpers.messages import raises
from tests.unit.data.tiny_data import read_file

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be brief"}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def triples(row: dict) -> list[tuple]:
    return [(record.prompt, record.response, record.desirable) for record in records_of_row(row, line=1)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "p", "response": "r", "preference": "chosen"}, [("p", "r", True)]),
        ({"prompt": "p", "response": "r", "preference": "rejected"}, [("p", "r", False)]),
        ({"prompt": "p", "completion": "r", "label": True}, [("p", "r", True)]),
        ({"prompt": "p", "completion": "r", "label": False, "source": "x"}, [("p", "r", False)]),
        ({"messages": [SYSTEM, USER, assistant("r")], "label": False}, [([SYSTEM, USER], [assistant("r")], False)]),
        ({"prompt": [USER], "completion": [assistant("r")], "label": True}, [([USER], [assistant("r")], True)]),
        ({"prompt": [USER], "completion": "r", "label": True}, [([USER], [assistant("r")], True)]),
        ({"prompt": "hi", "completion": [assistant("r")], "label": True}, [([USER], [assistant("r")], True)]),
        ({"prompt": [USER], "completion": [USER, assistant("r")], "label": True}, [([USER], [assistant("r")], True)]),
        # one message in the place of a list of one
        ({"prompt": [USER], "completion": assistant("r"), "label": True}, [([USER], [assistant("r")], True)]),
        ({"prompt": USER, "completion": assistant("r"), "label": True}, [([USER], [assistant("r")], True)]),
        ({"prompt": "hi", "completion": assistant("r"), "label": True}, [([USER], [assistant("r")], True)]),
    ],
)
def test_single_forms(row: dict, expected: list) -> None:
    assert triples(row) == expected


@pytest.mark.parametrize(
    ("row", "prompt", "good", "bad"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, "p", "a", "b"),
        ({"prompt": "p", "chosen_response": "a", "rejected_response": "b"}, "p", "a", "b"),
        (
            {"prompt": [USER], "chosen": [assistant("a")], "rejected": [assistant("b")]},
            [USER],
            [assistant("a")],
            [assistant("b")],
        ),
        ({"prompt": [USER], "chosen": [USER, assistant("a")], "rejected": "b"}, [USER], [assistant("a")], [assistant("b")]),
        ({"prompt": USER, "chosen": assistant("a"), "rejected": assistant("b")}, [USER], [assistant("a")], [assistant("b")]),
        # the form of UltraFeedback: the prompt as a text and again in both conversations
        (
            {"prompt": "hi", "chosen": [USER, assistant("a")], "rejected": [USER, assistant("b")]},
            [USER],
            [assistant("a")],
            [assistant("b")],
        ),
        ({"chosen": [USER, assistant("a")], "rejected": [USER, assistant("b")]}, [USER], [assistant("a")], [assistant("b")]),
        ({"chosen": "say it: yes", "rejected": "say it: no"}, "say it:", " yes", " no"),
        ({"chosen": "say it: yes", "rejected": "say it: yesterday"}, "say it:", " yes", " yesterday"),
        # the form of HH: answers that begin alike still begin after the mark
        (
            {"chosen": "\n\nHuman: hi\n\nAssistant: I can", "rejected": "\n\nHuman: hi\n\nAssistant: I cannot"},
            "\n\nHuman: hi\n\nAssistant:",
            " I can",
            " I cannot",
        ),
    ],
)
def test_pairs_become_two_records(row: dict, prompt: object, good: object, bad: object) -> None:
    assert triples(row) == [(prompt, good, True), (prompt, bad, False)]


def test_messages_of_sharegpt() -> None:
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    (record,) = records_of_row({"messages": turns, "label": True}, 1)
    assert record.prompt == [{"role": "system", "content": "s"}, USER | {"content": "q"}]
    assert record.response == [assistant("a")]


def called(arguments: object) -> dict:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
    }


@pytest.mark.parametrize(
    ("text", "value"), [('{"city": "Oslo", "days": 2}', {"city": "Oslo", "days": 2}), ("", {}), ("{}", {})]
)
def test_arguments_of_tool_calls_may_be_json(text: str, value: dict) -> None:
    """OpenAI's form; beside the other fields of a call, too, as Mistral's templates read it."""
    flat = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": text}]}
    (record,) = records_of_row(
        {"prompt": [USER, called(text), {"role": "tool", "content": "-"}], "response": [flat], "label": 1}, 1
    )
    assert record.prompt[1] == called(value)
    assert record.response == [{**flat, "tool_calls": [{"name": "f", "arguments": value}]}]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "p", "response": "r", "preference": "Maybe"}, ['"preference"', "'Maybe'"]),
        ({"prompt": "p", "response": "r", "preference": ["chosen"]}, ['"preference"', "['chosen']"]),
        ({"prompt": "p", "completion": "r", "label": 2}, ["label", "2"]),
        ({"prompt": "p", "completion": "r", "label": "maybe"}, ["label", "'maybe'"]),
        ({"prompt": "p", "completion": "r"}, ['"preference"', '"label"', "['completion', 'prompt']"]),
        ({"prompt": "p", "completion": "r", "label": True, "preference": "chosen"}, ["label", "preference"]),
        ({"prompt": "p", "label": True}, ["response", "completion", "['label', 'prompt']"]),
        ({"prompt": 3, "response": "r", "preference": "chosen"}, ["prompt", "string", "3"]),
        ({"prompt": "p", "response": None, "preference": "chosen"}, ["response", "string", "None"]),
        ({"prompt": [], "response": "r", "preference": "chosen"}, ['"prompt"', "empty", "[]"]),
        ({"messages": [assistant("r")], "label": True}, ["messages", "answer"]),
        ({"messages": [assistant("r"), USER], "label": True}, ['role "assistant"', "['user']"]),
        (
            {"messages": [{"from": "critic", "value": "x"}, assistant("r")], "label": True},
            ["from", "human", "gpt", "critic", "role"],
        ),
        ({"messages": [{"from": "human"}, assistant("r")], "label": True}, ["content", "None"]),
        ({"messages": [{"role": "user", "content": 1}, assistant("r")], "label": True}, ['"content"', "1"]),
        (
            {"prompt": [USER], "completion": [assistant("a"), assistant("b")], "label": True},
            ["completion", "'assistant', 'assistant'"],
        ),
        ({"prompt": "other", "chosen": [USER, assistant("a")], "rejected": [USER, assistant("b")]}, ["prompt", "other"]),
        ({"prompt": "p", "chosen": "a"}, ["chosen", "rejected"]),
        ({"chosen": "yes", "rejected": "no"}, ["prompt", "yes"]),
        ({"chosen": "same text", "rejected": "same text"}, ["prompt"]),
        ({"chosen": [USER, assistant("a")], "rejected": [SYSTEM, assistant("b")]}, ["prompt"]),
        *(
            ({"messages": [USER, called(text)], "label": True}, ['"arguments"', '"messages"', text, "object"])
            for text in ("{'city': 1}", "[1]", "3")
        ),
    ],
)
def test_a_broken_row_names_key_value_and_remedy(row: dict, words: list[str]) -> None:
    with raises(RowError, *words):
        records_of_row(row, line=1)


def read(path: Path) -> list[KTORecord]:
    records, _, broken = read_file(path, Fields())
    broken.raise_if_any()
    return records


def test_the_first_row_of_each_error_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "p", "response": "r", "preference": "chosen"} | ({"weight": 0} if i % 2 else {}) for i in range(46)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with raises(DataError, "23", f"{path}:2", "weight", "number", "fp32", "remove", "22", "line 46"):
        read(path)


def test_errors_that_come_in_any_order_name_the_first_row() -> None:
    broken = RowErrors()
    for line in (3, 1, 2):
        broken.add("rows.jsonl", line, "wrong")
    with raises(DataError, "3", "rows.jsonl:1", "wrong", "2", "line 3"):
        broken.raise_if_any()


def test_broken_rows_of_several_files_are_reported_together(tmp_path: Path) -> None:
    broken = RowErrors()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("5\n", encoding="utf-8")
        assert list(FileReader(fields=Fields(), broken=broken).kto_records(tmp_path / name, FileColumns())) == []
    with raises(DataError, "2", "rows", "a.jsonl:1", "JSON", "object", "b.jsonl:1"):
        broken.raise_if_any()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"prompt": "p"', ["JSON"]),
        (b'{"prompt": "\xff"}', ["UTF-8"]),
        (b'{"prompt": "\\ud800", "response": "r", "preference": "chosen"}', ["UTF-8"]),
        (b'"text"', ["JSON", "object", "text"]),
    ],
)
def test_lines_that_are_not_rows(tmp_path: Path, raw: bytes, words: list[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(raw)
    with raises(DataError, f"{path}:1", *words):
        read(path)
