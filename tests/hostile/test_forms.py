"""Hostile data files of every form: each is read, or refused with one clear error of bounded length."""

from __future__ import annotations

import gzip
import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import ipc, parquet

from nemo_kto.data.rows.data_sources import read_data_prefix
from nemo_kto.data.rows.row_files import file_parts
from nemo_kto.data.tokens.chat_template import RecordEncoder
from nemo_kto.errors import UserError
from tests.helpers.messages import Message, assert_names
from tests.hostile.folders import file_error

MAX_MESSAGE = 900  # characters, without the folder
READ = ""  # no error
HEADER = b"prompt,response,label\n"
GOOD = HEADER + b"p,r,1\nq,s,0\n"
LINE = json.dumps({"prompt": "p", "response": "r", "label": True}).encode()
COLUMNS: dict[str, list] = {"prompt": ["p", "q"] * 50, "response": ["r", "s"] * 50, "label": [True, False] * 50}


def parquet_bytes(columns: dict[str, list]) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue()


def arrow_bytes(columns: dict[str, list], *, stream: bool = True, metadata: dict | None = None) -> bytes:
    sink, table = io.BytesIO(), pyarrow.table(columns).replace_schema_metadata(metadata)
    with (ipc.new_stream if stream else ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def changed(raw: bytes, place: int, count: int = 8) -> bytes:
    """The bytes with some overwritten."""
    place %= len(raw)
    return raw[:place] + b"\xff" * count + raw[place + count :]


def zstd(raw: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(raw)
    return sink.getvalue().to_pybytes()


TABLE, STREAM, FILE = parquet_bytes(COLUMNS), arrow_bytes(COLUMNS), arrow_bytes(COLUMNS, stream=False)
CLASSES = {"huggingface": json.dumps({"info": {"features": {"label": {"_type": "ClassLabel", "names": ["down", "up"]}}}})}
FILES: dict[str, tuple[str, bytes, Message | str]] = {
    # csv
    "csv: good": ("a.csv", GOOD, READ),
    "csv: only a header": ("a.csv", HEADER, Message("a.csv:1", "at least one row")),
    "csv: lines of empty cells": ("a.csv", GOOD + b",,\n , ,\n", READ),
    "csv: lines of Windows and a mark": ("a.csv", b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n"), READ),
    "csv: too many cells": ("a.csv", GOOD + b"a,b,c,1\n", Message("a.csv:4", "3 cells", "got 4", "quote")),
    "csv: a quote that does not end": ("a.csv", GOOD + b'"a,b,1\nc,d,0\n', Message("a.csv:4", "csv", "quote")),
    "csv: Latin-1": ("a.csv", GOOD + "caf\u00e9,b,1\n".encode("latin-1"), Message("a.csv:4", "UTF-8")),
    "csv: UTF-16": ("a.csv", GOOD.decode().encode("utf-16"), Message("a.csv:1", "UTF-16", "iconv")),
    "csv: a column twice": ("a.csv", b"prompt,label,prompt\na,1,b\n", Message("a.csv:1", "prompt", "twice")),
    "csv: columns of another name": (
        "a.csv",
        b"question,answer,thumb\na,b,up\n",
        Message("model.data.fields", "label:thumb"),
    ),
    "csv: a third label": ("a.csv", GOOD + b"a,b,2\n", Message("a.csv:4", "label", "2 (1 row)", "model.data.labels")),
    "csv: no answer": ("a.csv", GOOD + b"a,,1\n", READ),
    "csv: a weight that is no number": ("a.csv", b"prompt,response,label,weight\na,b,1,nan\n", Message("a.csv:2", "weight")),
    "csv: messages in Python": (
        "a.csv",
        b"messages,label\n\"[{'role': 'user', 'content': 'x'}, {'role': 'assistant', 'content': 'y'}]\",1\n",
        READ,
    ),
    "csv: a cell of an expression": ("a.csv", b"messages,label\n[{}] + f(),1\n", Message("a.csv:2", "messages", "JSON")),
    "csv: a megabyte of empty lines": (
        "a.csv.gz",
        gzip.compress(GOOD + b",,\n" * 2**19),
        Message("a.csv.gz:", "empty lines"),
    ),
    "csv: nested brackets": (
        "a.csv",
        b'messages,label\n"[{""role"":' + b"[" * 9000 + b'",1\n',
        Message("a.csv:2", "messages"),
    ),
    "csv: 20000 columns": (
        "a.csv",
        b",".join(b"c%d" % n for n in range(20_000)) + b"\n" + b"," * 19_998 + b",x\n",
        Message("a.csv:2"),
    ),
    "tsv: with commas": ("a.tsv", GOOD, READ),
    "csv: in a jsonl file": ("a.jsonl", GOOD, READ),
    "excel": ("a.xlsx", b"PK\x03\x04" + bytes(26) + b"[Content_Types].xml", Message("Excel", "save it as csv")),
    # arrays of JSON
    "json: array": ("a.json", b"[" + LINE + b"," + LINE + b"]", Message("a.json:1", "JSON array", "jq")),
    "json: brackets": ("a.json", b"[" * 100_000, Message("a.json:1", "JSON array", "jq")),
    # compressed
    "gzip: cut": ("a.jsonl.gz", gzip.compress(LINE * 1)[:-9], Message("a.jsonl.gz", "gzip", "write it again")),
    "gzip: wrong checksum": ("a.jsonl.gz", gzip.compress(LINE)[:-8] + bytes(8), Message("a.jsonl.gz", "gzip", "again")),
    "gzip: a gigabyte of empty lines": (
        "a.jsonl.gz",
        gzip.compress(LINE + b"\n") + gzip.compress(b"\n" * 2**20) * 1024,
        Message("a.jsonl.gz:", "1,048,576", "empty lines", "remove"),
    ),
    "gzip: a row after empty lines": ("a.jsonl.gz", gzip.compress(LINE + b"\n" * 2**20 + LINE), READ),
    "gzip: two files": ("a.jsonl.gz", gzip.compress(LINE + b"\n") + gzip.compress(LINE), READ),
    "gzip: 100 MB of zeros": ("a.jsonl.gz", gzip.compress(bytes(10**6)) * 100, Message("a.jsonl.gz:1", "67,108,864 bytes")),
    "gzip: 100 MB in a quote": (
        "a.csv.gz",
        gzip.compress(HEADER + b'"') + gzip.compress((b"x" * 999 + b"\n") * 10**3) * 100,
        Message("a.csv.gz:2", "67,108,864 bytes", "quoted"),
    ),
    "zstd: cut": ("a.jsonl.zst", zstd(LINE)[:-3], Message("a.jsonl.zst")),
    "zlib": ("a.jsonl", zlib.compress(LINE), Message("a.jsonl:1", "UTF-8")),
    # Parquet
    "parquet: good": ("a.parquet", TABLE, READ),
    "parquet: cut": ("a.parquet", TABLE[:-20], Message("a.parquet", "Parquet", "write it again")),
    "parquet: a damaged page": ("a.parquet", changed(TABLE, 10, 60), Message("a.parquet", "damaged", "write it again")),
    "parquet: a footer of 2 GB": (
        "a.parquet",
        TABLE[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1",
        Message("a.parquet", "Parquet"),
    ),
    "parquet: no rows": ("a.parquet", parquet_bytes({"prompt": []}), Message("a.parquet row 1", "at least one row")),
    "parquet: bytes as a prompt": (
        "a.parquet",
        parquet_bytes({"prompt": [b"p"], "response": ["r"], "label": [1]}),
        Message("a.parquet row 1", "prompt", "string"),
    ),
    "parquet: an image in a message": (
        "a.parquet",
        parquet_bytes({"messages": [[{"role": "user", "content": [{"type": "image", "text": None}]}]], "label": [1]}),
        Message("a.parquet row 1", "messages", "'image'", "text only"),
    ),
    "parquet: nulls as labels": (
        "a.parquet",
        parquet_bytes({"prompt": ["p", "q"], "response": ["r", "s"], "label": [True, None]}),
        READ,  # without the second row
    ),
    "parquet: a missing label as nan": (
        "a.parquet",
        parquet_bytes({"prompt": ["p", "q"], "response": ["r", "s"], "label": [1.0, float("nan")]}),
        READ,
    ),
    # Arrow
    "arrow: a stream": ("a.arrow", STREAM, READ),
    "arrow: a file": ("a.arrow", FILE, READ),
    "arrow: a cut stream": ("a.arrow", STREAM[: len(STREAM) // 2], Message("a.arrow", "Arrow", "write it again")),
    "arrow: wrong offsets": (
        "a.arrow",
        changed(STREAM, STREAM.index(b"pqpq") - 300, 40),
        Message("a.arrow", "write it again"),
    ),
    "arrow: classes": ("a.arrow", arrow_bytes({**COLUMNS, "label": [1, 0] * 50}, metadata=CLASSES), READ),
    "arrow: a class beyond the names": (
        "a.arrow",
        arrow_bytes({**COLUMNS, "label": [1, 7] * 50}, metadata=CLASSES),
        Message("a.arrow row 2", "label", "7 (50 rows)"),
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_is_read_or_refused(case: str, encoder: RecordEncoder, tmp_path: Path) -> None:
    name, raw, expected = FILES[case]
    (path := tmp_path / name).write_bytes(raw)
    message = file_error(path, encoder, limit=MAX_MESSAGE)
    assert message == expected
    assert message == READ or f"FOLDER/{name}" in message


FOLDERS: dict[str, tuple[Callable[[Path], object], Message]] = {
    "a saved data set without its files": (
        lambda folder: (folder / "state.json").write_text('{"_data_files": [{"filename": "none.arrow"}]}'),
        Message("none.arrow"),
    ),
    "a saved data set whose files are elsewhere": (
        lambda folder: (folder / "state.json").write_text('{"_data_files": [{"filename": "../../etc/passwd"}]}'),
        Message("../../etc/passwd", "outside"),
    ),
    "a saved data set that is not JSON": (
        lambda folder: (folder / "state.json").write_text("x"),
        Message("state.json", "JSON"),
    ),
    "splits elsewhere": (
        lambda folder: (folder / "dataset_dict.json").write_text('{"splits": ["../train"]}'),
        Message("../train", "outside"),
    ),
    "no data file": (lambda folder: (folder / "notes.txt").write_text("x"), Message(".csv", ".parquet", "none")),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_is_refused(case: str, tmp_path: Path) -> None:
    make, expected = FOLDERS[case]
    make(tmp_path)

    def read() -> None:
        for (source,) in read_data_prefix(str(tmp_path)).values():
            list(file_parts(source.files[0]))

    with pytest.raises(UserError) as raised:
        read()
    assert str(raised.value) == expected
    assert_names(raised.value, str(tmp_path))
