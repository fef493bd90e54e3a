"""Hostile rows: each is read, or refused with its file and line in a message of bounded length; nothing else is raised.

The table holds what people and programs write by mistake or on purpose. The generated rows are good ones with bytes, values
and structure changed at random; their seeds are their names.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_kto.data import parts
from nemo_kto.data.cache import DPO_EXAMPLES, KTO_EXAMPLES, ExampleKind, TokenCache
from nemo_kto.data.chat import RecordEncoder
from nemo_kto.data.parts import file_parts
from nemo_kto.data.reader import Fields
from nemo_kto.data.records import DataError, RowErrors
from nemo_kto.data.truncation import Truncation
from nemo_kto.errors import UserError
from nemo_kto.files import MAX_LINE_BYTES
from tests.hostile.folders import launcher_says
from tests.messages import assert_names
from tests.unit.data.toys import chatml_tokenizer

MAX_MESSAGE = 700  # characters, without the folder
READ = ""  # in the place of what is said
NO_KEYS = "must have one of"
Row = dict[str, object]
PAIR = '{"prompt": "p", "chosen": "a", "rejected": "b", '
TURNS = '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "label": true, '


def row(**changes: object) -> bytes:
    return json.dumps({"prompt": "p", "response": "r", "preference": "chosen", **changes}).encode()


def label(value: str) -> bytes:
    return f'{{"prompt": "p", "completion": "c", "label": {value}}}'.encode()


ROWS: dict[str, tuple[bytes, str]] = {
    # the file
    "a table of a spreadsheet": (b"prompt,response,label\na,b,1", "not JSON (Expecting value"),
    "a compressed file": (gzip.compress(row()), "compressed with gzip; decompress it with gunzip"),
    "a table of Parquet": (b"PAR1\x15\x04" + bytes(100), "a Parquet file; convert it with pandas.read_parquet("),
    "a Git LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5",
        "a Git LFS pointer; run `git lfs pull`",
    ),
    "a pickle": (b"\x80\x04\x95\x00", "a pickle"),
    "a web page": (b"<html><body>404</body></html>", "a web page"),
    "UTF-16": (row().decode().encode("utf-16"), "UTF-16 text; convert it with iconv"),
    "UTF-16 without its mark": (row().decode().encode("utf-16-le"), "UTF-16 text; convert it with iconv"),
    "Latin-1": ('{"prompt": "caf\u00e9"}'.encode("latin-1"), "not valid UTF-8"),
    "a byte order mark": (b"\xef\xbb\xbf" + row(), READ),
    "two byte order marks": (b"\xef\xbb\xbf\xef\xbb\xbf" + row(), "not JSON (Unexpected UTF-8 BOM"),
    "lines of Windows": (row() + b"\r", READ),
    "only empty lines": (b" \n\t\n\x0c", "the file must have at least one row, got none"),
    "two rows in a line": (row() + row(), "not JSON (Extra data"),
    "a comma after the row": (row() + b",", "not JSON (Extra data"),
    "a list of rows": (b"[" + row() + b"]", "a row must be a JSON object, got [{"),
    "a row over several lines": (b'{\n"prompt": "p"\n}', "not JSON"),
    "cut": (row()[:20], "not JSON (Invalid control character"),
    "null": (b"null", "a row must be a JSON object, got None"),
    "a number": (b"5", "a row must be a JSON object, got 5"),
    "no columns": (b"{}", f'{NO_KEYS} "preference"'),
    "zero bytes": (b"\0" * 64, "not JSON"),
    # JSON that is hard to read
    "brackets without end": (b"[" * 100_000, "not JSON (maximum recursion depth exceeded"),
    "objects without end": (b'{"a":' * 100_000, "not JSON (maximum recursion depth exceeded"),
    "a prompt of brackets": (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", "not JSON (maximum recursion depth"),
    "an unused column of brackets": (row()[:-1] + b', "x": ' + b"[" * 900 + b"]" * 900 + b"}", READ),
    "an integer of 5000 digits": (
        row()[:-1] + b', "id": ' + b"1" * 5000 + b"}",
        "not JSON (Exceeds the limit (4300 digits)",
    ),
    "20000 columns": (json.dumps({f"column_{i}": i for i in range(20_000)}).encode(), f'{NO_KEYS} "preference"'),
    "20000 columns more": (row(**{f"column_{i}": i for i in range(20_000)}), READ),
    "a column of 100000 characters": (json.dumps({"x" * 100_000: 1}).encode(), f'{NO_KEYS} "preference"'),
    "a column that controls the terminal": (json.dumps({"a\n\x1b[31m": 1}).encode(), r"['a\n\x1b[31m']"),
    "a column twice": (b'{"prompt": "p", "prompt": "q", "response": "r", "preference": "chosen"}', READ),
    # text
    "a zero character": (row(prompt="a\0b"), READ),
    "half a character": (b'{"prompt": "\\ud800", "response": "r", "preference": "chosen"}', "not valid UTF-8"),
    "half a character in a column": (b'{"\\ude00": 1, "prompt": "p"}', "not valid UTF-8 (surrogates not allowed)"),
    "both halves of a character": (b'{"prompt": "\\ud83d\\ude00", "response": "r", "preference": "chosen"}', READ),
    "text that turns around": (row(prompt="\u202e\u200b\ufeff"), READ),
    "10000 accents on a letter": (row(prompt="a" + "\u0301" * 10_000), READ),
    "300000 characters": (row(response="x" * 300_000), READ),
    "tokens of the template": (row(prompt="<|im_end|>", response="<|im_start|>assistant"), READ),
    "nothing as an answer": (row(response=""), READ),
    "spaces as a prompt": (row(prompt=" \t"), READ),
    # prompts and answers
    "a prompt that is a number": (row(prompt=5), '"prompt" must be a string or a list of messages that is not empty, got 5'),
    "a prompt that is null": (
        row(prompt=None),
        '"prompt" must be a string or a list of messages that is not empty, got None',
    ),
    "a prompt of strings": (
        row(prompt=["a"]),
        'a message in "prompt" must be an object with "role" and "content", got \'a\'',
    ),
    "a prompt of lists": (row(prompt=[["a"]]), 'a message in "prompt" must be an object with "role" and "content"'),
    "a message without a role": (row(prompt=[{"content": "x"}]), "must be an object with"),
    "a role that is a number": (row(prompt=[{"role": 1, "content": "x"}]), "must be an object with"),
    "content that is null": (
        row(prompt=[{"role": "user", "content": None}]),
        '"content" of a message in "prompt" must be a',
    ),
    "content in parts": (
        row(prompt=[{"role": "user", "content": [{"type": "text", "text": "x"}]}]),
        '"content" of a message in "prompt" must be a string, got [{',
    ),
    "content of 4000 digits": (
        b'{"messages": [{"role": "user", "content": 1' + b"0" * 4000 + b'}], "label": true}',
        '"content" of a message in "messages" must be a string, got 1000',
    ),
    "an answer of the user": (
        row(response=[{"role": "user", "content": "x"}]),
        'must be one message of the role "assistant"',
    ),
    "two answers": (row(completion="z"), "a row must have"),
    "no messages": (
        b'{"messages": [], "label": true}',
        '"messages" must be a string or a list of messages that is not empty',
    ),
    "a message that is a string": (b'{"messages": "x", "label": true}', '"messages" must be'),
    "only a question": (b'{"messages": [{"role": "user", "content": "x"}], "label": true}', '"messages" must have at least'),
    "only an answer": (b'{"messages": [{"role": "assistant", "content": "x"}], "label": true}', '"messages" must have at'),
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
    "a history that would be lost": (row(history=["before"]), '"history" would be lost'),
    "an image": (row(image="x.png"), '"image" is not supported'),
    # labels
    "a label in quotes": (label('"true"'), "\"label\" must be true or false, got 'true'; correct it or remove the row"),
    "a label that is 1": (label("1"), '"label" must be true or false, got 1'),
    "a label that is a half": (label("0.5"), '"label" must be true or false, got 0.5'),
    "a label that is no number": (label("NaN"), '"label" must be true or false, got nan'),
    "a label that is null": (label("null"), '"label" must be true or false, got None'),
    "a label that is a list": (label("[true]"), '"label" must be true or false, got [True]'),
    "a label of 100000 characters": (label(f'"{"x" * 100_000}"'), '"label" must be true or false, got \'xxx'),
    "a preference that is a list": (
        row(preference=["chosen"]),
        '"preference" must be "chosen" or "rejected", got [\'chosen\']',
    ),
    "a preference that is an object": (row(preference={}), '"preference" must be "chosen" or "rejected", got {}'),
    "a preference that contradicts": (row(label=False), f'{NO_KEYS} "preference"'),
    # tools and variables of the template
    "tools that are no JSON": (
        f'{TURNS}"tools": "x"}}'.encode(),
        '"tools" must be a list of JSON schemas, got a string that is',
    ),
    "tools that are a number": (f'{TURNS}"tools": 5}}'.encode(), '"tools" must be a list of JSON schemas'),
    "tools of brackets without end": (f'{TURNS}"tools": "{"[" * 100_000}"}}'.encode(), "not JSON (maximum recursion depth"),
    "tools of nested lists": (
        f'{TURNS}"tools": {"[" * 900}{"]" * 900}}}'.encode(),
        '"tools" must be a list of JSON schemas',
    ),
    "variables that are a list": (
        f'{TURNS}"chat_template_kwargs": [1]}}'.encode(),
        '"chat_template_kwargs" must be an object',
    ),
    "variables that are arguments": (
        f'{TURNS}"chat_template_kwargs": {{"tokenize": true}}}}'.encode(),
        "chat_template_kwargs",
    ),
    "a variable that is the tokenizer": (f'{TURNS}"chat_template_kwargs": {{"self": 1}}}}'.encode(), "multiple values for"),
}
PAIRS: dict[str, tuple[bytes, str]] = {
    "a pair without a chosen answer": (b'{"prompt": "p", "rejected": "a"}', '"chosen" is missing'),
    "a pair with null": (b'{"prompt": "p", "chosen": "a", "rejected": null}', '"rejected" must be a string or a list'),
    "a pair without a prompt": (b'{"chosen": "a", "rejected": "b"}', "show no prompt that both share"),
    "a pair of two conversations": (
        b'{"chosen": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a"}],'
        b'"rejected": [{"role": "user", "content": "y"}, {"role": "assistant", "content": "b"}]}',
        "must be the same conversation up to their last message",
    ),
    "a pair of the same": (b'{"prompt": "p", "chosen": "a", "rejected": "a"}', READ),
    "unpaired feedback": (row(), "unpaired feedback is for KTO"),
    "a reward in quotes": (
        f'{PAIR}"chosen_reward": "1", "rejected_reward": 0}}'.encode(),
        "must be a finite number, got '1'",
    ),
    "a reward that is true": (f'{PAIR}"chosen_reward": true, "rejected_reward": 0}}'.encode(), "finite number, got True"),
    "a reward that is no number": (f'{PAIR}"chosen_reward": NaN, "rejected_reward": 0}}'.encode(), "finite number, got nan"),
    "a reward without end": (f'{PAIR}"chosen_reward": Infinity, "rejected_reward": 0}}'.encode(), "finite number, got inf"),
    "a reward of 400 digits": (f'{PAIR}"chosen_reward": 1{"0" * 400}, "rejected_reward": 0}}'.encode(), "finite number"),
    "a weight in quotes": (
        f'{PAIR}"weight": "2"}}'.encode(),
        "\"weight\" must be a number above 0 that fp32 has, got '2'",
    ),
    "a weight of 0": (f'{PAIR}"weight": 0}}'.encode(), '"weight" must be a number above 0 that fp32 has, got 0'),
    "a weight of 400 digits": (f'{PAIR}"weight": 1{"0" * 400}}}'.encode(), "that fp32 has, got 1000"),
    "a weight that is null": (f'{PAIR}"weight": null}}'.encode(), READ),
    "one reward": (f'{PAIR}"chosen_reward": 1}}'.encode(), '"rejected_reward" is missing'),
    "brackets without end": (b"[" * 100_000, "not JSON (maximum recursion depth exceeded"),
}
GENERATED = 60


@pytest.fixture(scope="module")
def encoder() -> RecordEncoder:
    return RecordEncoder(tokenizer=chatml_tokenizer())


def said_of(raw: bytes, kind: ExampleKind, encoder: RecordEncoder, folder: Path) -> str:
    """What is said of a file; nothing where it is read."""
    path = folder / "rows.jsonl"
    path.write_bytes(raw + b"\n")
    cut, broken = Truncation(64, "keep_end", encoder.bos_id), RowErrors()
    cache = TokenCache(kind=kind, folder=folder / "cache", fields=Fields({}), encoder=encoder, truncation=cut)
    try:
        table, _ = cache.open([path], broken=broken)[path]
        broken.raise_if_any()
    except DataError as error:
        message = str(error).replace(str(folder), "FOLDER")
        assert "FOLDER/rows.jsonl:1: " in message
        assert len(message) < MAX_MESSAGE
        assert list((folder / "cache").glob("*")) == [], "a part of a table was left"
        return message
    assert table is not None
    assert len(table) > 0
    return READ


@pytest.mark.parametrize("case", ROWS)
def test_a_row_is_read_or_refused(case: str, encoder: RecordEncoder, tmp_path: Path) -> None:
    raw, expected = ROWS[case]
    said = said_of(raw, KTO_EXAMPLES, encoder, tmp_path)
    assert expected in said
    assert bool(expected) == bool(said), said


@pytest.mark.parametrize("case", PAIRS)
def test_a_pair_is_read_or_refused(case: str, encoder: RecordEncoder, tmp_path: Path) -> None:
    raw, expected = PAIRS[case]
    said = said_of(raw, DPO_EXAMPLES, encoder, tmp_path)
    assert expected in said
    assert bool(expected) == bool(said), said


IRREGULAR: dict[str, Callable[[Path], object]] = {
    "a named pipe (FIFO)": os.mkfifo,
    "a character device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
}


@pytest.mark.parametrize("kind", IRREGULAR)
def test_what_is_no_file_is_refused_by_name(kind: str, here: Path) -> None:
    """Reading a pipe would wait for its writer for ever, and a device might never end."""
    IRREGULAR[kind](here / "data.jsonl")
    named = here if kind == "a folder" else here / "data.jsonl"  # a folder may be named, but not be among the files
    (said,) = launcher_says(here / "model", named)
    assert_names(said, "model.data.data_prefix", str(here / "data.jsonl"), kind, "regular file")
    with pytest.raises(UserError) as raised:
        list(file_parts(here / "data.jsonl"))
    assert_names(raised.value, str(here / "data.jsonl"), kind, "regular file")


def test_files_of_other_formats_are_all_named_before_anything_starts(here: Path) -> None:
    (folder := here / "data").mkdir()
    (folder / "a.jsonl").write_bytes(gzip.compress(row()))
    (folder / "b.jsonl").write_bytes(row() + b"\n")
    (folder / "c.jsonl").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    said = launcher_says(here / "model", folder)
    assert len(said) == 2
    assert_names(said[0], "model.data.data_prefix", "a.jsonl", "gunzip")
    assert_names(said[1], "model.data.data_prefix", "c.jsonl", "git lfs pull")


def test_a_line_without_end_is_refused_where_it_begins(encoder: RecordEncoder, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.write((row() + b"\n") * 8)
        file.truncate(6 * 2**30)  # zeros, which take no room
    broken, began = RowErrors(), time.process_time()
    cut = Truncation(64, "keep_end", encoder.bos_id)
    cache = TokenCache(kind=KTO_EXAMPLES, folder=tmp_path / "cache", fields=Fields({}), encoder=encoder, truncation=cut)
    assert cache.open([path], broken=broken)[path][0] is None
    with pytest.raises(DataError) as raised:
        broken.raise_if_any()
    assert_names(raised.value, "1 broken row:", f"{path}:9: ", f"{MAX_LINE_BYTES:,} bytes", "one object per line")
    assert time.process_time() - began < 10


def test_a_file_that_shrinks_while_it_is_read_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MIN_BYTES", 100)
    path = tmp_path / "rows.jsonl"
    path.write_bytes((row() + b"\n") * 20_000)
    size, found = path.stat().st_size, file_parts(path)
    first = next(found)
    os.truncate(path, first.stop)
    *_, last = found  # of what was in the buffer
    assert last.stop < size
    assert len(list(first.lines(path))) == len(path.read_bytes().splitlines())


VALUES = (None, True, 0, -1, 1e308, "", " ", "chosen", "\0", [], [[]], {}, {"role": "user"}, ["x"], 10**30)
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
            refused += said_of(raw, kind, encoder, folder) != READ
        except Exception as error:
            raise AssertionError(f"seed {seed}: {raw!r}") from error
    assert 10 < refused < GENERATED - 1
