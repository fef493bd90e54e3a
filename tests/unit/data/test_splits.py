"""Splits of small and large data, and their statistics."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.data.batches.dataset import DPODataset, KTODataset, SplitCounts
from nemo_kto.data.batches.splits import Range, Splits, build_splits, join_small, split_ranges
from nemo_kto.data.rows.data_sources import SPLITS, UNNAMED, Source, split_shares
from nemo_kto.data.tokens.chat_template import RecordEncoder
from nemo_kto.data.tokens.tokeniser import DPO_EXAMPLES, KTO_EXAMPLES
from tests.helpers.messages import Message
from tests.unit.data.tiny_data import chatml_tokenizer, numbered_rows, write_rows

TOKENIZER = chatml_tokenizer()
SOURCE = Source((), None)


def splits(data_prefix: object, tmp_path: Path, splits_string: str | None = "auto", **changes: object) -> Splits[KTODataset]:
    settings: dict = {"kind": KTO_EXAMPLES, "make": KTODataset, "min_validation_rows": 2}
    settings |= {"tokenizer": TOKENIZER, "seq_length": 32, "truncation_mode": "keep_end", "seed": 5}
    settings |= {"cache_dir": tmp_path / "cache", **changes}
    return build_splits(data_prefix=data_prefix, splits_string=splits_string, **settings)


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
        assert message == (
            []
            if validation
            else [
                Message(
                    "validation",
                    f"{rows}",
                    "all",
                    f'model.data.splits_string="{100 - percent},{percent}"',
                    "null",
                )
            ]
        )


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
    built = splits({"train": files["a"], "validation": files["b"], "test": files["a"]}, tmp_path)
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
        built = splits(path, tmp_path, None, seq_length=10)
        assert built.train is not None
        assert built.train.counts == SplitCounts(rows=4, desirable=2, tokens=40, longest=15, cut_prompts=2, cut_responses=2)
        lengths = {name: each.counts for name, each in built.train.length_histograms().items()}
        assert [*lengths] == ["prompt", "desirable", "undesirable"]
        assert (sum(lengths["prompt"]), lengths["desirable"]) == (4, [0, 0, 0, 0, 2])
        assert (sum(lengths["undesirable"]), len(lengths["undesirable"])) == (2, 10)
        assert list(built.train.counts.warnings("train", seq_length=10)) == [
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
    built: Splits[DPODataset]
    path = write_rows(tmp_path / "a.jsonl", rows)
    built = splits(path, tmp_path, None, seq_length=10, kind=DPO_EXAMPLES, make=make)  # type: ignore[assignment]
    assert built.train is not None
    assert built.train.counts == SplitCounts(
        rows=2, desirable=None, tokens=3 + 10 + 12, longest=13, cut_prompts=1, cut_responses=1
    )
    assert built.train.counts.classes == {}
    assert list(built.train.counts.warnings("train", seq_length=10))[1] == Message(
        "train", "answer", "1", "2", "model.data.seq_length=10"
    )


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
