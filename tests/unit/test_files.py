"""Files and folders that appear complete or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_kto.files import partial_folder, publish_file, publish_folder, remove_folder, start_folder


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


@pytest.mark.parametrize("durable", [False, True])
def test_a_folder_replaces_an_earlier_one(durable: bool, tmp_path: Path) -> None:
    target = tmp_path / "out"
    for content in ("first", "second"):
        (start_folder(target) / "left").write_text("of a writer that was interrupted")
        (start_folder(target) / content).write_text(content)
        publish_folder(target, durable=durable)
        assert (names(tmp_path), names(target)) == (["out"], [content])
    assert not partial_folder(target).exists()


def test_a_removal_that_was_interrupted_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / ".removing-out" / "half").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    remove_folder(tmp_path / "out")
    assert names(tmp_path) == []
