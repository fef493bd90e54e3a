"""The columns of a row: what is renamed, counted, or refused because it would be lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_kto.data.reader import Fields, FileColumns, FileReader
from nemo_kto.data.records import DataError, DPORecord, KTORecord, RowErrors

USER = {"role": "user", "content": "What is the capital of France?"}
PARIS, LYON = "The capital of France is Paris.", "The capital of France is Lyon."
QUESTION = "What is the capital of France?"


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def read(
    tmp_path: Path, *rows: dict, fields: dict[str, str] | None = None, pairs: bool = False
) -> tuple[list[KTORecord] | list[DPORecord], FileColumns, str]:
    """Records and columns of a file, and what is wrong with its rows."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    broken, columns = RowErrors(), FileColumns()
    reader = FileReader(fields=Fields(fields or {}), broken=broken)
    records = list(reader.dpo_records(path, columns) if pairs else reader.kto_records(path, columns))
    try:
        broken.raise_if_any()
    except DataError as error:
        return records, columns, str(error).replace(f"{path}:", "")
    return records, columns, ""


@pytest.mark.parametrize("pairs", [False, True])
def test_a_question_is_never_dropped_from_a_pair(tmp_path: Path, pairs: bool) -> None:
    row = {"question": QUESTION, "chosen": PARIS, "rejected": LYON}
    records, _, wrong = read(tmp_path, *[row] * 3, pairs=pairs)
    assert records == []
    assert wrong == (
        '3 broken rows:\n  1: "question" would be lost, the row has no "prompt"; name the columns with '
        "'model.data.fields={prompt:question}' (the same in 2 more, up to line 3)"
    )


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            {"instruction": "Translate.", "input": "chat", "chosen": "a cat", "rejected": "a dog"},
            '"instruction" would be lost, the row has no "prompt"; join instruction and input into one "prompt"',
        ),
        (
            {"Question": QUESTION, "chosen": [USER, said("a")], "rejected": [USER, said("b")], "context": "Europe"},
            '"context" would be lost, the row has no "prompt"; join Question and context into one "prompt"',
        ),
        (
            {"system": "Be brief.", "chosen": [USER, said("a")], "rejected": [USER, said("b")]},
            '"system" would be lost, the row has no "prompt"',
        ),
        (
            {"messages": [USER], "chosen": PARIS, "rejected": LYON},
            '"messages" would be lost, the row has no "prompt"; name the columns with '
            "'model.data.fields={prompt:messages}'",
        ),
        (
            {"prompt": "", "question": QUESTION, "chosen": "a", "rejected": "b"},
            '"question" would be lost, the row has no "prompt"; name the columns with '
            "'model.data.fields={prompt:question}'",
        ),
        (
            {"question": QUESTION, "answer": PARIS, "label": True},
            'a row must have "prompt" and one of "response" or "completion", or "messages", or "chosen" and "rejected"; '
            "got the keys ['answer', 'label', 'question']; name the columns with "
            "'model.data.fields={prompt:question,response:answer}'",
        ),
        (
            {"question": QUESTION, "chosen": said(PARIS), "rejected": said(LYON)},
            "'model.data.fields={prompt:question}'",
        ),
        (
            {"prompt": QUESTION, "system": "Be brief.", "response": PARIS, "label": True},
            '"system" would be lost, the prompt does not hold it; make "prompt" a list of messages that holds it '
            '({"role": "system", "content": ...} first), and leave "system" out',
        ),
        (
            {"messages": [USER, said("a")], "history": [["hi", "hello"]], "label": True},
            '"history" would be lost, the prompt does not hold it',
        ),
        (
            {"prompt": QUESTION, "images": ["a.png"], "response": PARIS, "label": True},
            '"images" is not supported: models are trained on text only; leave such rows out',
        ),
    ],
)
def test_a_row_that_would_lose_a_part_of_its_prompt_is_refused(tmp_path: Path, row: dict, text: str) -> None:
    _, _, wrong = read(tmp_path, row)
    assert wrong.startswith("1 broken row:\n  1: ")
    assert text in wrong


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": QUESTION, "question": "What?", "response": PARIS, "label": True},
        {"prompt": QUESTION, "system": "", "images": [], "context": None, "response": PARIS, "label": True},
        {"prompt": f"Be brief. {QUESTION}", "system": " Be brief. ", "response": PARIS, "label": True},
        {"question": QUESTION, "chosen": [USER, said("a")], "rejected": [USER, said("b")]},
        {"messages": [USER, said("a")], "chosen": [USER, said("a")], "rejected": [USER, said("b")]},
        {
            "system": "Be brief.",
            "prompt": [{"role": "system", "content": "Be brief."}, USER],
            "response": "a",
            "label": True,
        },
    ],
)
def test_a_part_that_the_prompt_holds_or_that_is_empty_is_not_lost(tmp_path: Path, row: dict) -> None:
    records, _, wrong = read(tmp_path, row)
    assert wrong == ""
    assert len(records) >= 1


def test_columns_are_renamed_and_an_own_column_of_that_name_gives_way(tmp_path: Path) -> None:
    row = {"question": QUESTION, "prompt": "other", "good": PARIS, "bad": LYON}
    fields = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    records, columns, wrong = read(tmp_path, row, fields=fields, pairs=True)
    assert wrong == ""
    (record,) = records
    assert isinstance(record, DPORecord)
    assert (record.prompt, record.chosen, record.rejected) == (QUESTION, PARIS, LYON)
    assert columns.unused == {"prompt": 1}


def test_a_file_without_a_renamed_column_is_read_as_it_is(tmp_path: Path) -> None:
    records, _, wrong = read(tmp_path, {"prompt": "p", "response": "r", "label": False}, fields={"prompt": "question"})
    assert wrong == ""
    assert [record.prompt for record in records] == ["p"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"promt": "question"}, "to columns, got promt; did you mean prompt?"),
        ({"question": "prompt"}, "to columns, got question; did you mean {prompt:question}?"),
        ({"xyz": "question"}, "to columns, got xyz; write {OURS:COLUMN}"),
        ({"prompt": "q", "response": "q"}, "must take each column once, got q twice; leave one out"),
    ],
)
def test_fields_mistakes(fields: dict[str, str], text: str) -> None:
    with pytest.raises(DataError) as error:
        Fields(fields)
    assert str(error.value).endswith(text)


def test_columns_that_are_not_used_are_counted_by_the_form_of_the_row(tmp_path: Path) -> None:
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
    _, columns, _ = read(tmp_path, {"messages": [USER, said("a")], "prompt": QUESTION, "label": True})
    assert columns.unused_text() == "prompt (1 row)"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tools": 3}, '"tools" must be a list of JSON schemas, or that as a string of JSON, got 3'),
        ({"tools": ["f"]}, "or that as a string of JSON, got ['f']"),
        ({"tools": "{"}, '"tools" must be a list of JSON schemas, got a string that is not JSON'),
        ({"chat_template_kwargs": "x"}, "\"chat_template_kwargs\" must be an object, got 'x'"),
        (
            {"chat_template_kwargs": {"tokenize": True}},
            '"chat_template_kwargs" must hold variables of the chat template, got "tokenize"; remove it',
        ),
    ],
)
def test_arguments_of_the_chat_template_that_are_none(tmp_path: Path, given: dict, text: str) -> None:
    _, _, wrong = read(tmp_path, {"messages": [USER, said("a")], "label": True, **given})
    assert text in wrong


def test_plain_strings_cannot_have_tools(tmp_path: Path) -> None:
    row = {"prompt": "p", "chosen": "a", "rejected": "b"}
    for given in ({"tools": [{}]}, {"chat_template_kwargs": {"x": 1}}):
        (name,) = given
        for pairs in (False, True):
            _, _, wrong = read(tmp_path, row | given, pairs=pairs)
            assert f'"{name}" is for the chat template, which strings do not go through; make "prompt" a list of' in wrong
    assert read(tmp_path, row | {"tools": [], "chat_template_kwargs": None})[2] == ""
