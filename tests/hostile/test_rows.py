"""Hostile rows: each is read, or refused with file and line in a message of bounded length.

The table holds what people and programs write by mistake or on purpose. The generated rows are good ones with bytes, values
and structure changed at random; their seeds are their names.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.data.rows import row_files as files
from nemo_kto.data.rows.row_files import file_parts, read_rows
from nemo_kto.data.tokens.cache import DPO_EXAMPLES, KTO_EXAMPLES, ExampleKind
from nemo_kto.data.tokens.chat_template import RecordEncoder
from nemo_kto.errors import UserError
from nemo_kto.utils.files import MAX_LINE_BYTES
from tests.helpers.messages import Message, assert_names
from tests.hostile.folders import file_error, launcher_says

MAX_MESSAGE = 700  # characters, without the folder
READ = ""  # no error
Row = dict[str, object]
PAIR = '{"prompt": "p", "chosen": "a", "rejected": "b", '
TURNS = '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "label": true, '


def row(**changes: object) -> bytes:
    return json.dumps({"prompt": "p", "response": "r", "preference": "chosen", **changes}).encode()


def label(value: str) -> bytes:
    return f'{{"prompt": "p", "completion": "c", "label": {value}}}'.encode()


ROWS: dict[str, tuple[bytes, Message | str]] = {
    # the file
    "a table of a spreadsheet": (b"prompt,response,label\na,b,1", READ),
    "a compressed file": (gzip.compress(row()), READ),
    "a pickle": (b"\x80\x04\x95\x00", Message("pickle")),
    "UTF-16": (row().decode().encode("utf-16"), Message("UTF-16", "iconv")),
    "UTF-16 without its mark": (row().decode().encode("utf-16-le"), Message("UTF-16", "iconv")),
    "Latin-1": ('{"prompt": "caf\u00e9"}'.encode("latin-1"), Message("UTF-8")),
    "a byte order mark": (b"\xef\xbb\xbf" + row(), READ),
    "only empty lines": (b" \n\t\n\x0c", Message("file", "none")),
    "two rows in a line": (row() + row(), Message("JSON")),
    "a list of rows": (b"[" + row() + b"]", Message("JSON array", "jq")),
    "cut": (row()[:20], Message("JSON")),
    "null": (b"null", Message("JSON", "object", "None")),
    "zero bytes": (b"\0" * 64, Message("JSON")),
    # JSON that is hard to read
    "brackets without end": (b"[" * 100_000, Message("JSON")),
    "an integer of 5000 digits": (row()[:-1] + b', "id": ' + b"1" * 5000 + b"}", Message("JSON", "4300")),
    "20000 columns": (json.dumps({f"column_{i}": i for i in range(20_000)}).encode(), Message("preference")),
    "a column that controls the terminal": (json.dumps({"a\n\x1b[31m": 1}).encode(), Message("'a\\n\\x1b[31m']")),
    "a column twice": (b'{"prompt": "p", "prompt": "q", "response": "r", "preference": "chosen"}', READ),
    # text
    "half a character": (b'{"prompt": "\\ud800", "response": "r", "preference": "chosen"}', Message("UTF-8")),
    "both halves of a character": (b'{"prompt": "\\ud83d\\ude00", "response": "r", "preference": "chosen"}', READ),
    "10000 accents on a letter": (row(prompt="a" + "\u0301" * 10_000), READ),
    "300000 characters": (row(response="x" * 300_000), READ),
    "tokens of the template": (row(prompt="<|im_end|>", response="<|im_start|>assistant"), READ),
    "nothing as an answer": (row(response=""), READ),
    # prompts and answers
    "a prompt of strings": (row(prompt=["a"]), Message("prompt", "object", "role", "content", "a")),
    "a message without a role": (row(prompt=[{"content": "x"}]), Message("object")),
    "content that is null": (row(prompt=[{"role": "user", "content": None}]), Message("content", "prompt")),
    "content in parts": (row(prompt=[{"role": "user", "content": [{"type": "text", "text": "x"}]}]), READ),
    "an answer of the user": (row(response=[{"role": "user", "content": "x"}]), Message("assistant")),
    "two answers": (row(completion="z"), Message("response", "completion")),
    "no messages": (b'{"messages": [], "label": true}', Message("messages", "string", "list", "empty")),
    "only a question": (b'{"messages": [{"role": "user", "content": "x"}], "label": true}', Message("messages")),
    "10000 messages": (
        json.dumps(
            {
                "messages": [{"role": "user", "content": "x"}] * 10_000 + [{"role": "assistant", "content": "y"}],
                "label": True,
            }
        ).encode(),
        READ,
    ),
    "a question that would be lost": (row(question="why?"), READ),
    "a history that would be lost": (row(history=["before"]), Message("history")),
    "an image": (row(image="x.png"), Message("image")),
    # labels
    "a label that is a half": (label("0.5"), Message("label", "true", "false", "0.5")),
    "a label that is no number": (label("NaN"), Message("1 row without a label", "model.data.drop")),
    "a label of 100000 characters": (label(f'"{"x" * 100_000}"'), Message("label", "true", "false", "...")),
    "a preference that contradicts": (row(label=False), Message("preference")),
    # tools and variables of the template
    "tools that are no JSON": (f'{TURNS}"tools": "x"}}'.encode(), Message("tools", "list", "JSON", "string")),
    "tools of nested lists": (f'{TURNS}"tools": {"[" * 900}{"]" * 900}}}'.encode(), Message("tools", "list", "JSON")),
    "variables that are arguments": (
        f'{TURNS}"chat_template_kwargs": {{"tokenize": true}}}}'.encode(),
        Message("chat_template_kwargs"),
    ),
    "a variable that is the tokenizer": (
        f'{TURNS}"chat_template_kwargs": {{"self": 1}}}}'.encode(),
        Message("multiple", "values"),
    ),
}
PAIRS: dict[str, tuple[bytes, Message | str]] = {
    "a pair without a chosen answer": (b'{"prompt": "p", "rejected": "a"}', Message("chosen")),
    "a pair of two conversations": (
        b'{"chosen": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a"}],'
        b'"rejected": [{"role": "user", "content": "y"}, {"role": "assistant", "content": "b"}]}',
        Message("last"),
    ),
    "a pair of the same": (b'{"prompt": "p", "chosen": "a", "rejected": "a"}', READ),
    "unpaired feedback": (row(), Message("KTO", "unpaired")),
    "a reward that is no number": (f'{PAIR}"chosen_reward": NaN, "rejected_reward": 0}}'.encode(), Message("number", "nan")),
    "a reward of 400 digits": (f'{PAIR}"chosen_reward": 1{"0" * 400}, "rejected_reward": 0}}'.encode(), Message("number")),
    "a weight of 0": (f'{PAIR}"weight": 0}}'.encode(), Message("weight", "number", "0", "fp32")),
    "one reward": (f'{PAIR}"chosen_reward": 1}}'.encode(), Message("rejected_reward")),
}
GENERATED = 60


def error_of(raw: bytes, kind: ExampleKind, encoder: RecordEncoder, folder: Path) -> str:
    """The errors of a file; empty if it is read."""
    path = folder / "rows.jsonl"
    path.write_bytes(raw if raw.startswith(b"\x1f") else raw + b"\n")
    message = file_error(path, encoder, kind, limit=MAX_MESSAGE)
    assert message == READ or re.search(r"FOLDER/rows\.jsonl(:1: | row 1: | is not valid as )", message)
    return message


@pytest.mark.parametrize("case", ROWS)
def test_a_row_is_read_or_refused(case: str, encoder: RecordEncoder, tmp_path: Path) -> None:
    raw, expected = ROWS[case]
    assert error_of(raw, KTO_EXAMPLES, encoder, tmp_path) == expected


@pytest.mark.parametrize("case", PAIRS)
def test_a_pair_is_read_or_refused(case: str, encoder: RecordEncoder, tmp_path: Path) -> None:
    raw, expected = PAIRS[case]
    assert error_of(raw, DPO_EXAMPLES, encoder, tmp_path) == expected


IRREGULAR: dict[str, Callable[[Path], object]] = {
    "a named pipe (FIFO)": os.mkfifo,
    "a character device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
}


@pytest.mark.parametrize("kind", IRREGULAR)
def test_special_files_are_refused_by_name(kind: str, here: Path) -> None:
    """Reading a pipe would wait for its writer for ever, and a device might never end."""
    IRREGULAR[kind](here / "data.jsonl")
    named = here if kind == "a folder" else here / "data.jsonl"  # a folder may be named, but not be among the files
    (messages,) = launcher_says(here / "model", named)
    assert_names(messages, "model.data.data_prefix", str(here / "data.jsonl"), kind, "regular file")
    with pytest.raises(UserError) as raised:
        list(file_parts(here / "data.jsonl"))
    assert_names(raised.value, str(here / "data.jsonl"), kind, "regular file")


def test_all_files_of_other_formats_are_named_before_the_start(here: Path) -> None:
    (folder := here / "data").mkdir()
    (folder / "a.jsonl").write_bytes(b"PK\x03\x04" + bytes(26) + b"[Content_Types].xml")
    (folder / "b.jsonl").write_bytes(row() + b"\n")
    (folder / "c.jsonl").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    messages = launcher_says(here / "model", folder)
    assert len(messages) == 2
    assert_names(messages[0], "model.data.data_prefix", "a.jsonl", "Excel", "save it as csv")
    assert_names(messages[1], "model.data.data_prefix", "c.jsonl", "git lfs pull")


def test_an_endless_line_is_refused_at_its_start(encoder: RecordEncoder, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.write((row() + b"\n") * 8)
        file.truncate(2 * MAX_LINE_BYTES)  # zeros, which take no room
    message = file_error(path, encoder, limit=MAX_MESSAGE)
    assert_names(message, "1 broken row:", "FOLDER/rows.jsonl:9: ", f"{MAX_LINE_BYTES:,} bytes", "one object per line")


def test_a_file_that_shrinks_while_it_is_read_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MIN_BYTES", 100)
    path = tmp_path / "rows.jsonl"
    path.write_bytes((row() + b"\n") * 20_000)
    size, found = path.stat().st_size, file_parts(path)
    first = next(found)
    assert first.stop is not None
    os.truncate(path, first.stop)
    *_, last = found  # of what was in the buffer
    assert last.stop is not None
    assert last.stop < size
    assert len(list(read_rows(path, first))) == len(path.read_bytes().splitlines())


VALUES: tuple[Any, ...] = (None, True, 0, -1, 1e308, "", " ", "chosen", "\0", [], [[]], {}, {"role": "user"}, ["x"], 10**30)
GOOD: dict[str, tuple[Row, ...]] = {
    KTO_EXAMPLES.name: (
        {"prompt": "a prompt", "response": "an answer", "preference": "chosen"},
        {"prompt": [{"role": "user", "content": "a prompt"}], "completion": "an answer", "label": False},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "label": True, "tools": []},
    ),
    DPO_EXAMPLES.name: (
        {"prompt": "a prompt", "chosen": "an answer", "rejected": "another", "chosen_reward": 1, "rejected_reward": 0},
        {
            "prompt": [{"role": "user", "content": "a prompt"}],
            "chosen_response": "an answer",
            "rejected_response": "another",
        },
    ),
}


def other_value(chance: random.Random, value: object) -> object:
    """A value with one place in it changed."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        key = chance.choice(sorted(value))
        changed = dict(value)
        changed[chance.choice((key, key.upper(), key + "s"))] = other_value(chance, changed.pop(key))
        return changed
    if isinstance(value, list) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        return [*value[:place], other_value(chance, value[place]), *value[place:]]
    return chance.choice(VALUES)


def of_values(chance: random.Random, row: Row) -> bytes:
    return json.dumps(other_value(chance, row)).encode()


def of_bytes(chance: random.Random, row: Row) -> bytes:
    """The row with one of its bytes changed, mostly to a letter or sign, never to the end of a line."""
    raw = bytearray(json.dumps(row).encode())
    raw[chance.randrange(len(raw))] = chance.choice([*range(32, 127)] * 3 + [byte for byte in range(256) if byte != 10])
    return bytes(raw)


@pytest.mark.parametrize("generate", [of_values, of_bytes])
@pytest.mark.parametrize("kind", [KTO_EXAMPLES, DPO_EXAMPLES], ids=lambda kind: kind.name)
def test_generated_rows_are_read_or_refused(
    generate: Callable[[random.Random, Row], bytes], kind: ExampleKind, encoder: RecordEncoder, tmp_path: Path
) -> None:
    refused = 0
    for seed in range(GENERATED):
        (folder := tmp_path / str(seed)).mkdir()
        chance = random.Random(seed)
        raw = generate(chance, chance.choice(GOOD[kind.name]))
        try:
            refused += error_of(raw, kind, encoder, folder) != READ
        except Exception as error:
            raise AssertionError(f"seed {seed}: {raw!r}") from error
    assert 10 < refused < GENERATED - 1
