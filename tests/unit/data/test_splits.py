"""Splits of small and large data, and their statistics; several validation sets: names, files and examples."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.data.batches.dataset import DPODataset, SplitCounts
from nemo_kto.data.batches.splits import Range, join_small, split_ranges
from nemo_kto.data.rows.data_sources import SPLITS, UNNAMED, Source, split_shares
from nemo_kto.data.rows.records import DataError
from nemo_kto.data.tokens.cache import DPO_EXAMPLES
from nemo_kto.data.tokens.chat_template import RecordEncoder
from nemo_kto.errors import UserError
from tests.helpers.messages import Message, raises
from tests.unit.data.tiny_data import TOKENIZER, named, numbered_rows, prompts, splits, train_split, write_rows

SOURCE = Source((), None)


def sizes(rows: int, splits_string: str, least: int) -> tuple[list[int], list[str]]:
    """Sizes of train, validation and test, and the message, without reading rows."""
    cuts = split_ranges(rows, split_shares(splits_string, rows), lambda place: False)
    ranges: dict[str, list[Range]] = {split: [(SOURCE, *cut)] for split, cut in zip(SPLITS, cuts, strict=True)}
    message = join_small(ranges, splits_string, least)
    return [sum(stop - start for _, start, stop in ranges[split]) for split in SPLITS], message


@pytest.mark.parametrize("least", [1, 2])  # DPO, KTO
def test_the_default_split_leaves_no_row_unused(least: int) -> None:
    small = dict.fromkeys((2, 3, 40, 63, 64, 65, *range(75, 177), 199), 0)
    large = {200: 20, 1000: 20, 3000: 30, 999_999: 9999, 1_000_000: 10_000, 40_000_000: 10_000}
    for rows, validation in {**small, **large}.items():
        found, message = sizes(rows, "auto", least)
        percent = min(50, -(-2000 // rows))  # of which 20 rows are validated
        assert found == [rows - validation, validation, 0]
        remedy = f'model.data.splits_string="{100 - percent},{percent}"'
        assert message == ([] if validation else [Message("validation", f"{rows}", "all", remedy, "null")])


def test_a_validation_split_of_one_row_joins_training_if_two_are_needed() -> None:
    found, message = sizes(100, "98,1,1", 2)
    assert found == [99, 0, 1]
    assert message == [
        Message("validation", "1", "100", 'model.data.splits_string="80,20"', "null"),
        Message("test", "1", "100", "nothing", "number", "model.data.splits_string=98,1,1"),
    ]
    assert sizes(100, "98,1,1", 1)[0] == [98, 1, 1]
    assert sizes(100, "98,2", 2) == ([98, 2, 0], [])
    assert sizes(10, "1", 2) == ([10, 0, 0], [])


def test_a_too_small_named_validation_split_is_dropped(tmp_path: Path) -> None:
    files = {name: str(write_rows(tmp_path / f"{name}.jsonl", numbered_rows(n, name))) for name, n in (("a", 4), ("b", 1))}
    built = splits({"train": files["a"], "validation": files["b"], "test": files["a"]}, tmp_path, min_validation_rows=2)
    assert built.train is not None
    assert len(built.train) == 4
    assert built.validation == {}
    assert built.warnings == (
        Message("validation", "1", "2", "model.data.data_prefix"),
        Message("test", "4", "nothing", "model.data.data_prefix"),
    )
    built = splits({"train": files["a"], "validation": files["b"]}, tmp_path, min_validation_rows=1)
    assert [len(examples) for examples in built.validation.values()] == [1]


def test_a_split_with_one_label_gives_a_warning(tmp_path: Path) -> None:
    rows = sorted(numbered_rows(10), key=lambda row: row["preference"])
    built = splits(write_rows(tmp_path / "a.jsonl", rows), tmp_path, "50,50")
    assert built.train is not None
    for (name, dataset), label in zip(built.in_use.items(), ("desirable", "undesirable"), strict=True):
        message = list(dataset.counts.warnings(name, seq_length=32))
        assert message == [Message(f"{name}", "all", "5", f"{label}", "file", "label")]


LONG = [
    {"prompt": "a" * 6, "response": "b" * 3, "label": True},  # 6 + 4 with the end
    {"prompt": "a" * 9, "response": "b" * 3, "label": True},
    {"prompt": "a", "response": "b" * 12, "label": False},
    {"prompt": "a" * 3, "response": "b" * 12, "label": False},
]


def test_truncations_are_counted_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "a.jsonl", LONG)
    for _ in range(2):
        train = train_split(path, tmp_path, seq_length=10)
        assert train.counts == SplitCounts(rows=4, desirable=2, tokens=40, longest=15, cut_prompts=2, cut_responses=2)
        lengths = {name: each.counts for name, each in train.length_histograms().items()}
        assert [*lengths] == ["prompt", "desirable", "undesirable"]
        assert (sum(lengths["prompt"]), lengths["desirable"]) == (4, [0, 0, 0, 0, 2])
        assert (sum(lengths["undesirable"]), len(lengths["undesirable"])) == (2, 10)
        assert list(train.counts.warnings("train", seq_length=10)) == [
            Message("train", "prompt", "2", "4", "model.data.seq_length=10"),
            Message("train", "answer", "2", "4", "model.data.seq_length=10"),
        ]
        monkeypatch.setattr(RecordEncoder, "encode", None)  # the second time it is not needed


def test_counts_of_pairs(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"prompt": "a" * 4, "chosen": "b", "rejected": "b" * 12, "id": 1},
        {"prompt": "a" * 4, "chosen": "b", "rejected": "c"},
    ]
    make = partial(DPODataset, default_chosen_reward=1.0, default_rejected_reward=0.0)
    path = write_rows(tmp_path / "a.jsonl", rows)
    counts = train_split(path, tmp_path, seq_length=10, kind=DPO_EXAMPLES, make=make).counts
    assert counts == SplitCounts(rows=2, desirable=None, tokens=3 + 10 + 12, longest=13, cut_prompts=1, cut_responses=1)
    assert counts.classes == {}
    warning = list(counts.warnings("train", seq_length=10))[1]
    assert warning == Message("train", "answer", "1", "2", "model.data.seq_length=10")


@pytest.mark.parametrize("prefix", ["appended", "blended"])
def test_the_source_row_of_an_example(prefix: str, tmp_path: Path) -> None:
    pairs = [{"prompt": f"p {i}:", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(3)]
    files = [write_rows(tmp_path / "a.jsonl", numbered_rows(6, "a")), write_rows(tmp_path / "b.jsonl", pairs)]
    names = [str(file) for file in files]
    built = splits(names if prefix == "appended" else [1, names[0], 1, names[1]], tmp_path, "50,50")
    for dataset in (built.train, built.validation[UNNAMED]):
        assert dataset is not None
        for number, example in enumerate(dataset.__getitems__(range(len(dataset)))):
            (name,) = dataset.names([number])
            file, line = name.rsplit(":", 1)
            prompt, place = TOKENIZER.decode(example.prompt_ids).rstrip(":").split(" ")
            assert (file, int(line)) == (names[prompt == "p"], int(place) + 1)
    if prefix == "appended":
        assert built.train is not None
        assert built.train.names([4, 3, 0, 4]) == [f"{names[1]}:1", f"{names[0]}:1"], "both answers of a pair are one row"


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
