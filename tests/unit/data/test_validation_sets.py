"""Names, files and examples of several validation sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_kto.data.rows.records import DataError
from nemo_kto.errors import UserError
from tests.helpers.messages import Message, raises
from tests.unit.data.test_dataset import named, prompts, splits
from tests.unit.data.tiny_data import numbered_rows, write_rows


def write(folder: Path, **rows: int) -> dict[str, str]:
    return {name: str(write_rows(folder / f"{name}.jsonl", numbered_rows(count, name))) for name, count in rows.items()}


def test_each_set_has_the_rows_of_its_own_files(tmp_path: Path) -> None:
    files = write(tmp_path, a=4, b=3, c=2)
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder, d=2, e=3)
    sets = {"one": files["b"], "two": [files["c"], files["b"]], "blend": [1, files["b"], 1, files["c"]], "all": str(folder)}
    built = splits({"train": files["a"], "validation": sets, "test": files["c"]}, tmp_path)
    assert prompts(built.train) == named(4, "a")
    assert list(built.validation) == ["one", "two", "blend", "all"]
    assert prompts(built.validation["one"]) == named(3, "b")
    assert prompts(built.validation["two"]) == named(2, "c") + named(3, "b")
    assert sorted(set(prompts(built.validation["blend"]))) == named(3, "b") + named(2, "c")
    assert prompts(built.validation["all"]) == named(2, "d") + named(3, "e")
    assert list(built.in_use) == ["train", "validation.one", "validation.two", "validation.blend", "validation.all"]
    assert len(built.warnings) == 1, "only of the test rows"


def test_all_set_names_unsuitable_for_metrics_are_reported(tmp_path: Path) -> None:
    file = write(tmp_path, a=4)["a"]
    sets = dict.fromkeys(["help ful", "ok_1", "", "a/b", "größe", 2024], file)
    with pytest.raises(DataError) as error:
        splits({"train": file, "validation": sets}, tmp_path)
    assert str(error.value) == Message("data_prefix", "validation", "help", "''", "a/b", "größe", "rename")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"one": {"two": "a.jsonl"}}, Message("file", "folder", "list", "two", "a.jsonl")),
        ({"one": "nowhere.jsonl"}, Message("data_prefix", "nowhere.jsonl")),
    ],
)
def test_a_set_is_made_of_files(tmp_path: Path, value: object, words: Message) -> None:
    with raises(DataError, *words.parts):
        splits({"train": write(tmp_path, a=4)["a"], "validation": value}, tmp_path)


def test_too_small_sets_are_refused_together(tmp_path: Path) -> None:
    files = write(tmp_path, a=4, b=1, c=1)
    prefix = {"train": files["a"], "validation": {"good": files["a"], "b": files["b"], "c": files["c"]}}
    with pytest.raises(UserError) as error:
        splits(prefix, tmp_path, min_validation_rows=2)
    assert str(error.value) == Message(
        "model.data.data_prefix", "2", "validation", "1", "validation.b", "validation.c", "add"
    )
    assert splits(prefix, tmp_path, min_validation_rows=1).validation.keys() == {"good", "b", "c"}
