"""The token cache: how often its files are read, the cost of many small files, and damaged files, which are replaced."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.data.rows import row_files as files
from nemo_kto.data.rows.records import DataError
from nemo_kto.data.tokens.chat_template import RecordEncoder
from nemo_kto.errors import UserError
from nemo_kto.utils import hashes
from tests.helpers.full_disk import files_of_at_most
from tests.helpers.messages import Message, assert_names, raises
from tests.unit.data.tiny_data import named, numbered_rows, prompts, splits, train_split, write_rows

FILES = 12


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The suffixes of the files of the cache that were read to be hashed."""
    files, file_hash = list[str](), hashes.file_hash

    def noting(file: Path) -> str:
        files.extend({file.suffix} & {".arrow"})
        return file_hash(file)

    monkeypatch.setattr(hashes, "file_hash", noting)
    return files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of three rows each."""
    (tmp_path / "data").mkdir()
    for number in range(FILES):
        write_rows(tmp_path / f"data/{number:02}.jsonl", numbered_rows(3, f"file {number} row"))
    return tmp_path / "data"


def expected(names: range = range(FILES)) -> list[str]:
    return [f"file {number} row {row}:" for number in names for row in range(3)]


def test_a_large_file_of_the_cache_is_read_once(tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "MIN_KEPT_BYTES", 1)
    path = write_rows(tmp_path / "a.jsonl", numbered_rows(7))
    for _ in range(3):
        splits(path, tmp_path)
        assert read == [".arrow"], "read once after writing, not on opening"
    (cached,) = (tmp_path / "cache").glob("*.arrow")
    os.utime(cached)
    splits(path, tmp_path)
    assert read == [".arrow"] * 2, "changed times"


@pytest.mark.parametrize("least", [1, hashes.MIN_KEPT_BYTES])
def test_other_rows_of_the_same_size_and_times_are_tokenised(
    tmp_path: Path, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "MIN_KEPT_BYTES", least)
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "p", "response": "r", "label": label} for label in (1, 1, 0)])
    before, found = path.stat(), []
    for _ in range(2):
        train = train_split(path, tmp_path)
        found.append([example.desirable for example in train.__getitems__(range(3))])
        path.write_text(path.read_text().replace('"label": 1', '"label": 0', 1))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert found == [[True, True, False], [False, True, False]]


def test_equal_rows_in_another_folder_are_not_tokenised_again(tmp_path: Path) -> None:
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        splits(write_rows(tmp_path / folder / "a.jsonl", numbered_rows(3)), tmp_path)
    assert len(list((tmp_path / "cache").glob("*.arrow"))) == 1


def test_many_small_files_need_few_syncs_and_log_lines(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits, fsync = list[int](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (waits.append(handle), fsync(handle)))
    caplog.set_level(logging.INFO)
    assert prompts(splits(folder, tmp_path).train) == expected()
    assert len(waits) <= 4, "syncs of the lock"
    assert len(caplog.messages) == 2
    for message in caplog.messages:
        assert_names(message, f"{FILES} files", "00.jsonl")
    assert_names(caplog.messages[0], str(tmp_path / "cache"))
    assert_names(caplog.messages[1], f"{3 * FILES} rows")


def test_groups_of_files_give_the_same_files(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files that one task tokenises together are cached as if each had a task."""
    whole = {file.name: file.read_bytes() for file in cached_files(folder, tmp_path / "whole")}
    monkeypatch.setattr(files, "MIN_BYTES", (folder / "11.jsonl").stat().st_size)  # of the others two make a group
    shown: list[tuple[str, int]] = []

    def progress(items, *, total, title):  # type: ignore[no-untyped-def]
        shown.append((title, total))
        return items

    found = cached_files(folder, tmp_path / "cache", progress=progress)
    assert {file.name: file.read_bytes() for file in found} == whole
    assert [total for _, total in shown] == [FILES]
    assert_names(shown[0][0], f"{FILES} files")


def cached_files(data: Path, cache: Path, **changes: Any) -> list[Path]:
    assert prompts(splits(data, cache.parent, cache_dir=cache, **changes).train) == expected()
    return [file for file in cache.iterdir() if file.suffix == ".arrow"]


def test_files_tokenised_by_an_interrupted_run_are_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MIN_BYTES", 1)
    encoded, encode = list[int](), RecordEncoder.encode

    def counting(self: RecordEncoder, records: list) -> list:
        if len(encoded) == 5:
            raise KeyboardInterrupt
        encoded.append(len(records))
        return encode(self, records)

    with monkeypatch.context() as patch:
        patch.setattr(files, "_part_bytes", lambda path, form: path.stat().st_size + 1)
        patch.setattr(RecordEncoder, "encode", counting)
        with pytest.raises(KeyboardInterrupt):
            splits(folder, tmp_path)
        encoded[:] = [0] * 6
        splits(folder, tmp_path)
    assert sum(encoded) == 3 * (FILES - 5)


def test_partial_files_of_a_killed_run_are_removed(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    names = {file.name for file in cached_files(folder, cache)}
    (absent,) = cache.glob("kto-05-*.arrow")
    absent.unlink()
    left, of_others = (cache / f".{name}-{'0' * 32}" for name in (absent.name, "others.arrow"))
    left.touch()
    of_others.touch()
    assert {file.name for file in cached_files(folder, cache)} == names
    assert not left.exists()
    assert of_others.exists(), "another job may be writing it"


def test_broken_rows_of_many_files_are_one_error(folder: Path, tmp_path: Path) -> None:
    write_rows(folder / "03.jsonl", [*numbered_rows(2), {"prompt": "p", "response": "r", "label": "perhaps"}])
    (folder / "05.jsonl").write_text("")
    write_rows(folder / "07.jsonl", [{"prompt": "p", "label": True}])
    with pytest.raises(DataError) as error:
        splits(folder, tmp_path)
    assert_names(error.value, "3 broken rows", "03.jsonl:3:", "05.jsonl:1:", "07.jsonl:1:", "perhaps")
    assert len(list((tmp_path / "cache").glob("*.arrow"))) == FILES - 3


def test_a_full_disk_is_named_and_the_next_start_gives_the_same_rows(folder: Path, tmp_path: Path) -> None:
    """Whichever file the disk has no room for: one of the locks, of the examples, or about the columns."""
    cache = tmp_path / "cache"
    cache.mkdir()
    for size in (0, 60, 300, 1000, 1500):
        with files_of_at_most(size), raises(UserError, str(cache), "File too large", "free space", "model.data.cache_dir"):
            splits(folder, tmp_path)
        assert not [file for file in cache.rglob("*") if file.suffix == ".json"], "no file appears complete"
    assert prompts(splits(folder, tmp_path).train) == expected()


def flip(content: bytes) -> bytes:
    """One bit of a token id is another."""
    place = content.index(b"r\0\0\0o\0\0\0w\0\0\0") if b"r\0\0\0o\0\0\0w\0\0\0" in content else len(content) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "about is empty": ("json", lambda _: b""),
    "about is no JSON": ("json", lambda content: content[:-5]),
    "about is a list": ("json", lambda _: b"[]"),
    "about is binary": ("json", lambda _: b"\xff\xfe\0"),
    "about has no hash": ("json", lambda _: b'{"rows": 7}'),
    "about has other fields": ("json", lambda content: content.replace(b'"rows"', b'"row"')),
    "arrow is empty": ("arrow", lambda _: b""),
    "arrow is cut": ("arrow", lambda content: content[: len(content) // 2]),
    "arrow lacks its end": ("arrow", lambda content: content[:-8]),
    "arrow is garbage": ("arrow", lambda content: b"x" * len(content)),
    "arrow ends in zeros": ("arrow", lambda content: content[:1000] + bytes(len(content) - 1000)),
    "arrow has a bit flipped": ("arrow", flip),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cache_files_are_replaced(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kind, change = DAMAGES[damage]
    path = write_rows(tmp_path / "a.jsonl", numbered_rows(7))
    splits(path, tmp_path)
    (cached,), (file,) = (tmp_path / "cache").glob("*.arrow"), (tmp_path / "cache").glob(f"*.{kind}")
    content = file.read_bytes()
    assert change(content) != content
    file.write_bytes(change(content))
    for warnings in ([Message(f"{cached}")], []):
        caplog.clear()
        assert prompts(splits(path, tmp_path).train) == named(7)
        assert caplog.messages == warnings


@pytest.mark.parametrize("kind", ["json", "arrow"])
def test_one_of_two_cache_files_is_missing(kind: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", numbered_rows(7))
    splits(path, tmp_path)
    (file,) = (tmp_path / "cache").glob(f"*.{kind}")
    file.unlink()
    assert prompts(splits(path, tmp_path).train) == named(7)
    assert file.exists()
