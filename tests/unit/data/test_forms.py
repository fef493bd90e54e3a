"""Every form of a data file gives the examples of the jsonl file with the same rows."""

from __future__ import annotations

import csv
import gzip
import json
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow
import pytest
from pyarrow import parquet

from nemo_kto.data.rows import data_sources as sources
from nemo_kto.data.rows import row_files as files
from nemo_kto.data.rows.data_sources import WHOLE, data_files, read_data_prefix
from nemo_kto.data.rows.forms import find_form, row_place
from nemo_kto.data.rows.reader import Fields, FileColumns, RowErrors
from nemo_kto.data.rows.records import DataError
from nemo_kto.data.rows.row_files import FilePart, file_parts, number_of_parts, read_rows
from nemo_kto.data.tokens.cache import DPO_EXAMPLES, KTO_EXAMPLES, ExampleKind, TokenCache
from nemo_kto.data.tokens.chat_template import RecordEncoder
from nemo_kto.data.tokens.truncation import Truncation
from tests.helpers.messages import raises
from tests.unit.data.tiny_data import chatml_tokenizer, write_rows

ENCODER = RecordEncoder(tokenizer=chatml_tokenizer())
TEXT = 'line one\nline "two", caf\u00e9; 007\tand'


def kto_rows(count: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"prompt": f"{TEXT} {n}", "response": f"{n}", "label": n % 3 == 0, "weight": 1 + n % 2, "id": n}
        for n in range(count)
    ]
    for row in rows[::4]:
        texts = {"user": row.pop("prompt"), "assistant": row.pop("response")}
        row["messages"] = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in texts.items()]
    return rows


def dpo_rows(count: int) -> list[dict[str, Any]]:
    rows = [{"prompt": f"{TEXT} {n}", "chosen": f"{n}", "rejected": "no", "id": n} for n in range(count)]
    for row in rows[::2]:
        row |= {"chosen_reward": 2.5, "rejected_reward": -1}
    return rows


def write_csv(path: Path, rows: Sequence[dict], delimiter: str = ",") -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, names, delimiter=delimiter)
        writer.writeheader()
        writer.writerows(
            {name: json.dumps(cell) if isinstance(cell, list) else cell for name, cell in row.items()} for row in rows
        )


def table_of(rows: Sequence[dict]) -> pyarrow.Table:
    """A table with all columns of the rows: a type is that of the last row that has the column."""
    merged = {name: value for row in rows for name, value in row.items()}
    return pyarrow.Table.from_pylist(list(rows), pyarrow.Table.from_pylist([merged]).schema)


def write_parquet(path: Path, rows: Sequence[dict]) -> None:
    parquet.write_table(table_of(rows), path, row_group_size=7)


def write_arrow(path: Path, rows: Sequence[dict], new: Callable[..., Any] = pyarrow.ipc.new_file) -> None:
    table = table_of(rows)
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def compressed(write: Callable[[Path, Sequence[dict]], object], kind: str) -> Callable[[Path, Sequence[dict]], None]:
    def write_compressed(path: Path, rows: Sequence[dict]) -> None:
        write(plain := path.with_name("plain"), rows)
        if kind == "gzip":
            path.write_bytes(gzip.compress(plain.read_bytes()))
        else:
            with pyarrow.CompressedOutputStream(str(path), kind) as stream:
                stream.write(plain.read_bytes())
        plain.unlink()

    return write_compressed


FORMS: dict[str, Callable[[Path, Sequence[dict]], object]] = {
    "rows.csv": write_csv,
    "rows.tsv": lambda path, rows: write_csv(path, rows, "\t"),
    "semicolons.csv": lambda path, rows: write_csv(path, rows, ";"),
    "rows.json": write_rows,
    "rows.parquet": write_parquet,
    "rows.arrow": write_arrow,
    "stream.arrow": partial(write_arrow, new=pyarrow.ipc.new_stream),
    "rows.jsonl.gz": compressed(write_rows, "gzip"),
    "rows.jsonl.zst": compressed(write_rows, "zstd"),
    "rows.csv.gz": compressed(write_csv, "gzip"),
    # with the suffix of another form
    "csv as.jsonl": write_csv,
    "parquet as.csv": write_parquet,
    "jsonl as.csv": write_rows,
    "gzip as.jsonl": compressed(write_rows, "gzip"),
}


def examples(path: Path, folder: Path, kind: ExampleKind = KTO_EXAMPLES) -> tuple[list[dict], FileColumns]:
    """The cached examples of a file, without their lines."""
    broken, cut = RowErrors(), Truncation(64, "keep_end", None)
    cache = TokenCache(kind=kind, folder=folder, fields=Fields(), encoder=ENCODER, truncation=cut)
    table, columns = cache.open([path], broken=broken)[path]
    broken.raise_if_any()
    assert table is not None
    return [{name: value for name, value in row.items() if name != "line"} for row in table.to_pylist()], columns


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("rows", "kind"), [(kto_rows(30), KTO_EXAMPLES), (dpo_rows(30), DPO_EXAMPLES)], ids=["kto", "dpo"])
def test_a_form_gives_the_examples_of_jsonl(
    name: str, rows: list[dict], kind: ExampleKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, columns = examples(write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "jsonl", kind)
    FORMS[name](path := tmp_path / name, rows)
    found, of_form = examples(path, tmp_path / "whole", kind)
    assert found == expected
    assert of_form.labels.keys() == columns.labels.keys()
    monkeypatch.setattr(files, "MIN_BYTES", 200)
    monkeypatch.setattr(files, "_SCAN_BYTES", 50)
    assert number_of_parts(path) >= 2
    found, in_parts = examples(path, tmp_path / "parts", kind)
    assert found == expected
    assert in_parts == of_form


@pytest.mark.parametrize(
    ("name", "convert"), [("rows.json", "jq -c '.[]' FILE"), ("rows.json.gz", "zcat FILE | jq -c '.[]'")]
)
def test_a_json_array_is_refused_with_its_conversion(name: str, convert: str, tmp_path: Path) -> None:
    content = json.dumps(kto_rows(2), indent=1).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with raises(DataError, f"{tmp_path / name}:1", "one object per line", "JSON array", f"{convert} > converted.jsonl"):
        find_form(tmp_path / name)


def test_lines_of_csv_and_rows_of_tables_are_counted(tmp_path: Path) -> None:
    rows = kto_rows(9)
    write_csv(tmp_path / "a.csv", rows)
    write_parquet(tmp_path / "a.parquet", rows)
    lines = [number for number, _ in read_rows(tmp_path / "a.csv")]
    assert lines[:4] == [2, 3, 5, 7]  # the prompts have two lines, but not messages in JSON
    assert [number for number, _ in read_rows(tmp_path / "a.parquet")] == list(range(1, 10))
    parts = list(file_parts(tmp_path / "a.parquet"))
    assert [number for number, _ in read_rows(tmp_path / "a.parquet", FilePart(start=1, first_line=8))] == [8, 9]
    assert len(parts) == 1
    assert row_place(tmp_path / "a.csv", 17) == f"{tmp_path}/a.csv:17"
    assert row_place(tmp_path / "a.parquet", 17) == f"{tmp_path}/a.parquet row 17"


def test_a_broken_row_is_named_by_line_or_row(tmp_path: Path) -> None:
    rows = kto_rows(9)
    rows[5]["weight"] = -2
    write_csv(tmp_path / "a.csv", rows)
    write_parquet(tmp_path / "a.parquet", rows)
    with raises(DataError, "1 broken row:", f"{tmp_path}/a.csv:10:", "weight", "got -2.0"):
        examples(tmp_path / "a.csv", tmp_path / "cache")
    with raises(DataError, "1 broken row:", f"{tmp_path}/a.parquet row 6:", "weight", "got -2"):
        examples(tmp_path / "a.parquet", tmp_path / "cache")


def test_folders_of_save_to_disk(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "response": f"{n}", "label": n % 2} for n in range(9)]
    text, label = datasets.Value("string"), datasets.ClassLabel(names=["up", "down"])
    features = datasets.Features(prompt=text, response=text, label=label)
    data = datasets.Dataset.from_list(rows, features=features)
    data.save_to_disk(tmp_path / "saved", num_shards=2)
    saved = data_files(tmp_path / "saved")
    assert [file.name for file in saved] == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    assert [find_form(file).kind for file in saved] == ["arrow", "arrow"]
    # the names of the classes count, not their numbers
    with_names = [row | {"label": ("up", "down")[number % 2]} for number, row in enumerate(rows)]
    expected, _ = examples(write_rows(tmp_path / "a.jsonl", with_names), tmp_path / "cache")
    found = [example for file in saved for example in examples(file, tmp_path / "cache")[0]]
    assert found == expected
    assert [example["desirable"] for example in found[:3]] == [True, False, True]
    datasets.DatasetDict(train=data, test=data).save_to_disk(tmp_path / "splits")
    splits = read_data_prefix(str(tmp_path / "splits"))
    folders = {split: [file.parent.name for file in source.files] for split, (source,) in splits.items()}
    assert folders == {"train": ["train"], "test": ["test"]}
    datasets.DatasetDict(train_prefs=data, test_prefs=data).save_to_disk(tmp_path / "prefs")
    with raises(DataError, "train_prefs, test_prefs", f"{tmp_path}/prefs/test_prefs"):
        read_data_prefix(str(tmp_path / "prefs"))


def test_files_of_a_folder_have_one_form(tmp_path: Path) -> None:
    for name in ("b.csv", "a.csv.gz", "notes.md", "info.json"):
        (tmp_path / name).write_text("x")
    assert [file.name for file in data_files(tmp_path)] == ["a.csv.gz", "b.csv"]
    (tmp_path / "c.parquet").write_text("x")
    with raises(DataError, ".csv", ".parquet", "one form", "data_prefix"):
        data_files(tmp_path)
    (tmp_path / "d.jsonl").write_text("{}")
    assert [file.name for file in data_files(tmp_path)] == ["d.jsonl"]


def test_urls_are_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "downloads"))
    rows = kto_rows(5)
    write_csv(tmp_path / "rows.csv", rows)
    with fsspec.open("memory://bucket/rows.csv", "wb") as file:
        file.write((tmp_path / "rows.csv").read_bytes())
    ((source,),) = read_data_prefix("memory://bucket/rows.csv").values()
    (path,) = source.files
    assert path.name == "rows.csv"
    assert path.read_bytes() == (tmp_path / "rows.csv").read_bytes()
    with raises(DataError, "memory://bucket/none.csv", "correct the address"):
        read_data_prefix("memory://bucket/none.csv")
    with raises(DataError, "s3://bucket/rows.csv", "s3fs"):
        read_data_prefix("s3://bucket/rows.csv")


def test_a_changed_file_at_a_web_address_is_downloaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed file has the same size and name; without the server, the last copy is used."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "downloads"))
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url, file = f"http://127.0.0.1:{server.server_port}/rows.jsonl", tmp_path / "rows.jsonl"

    def read_in_another_process() -> str:
        sources._downloaded.cache_clear()
        return data_files(url)[0].read_text()

    for day, text in enumerate(("one", "two")):
        file.write_text(text)
        os.utime(file, (day * 86_400, day * 86_400))
        assert read_in_another_process() == text
    server.shutdown()
    server.server_close()
    assert read_in_another_process() == "two"


def test_data_sets_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are read without a network, from a cache as `datasets` writes it."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    rows = [{"prompt": "p", "response": f"{n}", "label": ("yes", "no")[n % 2]} for n in range(9)]
    expected, _ = examples(file := write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "cache")
    for name, splits in (("whole", ["train"]), ("parts", ["train", "test"]), ("prefs", ["train_prefs", "test_prefs"])):
        builder = datasets.load_dataset_builder("json", data_files=dict.fromkeys(splits, str(file)), cache_dir=str(tmp_path))
        builder.dataset_name = name
        builder.download_and_prepare(str(tmp_path / f"org___{name}" / "default" / "0.0.0" / ("0123456789abcdef" * 2)))
    (source,) = read_data_prefix("hf:org/whole")[WHOLE]
    assert [example for file in source.files for example in examples(file, tmp_path / "cache")[0]] == expected
    assert read_data_prefix("hf:org/whole:train") == read_data_prefix("hf:org/whole:default:train") == {WHOLE: (source,)}
    assert list(read_data_prefix("hf:org/parts")) == ["train", "test"]
    for name in ("hf:org/prefs:train_prefs", "hf:org/prefs:default:train_prefs"):
        assert read_data_prefix({"train": name}) == {"train": read_data_prefix(name)[WHOLE]}
    with raises(DataError, "hf:org/prefs", "train_prefs, test_prefs", "{train: hf:org/prefs:test_prefs"):
        read_data_prefix("hf:org/prefs")
    with raises(DataError, "hf:org/prefs", "splits", "got other"):
        read_data_prefix("hf:org/prefs:other")
    with raises(DataError, "hf:org/prefs", "name one of its splits", "hf:org/prefs:test_prefs"):
        read_data_prefix(["hf:org/prefs", "hf:org/whole"])
    with raises(DataError, "hf:org/none", "HF_HUB_OFFLINE"):
        read_data_prefix("hf:org/none")
