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

from nemo_kto.data.rows.files import file_parts
from nemo_kto.data.rows.reader import Fields, RowErrors
from nemo_kto.data.rows.records import DataError
from nemo_kto.data.rows.sources import read_data_prefix
from nemo_kto.data.tokens.cache import KTO_EXAMPLES, TokenCache
from nemo_kto.data.tokens.chat import RecordEncoder
from nemo_kto.data.tokens.truncation import Truncation
from nemo_kto.errors import UserError
from tests.helpers.messages import Message, assert_names
from tests.unit.data.tiny_data import chatml_tokenizer

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
    "csv: empty": ("a.csv", b"", Message("a.csv:1", "at least one row")),
    "csv: empty lines": ("a.csv", b"\n\r\n\n", Message("a.csv:1", "at least one row")),
    "csv: lines of empty cells": ("a.csv", GOOD + b",,\n , ,\n", READ),
    "csv: lines of Windows and a mark": ("a.csv", b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n"), READ),
    "csv: lines of an old Mac": ("a.csv", GOOD.replace(b"\n", b"\r"), Message("a.csv:1", "csv")),
    "csv: too many cells": ("a.csv", GOOD + b"a,b,c,1\n", Message("a.csv:4", "3 cells", "got 4", "quote")),
    "csv: too few cells": ("a.csv", GOOD + b"a,b\n", Message("a.csv:4", "3 cells", "got 2")),
    "csv: a quote that does not end": ("a.csv", GOOD + b'"a,b,1\nc,d,0\n', Message("a.csv:4", "csv", "quote")),
    "csv: text after a quote": ("a.csv", GOOD + b'"a"b,c,1\n', Message("a.csv:4", "csv", "quote")),
    "csv: a quote within a text": ("a.csv", HEADER + b'5" wide,b,1\n', READ),
    "csv: Latin-1": ("a.csv", GOOD + "caf\u00e9,b,1\n".encode("latin-1"), Message("a.csv:4", "UTF-8")),
    "csv: a header in Latin-1": ("a.csv", "caf\u00e9,b\n".encode("latin-1") + b"a,b\n", Message("a.csv:1", "UTF-8")),
    "csv: UTF-16": ("a.csv", GOOD.decode().encode("utf-16"), Message("a.csv:1", "UTF-16", "iconv")),
    "csv: zero bytes": ("a.csv", HEADER + b"a\0b,c,1\n", READ),
    "csv: a column twice": ("a.csv", b"prompt,label,prompt\na,1,b\n", Message("a.csv:1", "prompt", "twice")),
    "csv: a column without a name": ("a.csv", b",prompt,response,label\n0,a,b,1\n", READ),
    "csv: no known column": ("a.csv", b"x,y\na,b\n", Message("a.csv:2", "preference", "['x', 'y']")),
    "csv: one column": ("a.csv", b"prompt\na\n", Message("a.csv:2", "prompt")),
    "csv: columns of another name": (
        "a.csv",
        b"question,answer,thumb\na,b,up\n",
        Message("model.data.fields", "label:thumb"),
    ),
    "csv: an empty label": ("a.csv", GOOD + b"a,b,\n", Message("a.csv:4", "label", '"" (1 row)')),
    "csv: a third label": ("a.csv", GOOD + b"a,b,2\n", Message("a.csv:4", "label", "2 (1 row)", "model.data.labels")),
    "csv: no answer": ("a.csv", GOOD + b"a,,1\n", READ),
    "csv: a weight in words": ("a.csv", b"prompt,response,label,weight\na,b,1,two\n", Message("a.csv:2", "weight", "'two'")),
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
    "csv: a cell of 300000 characters": ("a.csv", GOOD + b"a," + b"x" * 300_000 + b",1\n", READ),
    "csv: a formula": ("a.csv", GOOD + b"=cmd|'/c calc'!A1,b,1\n", READ),
    "tsv: with commas": ("a.tsv", GOOD, READ),
    "csv: in a jsonl file": ("a.jsonl", GOOD, READ),
    "csv: prose in a jsonl file": ("a.jsonl", b"Dear all, here are the rows!\n", Message("a.jsonl:1", "JSON")),
    "excel": ("a.xlsx", b"PK\x03\x04" + bytes(26) + b"[Content_Types].xml", Message("Excel", "save it as csv")),
    "excel with the suffix of csv": ("a.csv", b"PK\x03\x04" + bytes(26) + b"[Content_Types].xml", Message("Excel", "csv")),
    "an old excel": ("a.xls", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(99), Message("Excel", "csv")),
    # arrays of JSON
    "json: good": ("a.json", b"[" + LINE + b"," + LINE + b"]", READ),
    "json: empty": ("a.json", b"[]", Message("a.json row 1", "at least one row")),
    "json: cut": ("a.json", b"[" + LINE + b"," + LINE[:9], Message("a.json row 2", "JSON")),
    "json: no end": ("a.json", b"[" + LINE, Message("a.json row 1", "JSON")),
    "json: no comma": ("a.json", b"[" + LINE + LINE + b"]", Message("a.json row 1", "JSON", "delimiter")),
    "json: lines of arrays": ("a.jsonl", b"[" + LINE + b"]\n[" + LINE + b"]", Message("a.jsonl row 2", "one JSON array")),
    "json: numbers": ("a.json", b"[" + LINE + b", 12, 13]", Message("a.json row 2", "object", "12")),
    "json: Latin-1": ("a.json", b'[{"prompt": "\xe9"}]', Message("a.json row 1", "UTF-8")),
    "json: brackets": ("a.json", b"[" * 100_000, Message("a.json row 1", "JSON")),
    "json: a long integer": ("a.json", b'[{"x": ' + b"1" * 5000 + b"}]", Message("a.json row 1", "JSON", "4300")),
    "json: an object over several lines": ("a.json", b'{\n"prompt": "p"\n}', Message("a.json:1", "JSON", "per line")),
    # compressed
    "gzip: cut": ("a.jsonl.gz", gzip.compress(LINE * 1)[:-9], Message("a.jsonl.gz", "gzip", "write it again")),
    "gzip: damaged": ("a.jsonl.gz", changed(gzip.compress(LINE), 20), Message("a.jsonl.gz", "gzip", "write it again")),
    "gzip: wrong checksum": ("a.jsonl.gz", gzip.compress(LINE)[:-8] + bytes(8), Message("a.jsonl.gz", "gzip", "again")),
    "gzip: only a header": ("a.jsonl.gz", gzip.compress(b"")[:10], Message("a.jsonl.gz", "gzip", "write it again")),
    "gzip: a gigabyte of empty lines": (
        "a.jsonl.gz",
        gzip.compress(LINE + b"\n") + gzip.compress(b"\n" * 2**24) * 64,
        Message("a.jsonl.gz:", "1,048,576", "empty lines", "remove"),
    ),
    "gzip: a row after empty lines": ("a.jsonl.gz", gzip.compress(LINE + b"\n" * 2**20 + LINE), READ),
    "gzip: nothing": ("a.jsonl.gz", gzip.compress(b""), Message("a.jsonl.gz:1", "at least one row")),
    "gzip: of Parquet": ("a.parquet.gz", gzip.compress(TABLE), Message("a.parquet.gz", "decompress it")),
    "gzip: of gzip": ("a.jsonl.gz", gzip.compress(gzip.compress(LINE)), Message("a.jsonl.gz", "gunzip")),
    "gzip: two files": ("a.jsonl.gz", gzip.compress(LINE + b"\n") + gzip.compress(LINE), READ),
    "gzip: without its suffix": ("a.csv", gzip.compress(GOOD), READ),
    "gzip: a suffix without it": ("a.csv.gz", GOOD, READ),
    "gzip: 100 MB of zeros": ("a.jsonl.gz", gzip.compress(bytes(10**8)), Message("a.jsonl.gz:1", "67,108,864 bytes")),
    "gzip: 100 MB in a quote": (
        "a.csv.gz",
        gzip.compress(HEADER + b'"' + (b"x" * 999 + b"\n") * 10**5),
        Message("a.csv.gz:2", "67,108,864 bytes", "quoted"),
    ),
    "zstd: cut": ("a.jsonl.zst", zstd(LINE)[:-3], Message("a.jsonl.zst")),
    "zstd: damaged": ("a.jsonl.zst", zstd(LINE)[:6] + b"\xff" * 50, Message("a.jsonl.zst", "zstd", "write it again")),
    "zlib": ("a.jsonl", zlib.compress(LINE), Message("a.jsonl:1", "UTF-8")),
    # Parquet
    "parquet: good": ("a.parquet", TABLE, READ),
    "parquet: cut": ("a.parquet", TABLE[:-20], Message("a.parquet", "Parquet", "write it again")),
    "parquet: only its name": ("a.parquet", b"PAR1", Message("a.parquet", "Parquet", "write it again")),
    "parquet: a damaged footer": ("a.parquet", changed(TABLE, -200, 150), Message("a.parquet", "Parquet", "write it again")),
    "parquet: a damaged page": ("a.parquet", changed(TABLE, 10, 60), Message("a.parquet", "damaged", "write it again")),
    "parquet: a footer of 2 GB": (
        "a.parquet",
        TABLE[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1",
        Message("a.parquet", "Parquet"),
    ),
    "parquet: no rows": ("a.parquet", parquet_bytes({"prompt": []}), Message("a.parquet row 1", "at least one row")),
    "parquet: no columns": ("a.parquet", parquet_bytes({}), Message("a.parquet row 1", "at least one row")),
    "parquet: bytes as a prompt": (
        "a.parquet",
        parquet_bytes({"prompt": [b"p"], "response": ["r"], "label": [1]}),
        Message("a.parquet row 1", "prompt", "string"),
    ),
    "parquet: an image": (
        "a.parquet",
        parquet_bytes({"prompt": ["p"], "response": ["r"], "label": [1], "image": [{"bytes": b"x", "path": None}]}),
        Message("a.parquet row 1", "image", "text only"),
    ),
    "parquet: an image in a message": (
        "a.parquet",
        parquet_bytes({"messages": [[{"role": "user", "content": [{"type": "image", "text": None}]}]], "label": [1]}),
        Message("a.parquet row 1", "messages", "'image'", "text only"),
    ),
    "parquet: nulls as labels": (
        "a.parquet",
        parquet_bytes({"prompt": ["p", "q"], "response": ["r", "s"], "label": [True, None]}),
        Message("a.parquet row 2", "preference", "label"),
    ),
    "parquet: a missing label as nan": (
        "a.parquet",
        parquet_bytes({"prompt": ["p", "q"], "response": ["r", "s"], "label": [1.0, float("nan")]}),
        Message("a.parquet row 2", "label", "nan (1 row)"),
    ),
    # Arrow
    "arrow: a stream": ("a.arrow", STREAM, READ),
    "arrow: a file": ("a.arrow", FILE, READ),
    "arrow: a cut stream": ("a.arrow", STREAM[: len(STREAM) // 2], Message("a.arrow", "Arrow", "write it again")),
    "arrow: a cut file": ("a.arrow", FILE[:-20], Message("a.arrow", "Arrow", "write it again")),
    "arrow: only the start of a stream": ("a.arrow", b"\xff\xff\xff\xff", Message("a.arrow", "Arrow", "write it again")),
    "arrow: a stream of noise": (
        "a.arrow",
        b"\xff\xff\xff\xff" + b"\x7f" * 99,
        Message("a.arrow", "Arrow", "write it again"),
    ),
    "arrow: wrong offsets": (
        "a.arrow",
        changed(STREAM, STREAM.index(b"pqpq") - 300, 40),
        Message("a.arrow", "write it again"),
    ),
    "arrow: a file of noise": ("a.arrow", b"ARROW1\0\0" + b"\x7f" * 99, Message("a.arrow", "Arrow", "write it again")),
    "arrow: classes": ("a.arrow", arrow_bytes({**COLUMNS, "label": [1, 0] * 50}, metadata=CLASSES), READ),
    "arrow: a class beyond the names": (
        "a.arrow",
        arrow_bytes({**COLUMNS, "label": [1, 7] * 50}, metadata=CLASSES),
        Message("a.arrow row 2", "label", "7 (50 rows)"),
    ),
    "arrow: damaged names of classes": ("a.arrow", arrow_bytes(COLUMNS, metadata={"huggingface": '{"info": 3}'}), READ),
}


@pytest.fixture(scope="module")
def encoder() -> RecordEncoder:
    return RecordEncoder(tokenizer=chatml_tokenizer())


@pytest.mark.parametrize("case", FILES)
def test_a_file_is_read_or_refused(case: str, encoder: RecordEncoder, tmp_path: Path) -> None:
    name, raw, expected = FILES[case]
    (path := tmp_path / name).write_bytes(raw)
    cut, broken = Truncation(64, "keep_end", None), RowErrors()
    cache = TokenCache(kind=KTO_EXAMPLES, folder=tmp_path / "cache", fields=Fields(), encoder=encoder, truncation=cut)
    try:
        table, _ = cache.open([path], broken=broken)[path]
        broken.raise_if_any()
    except DataError as error:
        message = str(error).replace(str(tmp_path), "FOLDER")
        assert message == expected
        assert f"FOLDER/{name}" in message
        assert len(message) < MAX_MESSAGE
        assert list((tmp_path / "cache").glob("*")) == [], "a partial table was left"
        return
    assert table is not None
    assert expected == READ
    assert len(table) > 0


FOLDERS: dict[str, tuple[Callable[[Path], object], Message]] = {
    "a saved data set without its files": (
        lambda folder: (folder / "state.json").write_text('{"_data_files": [{"filename": "none.arrow"}]}'),
        Message("none.arrow"),
    ),
    "a saved data set whose files are elsewhere": (
        lambda folder: (folder / "state.json").write_text('{"_data_files": [{"filename": "../../etc/passwd"}]}'),
        Message("../../etc/passwd", "outside"),
    ),
    "a saved data set without a list": (
        lambda folder: (folder / "state.json").write_text('{"_data_files": 5}'),
        Message("state.json", "save_to_disk"),
    ),
    "a saved data set that is not JSON": (
        lambda folder: (folder / "state.json").write_text("x"),
        Message("state.json", "JSON"),
    ),
    "splits elsewhere": (
        lambda folder: (folder / "dataset_dict.json").write_text('{"splits": ["../train"]}'),
        Message("../train", "outside"),
    ),
    "splits that are numbers": (
        lambda folder: (folder / "dataset_dict.json").write_text('{"splits": [5]}'),
        Message("dataset_dict.json", "save_to_disk"),
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
