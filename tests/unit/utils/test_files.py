"""Safe reading of untrusted files, and atomic publishing of files and folders."""

from __future__ import annotations

import gzip
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_kto.errors import UserError
from nemo_kto.utils import files
from nemo_kto.utils.files import (
    make_folder,
    open_file,
    other_format,
    partial_folder,
    publish_file,
    publish_folder,
    read_json,
    read_lines,
    remove_folder,
    start_folder,
)
from tests.helpers.messages import assert_names


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_published_when_complete(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    with publish_file(target) as writing:
        writing.write_text("new")
        assert target.read_text() == "old"
    assert (names(tmp_path), target.read_text()) == (["a.txt"], "new")


def test_a_file_is_not_published_after_an_error(tmp_path: Path) -> None:
    def write_half() -> None:
        with publish_file(tmp_path / "a.txt") as writing:
            writing.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert names(tmp_path) == []


def test_a_removed_temporary_file_is_not_published(tmp_path: Path) -> None:
    with publish_file(tmp_path / "a.txt") as writing:
        writing.write_text("refused")
        writing.unlink()
    assert names(tmp_path) == []


def test_a_folder_replaces_an_earlier_one(tmp_path: Path) -> None:
    target = tmp_path / "out"
    for content in ("first", "second"):
        (start_folder(target) / "left").write_text("of a writer that was interrupted")
        (start_folder(target) / content).write_text(content)
        publish_folder(target)
        assert (names(tmp_path), names(target)) == (["out"], [content])
    assert not partial_folder(target).exists()


def test_an_interrupted_removal_is_completed(tmp_path: Path) -> None:
    (tmp_path / ".removing-out" / "half").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    remove_folder(tmp_path / "out")
    assert names(tmp_path) == []


def modes(folder: Path) -> set[tuple[str, int]]:
    return {(path.name, path.stat().st_mode & 0o777) for path in folder.rglob("*")}


@pytest.mark.parametrize(("private", "folder_mode", "file_mode"), [(True, 0o700, 0o600), (False, 0o755, 0o644)])
def test_private_files_have_private_permissions_from_the_start(
    private: bool, folder_mode: int, file_mode: int, tmp_path: Path
) -> None:
    before = os.umask(0o022)
    try:
        make_folder(tmp_path / "a" / "b", private=private)
        with publish_file(tmp_path / "a" / "b" / "c", private=private) as writing, writing.open("w") as file:
            assert writing.stat().st_mode & 0o777 == file_mode
            file.write("text")
    finally:
        os.umask(before)
    assert modes(tmp_path) == {("a", folder_mode), ("b", folder_mode), ("c", file_mode)}
    assert (tmp_path / "a" / "b" / "c").read_text() == "text"


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


IRREGULAR: dict[str, Callable[[Path], object]] = {
    "a named pipe (FIFO)": os.mkfifo,
    "a socket": make_socket,
    "a character device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
}


@pytest.mark.parametrize("kind", IRREGULAR)
def test_only_regular_files_are_opened_and_others_are_named_at_once(kind: str, tmp_path: Path) -> None:
    path = Path(os.path.relpath(tmp_path / "x"))  # as the name of a socket is short
    IRREGULAR[kind](path)
    with pytest.raises(OSError, match="regular file") as raised:
        open_file(path)
    assert_names(raised.value.strerror, kind, "regular file")
    with pytest.raises(UserError) as refused:
        read_json(path, remedy="ask for it")
    assert_names(refused.value, str(path), kind, "ask for it")


def test_the_error_of_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "nowhere")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="folder"):
        open_file(tmp_path)
    assert os.listdir("/proc/self/fd") == before


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "x.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(UserError) as raised:
        read_json(tmp_path / "x.json")
    assert_names(raised.value, "x.json", f"{files.MAX_FILE_BYTES:,}", f"{2**40:,}")


def test_a_too_long_line_is_truncated_and_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 4)
    (tmp_path / "x").write_bytes(b"123\n1234567\n1\n")
    with open_file(tmp_path / "x") as handle:
        assert list(read_lines(handle)) == [b"123\n", b"12345"]


@pytest.mark.parametrize(
    ("start", "remedy"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git lfs pull"),
        (gzip.compress(b"{}"), "gunzip"),
        (b"PAR1\x15", "read_parquet"),
        (b"\x80\x04\x95", "pickle"),
        ('{"a": 1}'.encode("utf-16"), "iconv -f UTF-16"),
        ('{"a": 1}'.encode("utf-16-be"), "iconv -f UTF-16BE"),
        ('{"a": 1}'.encode("utf-32"), "iconv -f UTF-32"),
        (b"\n<!DOCTYPE html><html>", "web page"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_of_another_format_is_named_with_its_remedy(start: bytes, remedy: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(start)
    with pytest.raises(UserError) as raised:
        read_json(tmp_path / "x.json")
    assert_names(raised.value, str(tmp_path / "x.json"), "must be JSON", remedy)


@pytest.mark.parametrize("start", [b"", b'[{"prompt": "p"}]', b" {", "\ufeff{}".encode(), b"\0" * 64])
def test_json_is_not_mistaken_for_another_format(start: bytes) -> None:
    assert other_format(start) is None
