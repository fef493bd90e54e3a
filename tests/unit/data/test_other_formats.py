"""Rows as other programs write them: their documented forms, read as pairs or labelled answers, with nothing lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.data.rows.reader import Fields, FileColumns, read_prompts
from nemo_kto.data.rows.records import DataError, DPORecord, KTORecord
from tests.helpers.messages import raises
from tests.unit.data.tiny_data import read_file, write_rows

QUESTION, GOOD, BAD = "Name a fruit.", "An apple.", "A stone."
USER = {"role": "user", "content": QUESTION}
TOOL = {"type": "function", "function": {"name": "f"}}


def said(text: object, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def read(
    path: Path, rows: list[dict], *, as_pairs: bool, drop: tuple[str, ...] = ("unlabelled",)
) -> tuple[list[Any], FileColumns]:
    records, columns, broken = read_file(write_rows(path, rows), Fields(drop=drop), as_pairs=as_pairs)
    broken.raise_if_any()
    return records, columns


TURNS = [USER], [said(GOOD)], [said(BAD)]
TEXTS = QUESTION, GOOD, BAD
SYSTEM = {"role": "system", "content": "Be short."}
# The form of its documentation; the prompt, the chosen and the rejected answer; columns that are not used.
PAIRS: dict[str, tuple[dict, tuple[Any, Any, Any], set[str]]] = {
    "OpenAI": (
        {"input": {"messages": [USER], "tools": [TOOL], "parallel_tool_calls": True}, "preferred_output": [said(GOOD)]}
        | {"non_preferred_output": [said(BAD)]},
        TURNS,
        set(),
    ),
    "NeMo-RL": (
        {"context": [USER], "completions": [{"rank": 1, "completion": [said(BAD)]}, {"rank": 0, "completion": [said(GOOD)]}]}
        | {"task_name": "t"},
        TURNS,
        {"task_name"},
    ),
    "ms-swift": (
        {"messages": [SYSTEM, USER, said(GOOD)], "rejected_response": BAD},
        ([SYSTEM, USER], [said(GOOD)], [said(BAD)]),
        set(),
    ),
    "ms-swift, with the column of unpaired rows": (
        {"messages": [USER, said(GOOD)], "rejected_response": BAD, "label": None},
        TURNS,
        set(),
    ),
    "ms-swift, messages": ({"messages": [USER, said(GOOD)], "rejected_messages": [USER, said(BAD)]}, TURNS, set()),
    "ms-swift, query": ({"query": QUESTION, "response": GOOD, "rejected_response": BAD}, TEXTS, set()),
    "ms-swift, history": (
        {"query": QUESTION, "response": GOOD, "rejected_response": BAD, "system": "Be short.", "history": [["Hi", "Hello"]]},
        ([SYSTEM, {"role": "user", "content": "Hi"}, said("Hello"), USER], [said(GOOD)], [said(BAD)]),
        set(),
    ),
    "an arena": (
        {"model_a": "m", "model_b": "n", "winner": "model_b", "conversation_a": [USER, said(BAD)]}
        | {"conversation_b": [USER, said(GOOD)], "turn": 1},
        TURNS,
        {"turn"},
    ),
    "two answers": ({"prompt": QUESTION, "response_a": GOOD, "response_b": BAD, "winner": "A"}, TEXTS, set()),
    "scores": ({"prompt": QUESTION, "responses": [BAD, GOOD], "scores": [0.1, 0.9]}, TEXTS, set()),
    "UltraFeedback": (
        {
            "instruction": QUESTION,
            "completions": [{"response": GOOD, "overall_score": 8.0}, {"response": BAD, "overall_score": 2}],
        },
        TEXTS,
        set(),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_preference_is_read_as_a_pair(name: str, tmp_path: Path) -> None:
    row, expected, unused = PAIRS[name]
    (pair,), columns = read(tmp_path / "rows.jsonl", [row], as_pairs=True)
    assert isinstance(pair, DPORecord)
    assert (pair.prompt, pair.chosen, pair.rejected) == expected
    assert pair.template == ({"tools": [TOOL]} if name == "OpenAI" else {})
    assert set(columns.unused) == unused
    records, _ = read(tmp_path / "rows.jsonl", [row], as_pairs=False)
    assert [(each.response, each.desirable) for each in records] == [(expected[1], True), (expected[2], False)]
    (prompt,) = read_prompts(tmp_path / "rows.jsonl")
    assert prompt.prompt == expected[0]


TIES = [
    {"prompt": QUESTION, "response_a": GOOD, "response_b": BAD, "winner": "tie"},
    {"winner": "tie (bothbad)", "conversation_a": [USER, said(BAD)], "conversation_b": [USER, said(GOOD)]},
    {"prompt": QUESTION, "responses": [BAD, GOOD], "scores": [0.5, 0.5]},
    {"context": [USER], "completions": [{"rank": 1, "completion": [said(BAD)]}, {"rank": 1, "completion": [said(GOOD)]}]},
]


@pytest.mark.parametrize("as_pairs", [True, False])
@pytest.mark.parametrize("tie", TIES)
def test_a_tie_is_left_out_and_counted(tie: dict, as_pairs: bool, tmp_path: Path) -> None:
    rows = [PAIRS["OpenAI"][0], tie]
    records, columns = read(tmp_path / "rows.jsonl", rows, as_pairs=as_pairs)
    assert len(records) == (1 if as_pairs else 2)
    assert columns.dropped == {"unlabelled": 1}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "p", "response_a": "a", "response_b": "b", "winner": "left"}, ["winner", "response_a", "tie", "'left'"]),
        ({"prompt": "p", "responses": ["a", "b", "c"], "scores": [1, 2, 3]}, ["responses", "two", "3", "chosen"]),
        ({"prompt": "p", "responses": ["a", "b"], "scores": [1]}, ["responses", "scores", "same length"]),
        (
            {"context": [USER], "completions": [{"rank": 0}, {"rank": 1}]},
            ["completions", "completion", "rank", "{'rank': 0}"],
        ),
        ({"input": "q", "preferred_output": [], "non_preferred_output": []}, ["input", "messages", "'q'"]),
        ({"messages": [said(GOOD)], "rejected_response": BAD}, ["messages", "before the answer"]),
        (
            {"query": "q", "response": "a", "rejected_response": "b", "history": ["x"]},
            ["history", "[question, answer]", "['x']"],
        ),
    ],
)
def test_an_invalid_preference_names_key_and_value(row: dict, words: list[str], tmp_path: Path) -> None:
    with raises(DataError, *words):
        read(tmp_path / "rows.jsonl", [row], as_pairs=True)


THOUGHT = said(GOOD, reasoning_content="Hm.")
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
MESSAGES: dict[str, tuple[dict, dict]] = {
    "Anthropic": (
        said([{"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "text", "text": GOOD}]),
        THOUGHT,
    ),
    "Mistral": (
        said([{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}, {"type": "text", "text": GOOD}]),
        THOUGHT,
    ),
    "OpenAI Responses": (said([{"type": "output_text", "text": GOOD, "annotations": []}]), said(GOOD)),
    "vLLM": (said(GOOD, reasoning="Hm."), THOUGHT),
    "ShareGPT": (
        {"from": "function_call", "value": json.dumps({"name": "f", "arguments": {"x": 1}})},
        said("", tool_calls=[CALL]),
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_keeps_its_thoughts_and_calls(name: str, tmp_path: Path) -> None:
    given, expected = MESSAGES[name]
    before = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}, {"from": "observation", "value": "3"}]
    (record,), _ = read(tmp_path / "rows.jsonl", [{"messages": [*before, given], "label": True}], as_pairs=False)
    assert isinstance(record, KTORecord)
    assert record.prompt == [USER, {"role": "tool", "content": "3"}]
    assert record.response == [expected]


def test_a_call_that_is_no_json_is_refused(tmp_path: Path) -> None:
    row = {"messages": [USER, {"from": "function_call", "value": "f(1)"}], "label": True}
    with raises(DataError, "function_call", "name", "arguments", "JSON", "'f(1)'"):
        read(tmp_path / "rows.jsonl", [row], as_pairs=False)
