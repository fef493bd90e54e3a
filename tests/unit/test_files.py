"""Files and folders that appear complete or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nemo_kto.files import make_folder, partial_folder, publish_file, publish_folder, remove_folder, start_folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    with publish_file(target) as writing:
        writing.write_text("new")
        assert target.read_text() == "old"
    assert (names(tmp_path), target.read_text()) == (["a.txt"], "new")


def test_a_file_of_a_block_that_raises_does_not_appear(tmp_path: Path) -> None:
    def write_half() -> None:
        with publish_file(tmp_path / "a.txt") as writing:
            writing.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert names(tmp_path) == []


def test_a_file_that_the_block_removes_does_not_appear(tmp_path: Path) -> None:
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


def test_a_removal_that_was_interrupted_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / ".removing-out" / "half").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    remove_folder(tmp_path / "out")
    assert names(tmp_path) == []


def modes(folder: Path) -> set[tuple[str, int]]:
    return {(path.name, path.stat().st_mode & 0o777) for path in folder.rglob("*")}


@pytest.mark.parametrize(("private", "folder_mode", "file_mode"), [(True, 0o700, 0o600), (False, 0o755, 0o644)])
def test_private_files_are_so_from_their_first_byte(private: bool, folder_mode: int, file_mode: int, tmp_path: Path) -> None:
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
