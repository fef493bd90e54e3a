"""Rows that ``model.data.drop`` leaves out: without a label, with an empty answer, repeated, contradictory."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.data.batches.dataset import DPODataset
from nemo_kto.data.batches.splits import Splits
from nemo_kto.data.rows.records import DROPS, DataError
from nemo_kto.data.tokens.cache import DPO_EXAMPLES
from nemo_kto.errors import UserError
from tests.helpers.messages import raises
from tests.unit.data.tiny_data import splits, write_rows

ALL = tuple(DROPS)


def row(prompt: str, response: str, label: object) -> dict[str, object]:
    return {"prompt": prompt, "response": response, "label": label}


ROWS = [
    row("a", "1", True),
    row("a", "", True),
    row("b", "2", None),
    row("c", "3", True),
    row("a", "1", True),  # a duplicate of the first
    row("c", "3", False),  # contradicts the fourth
    row("d", "4", ""),
    row("d", "5", False),
]
PAIRS = [
    {"prompt": "a", "chosen": "1", "rejected": "2"},
    {"prompt": "a", "chosen": "1", "rejected": "2"},
    {"prompt": "b", "chosen": "1", "rejected": ""},
    {"prompt": "c", "chosen": "1", "rejected": "2"},
    {"prompt": "c", "chosen": "2", "rejected": "1"},
]


def split(folder: Path, rows: list[dict[str, object]], *, pairs: bool = False, **settings: Any) -> Splits[Any]:
    given: dict[str, Any] = {"data_prefix": str(write_rows(folder / "rows.jsonl", rows)), "tmp_path": folder}
    given |= {"seed": 1, "seq_length": 64, "cache_dir": folder}
    if pairs:
        make = partial(DPODataset, default_chosen_reward=1.0, default_rejected_reward=0.0)
        given |= {"kind": DPO_EXAMPLES, "make": make}
    return splits(**given | settings)


def turn(text: str, *, role: str = "user", **fields: object) -> dict[str, object]:
    return {"role": role, "content": text, **fields}


CALLS = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]
# With a template that writes role and content of each message, and nothing else.
WITH_LOSSES = [
    row([turn("a")], [turn("1", role="assistant")], True),  # type: ignore[arg-type]
    row([turn("a")], [turn("", role="assistant", tool_calls=CALLS)], True),  # type: ignore[arg-type]
    row([turn("b")], [turn("2", role="assistant", reasoning_content="because")], False),  # type: ignore[arg-type]
    row([turn("c<|im_end|>")], [turn("3", role="assistant")], True),  # type: ignore[arg-type]
    row([turn("d")], [turn("<|im_end|>", role="assistant")], False),  # type: ignore[arg-type]
]


def lines(examples: Any) -> list[int]:
    return [origin.line for origin in examples.origins(range(len(examples)))]


@pytest.mark.parametrize(
    ("rows", "drop", "kept"),
    [
        (ROWS, None, [1, 2, 4, 5, 6, 8]),
        (ROWS, ["unlabelled", "empty_answers"], [1, 4, 5, 6, 8]),
        (ROWS, ["unlabelled", "duplicates"], [1, 2, 4, 6, 8]),
        (ROWS, ["unlabelled", "contradictions"], [1, 2, 5, 8]),
        (ROWS, ALL, [1, 8]),
        (WITH_LOSSES, ["lost_text"], [1, 4, 5]),
        (WITH_LOSSES, ["lost_text", "empty_answers"], [1, 4]),
        (PAIRS, None, [1, 2, 3, 4, 5]),
        (PAIRS, ALL, [1]),
    ],
)
def test_rows_that_are_left_out(
    rows: list[dict[str, object]], drop: list[str] | None, kept: list[int], tmp_path: Path
) -> None:
    settings = {} if drop is None else {"drop": drop}
    built = split(tmp_path, rows, pairs=rows is PAIRS, **settings)
    assert lines(built.train) == kept
    assert split(tmp_path, rows, pairs=rows is PAIRS, **settings).warnings == built.warnings, "from the cache"


def test_they_are_counted_in_each_file_and_split(tmp_path: Path) -> None:
    first, second = split(tmp_path, ROWS, drop=["unlabelled", "duplicates", "contradictions"]).warnings[:2]
    assert first == f"{tmp_path}/rows.jsonl: left out: 2 rows without a label (model.data.drop)"
    assert second.endswith(
        "rows.jsonl: an answer is empty in 1 row; model.data.drop=[unlabelled,empty_answers] leaves them out"
    )
    rows = [*(row(f"p{number}", "x", True) for number in range(9)), row("p0", "x", True), row("p1", "x", False)]
    built = split(tmp_path, rows, splits_string="1,1", drop=ALL)
    assert (lines(built.train), lines(built.validation[""])) == ([1, 3, 4, 5], [6, 7, 8, 9])
    assert built.warnings == (
        f"rows: left out: 1 row {DROPS['duplicates']}, 2 rows {DROPS['contradictions']} (model.data.drop)",
    )
    named = {"train": str(tmp_path / "rows.jsonl"), "validation": str(tmp_path / "rows.jsonl")}
    built = split(tmp_path, rows, data_prefix=named, drop=["duplicates"])
    assert lines(built.train) == lines(built.validation[""]) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 11]
    assert [text.split(":")[0] for text in built.warnings] == ["train", "validation"]


def test_a_blend_draws_from_the_rows_that_are_kept(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row(f"o{number}", "y", True)) + "\n" for number in range(3)))
    prefix = [1, str(tmp_path / "rows.jsonl"), 2, str(tmp_path / "other.jsonl")]
    train: Any = split(tmp_path, ROWS, drop=ALL, data_prefix=prefix).train
    names = {name.rsplit("/")[-1] for name in train.names(range(len(train)))}
    assert names == {"rows.jsonl:1", "rows.jsonl:8", "other.jsonl:1", "other.jsonl:2", "other.jsonl:3"}


def test_blank_labels_and_files_without_rows_are_errors_with_a_remedy(tmp_path: Path) -> None:
    with raises(DataError, "rows.jsonl:3", '"" (2 rows)', "model.data.drop=[unlabelled]"):
        split(tmp_path, ROWS, drop=[])
    with raises(DataError, "rows.jsonl:1", "2 rows without a label", "model.data.drop"):
        split(tmp_path, [ROWS[2], ROWS[6]])
    with raises(UserError, "unlabelled", "contradictions", "unlabeled"):
        split(tmp_path, ROWS, drop=["unlabeled"])


def test_rows_whose_text_the_template_leaves_out(tmp_path: Path) -> None:
    """They are refused by what is lost, or left out and counted; pairs by either of their sides."""
    remedy = "model.data.drop=[unlabelled,lost_text]"
    with raises(DataError, "rows.jsonl:2", '"tool_calls" of the answer', "rows.jsonl:3", "reasoning_content", remedy):
        split(tmp_path, WITH_LOSSES)
    built = split(tmp_path, WITH_LOSSES, drop=["unlabelled", "lost_text"])
    assert built.left_out == f"2 rows {DROPS['lost_text']}"
    assert built.special_tokens == "the texts of 2 rows contain special tokens of the model"
    assert built.warnings == (
        f"{tmp_path}/rows.jsonl: left out: 2 rows {DROPS['lost_text']} (model.data.drop)",
        f"{tmp_path}/rows.jsonl: an answer is empty in 1 row; model.data.drop=[unlabelled,empty_answers] leaves them out",
        f"{tmp_path}/rows.jsonl: the texts of 2 rows contain special tokens of the model; remove them unless the model "
        "shall read them as its own",
    )
    old = {"function_call": {"name": "weather", "arguments": {"city": "Oslo"}}}
    with raises(DataError, "rows.jsonl:1", '"function_call" of the answer', remedy):
        split(tmp_path, [row([turn("a")], [turn("1", role="assistant", **old)], True)])  # type: ignore[arg-type]
    odd: tuple[object, ...] = (5, ["x"], {})  # no calls; the template would not get one
    answers = [turn("1", role="assistant", tool_calls=value) for value in odd]
    assert lines(split(tmp_path, [row([turn("a")], [each], True) for each in answers]).train) == [1, 2, 3]  # type: ignore[arg-type]
    pairs: list[dict[str, object]] = [
        {"prompt": [turn("a")], "chosen": [turn("1", role="assistant")], "rejected": [turn("2", role="assistant", **more)]}
        for more in ({}, {"tool_calls": CALLS})
    ]
    kept = split(tmp_path, pairs, pairs=True, drop=["lost_text"])
    assert (lines(kept.train), kept.left_out) == ([1], f"1 row {DROPS['lost_text']}")


@pytest.mark.parametrize(
    ("prompt", "answer", "settings", "is_found"),
    [
        ("a<|im_end|>", "1", {}, False),  # a prompt of plain text may be rendered already
        ("a<|im_end|>", "1", {"apply_chat_template": True}, True),
        ("a", "1<|im_end|>2", {}, True),
        ("a", "1<|im_end|>", {}, False),
        ("a", "1<|im_start|>", {}, False),
    ],
)
def test_special_tokens_within_plain_text(
    prompt: str, answer: str, settings: dict[str, Any], is_found: bool, tmp_path: Path
) -> None:
    found = split(tmp_path, [row(prompt, answer, True)], **settings).special_tokens
    assert found == ("the texts of 1 row contain special tokens of the model" if is_found else "")
