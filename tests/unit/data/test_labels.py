"""Labels and weights of rows: their values and errors, and the balance of the classes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.data.batches.dataset import DPODataset
from nemo_kto.data.rows.labels import MAX_BALANCE, Labels, balance_warning, label_text
from nemo_kto.data.rows.reader import Fields, FileColumns, FileReader, RowErrors
from nemo_kto.data.rows.records import DataError, pair_of_row, records_of_row
from nemo_kto.data.tokens.cache import DPO_EXAMPLES
from nemo_kto.errors import UserError, error_of
from tests.helpers.messages import Message, raises
from tests.unit.data.tiny_data import numbered_rows, read_file, train_split, write_rows
from tests.unit.run.test_build_rows import resolved


def read(path: Path, values: list[Any], fields: Fields | None = None, column: str = "label") -> tuple[list[bool], str, str]:
    """Whether each row is desirable, which value is taken for which, and the error."""
    write_rows(path, [{"prompt": "p", "response": "r", column: value} for value in values])
    fields = fields or Fields(drop=())
    records, columns, broken = read_file(path, fields)
    error = error_of(broken.raise_if_any) or ""
    return [record.desirable for record in records], fields.labels.text(columns.labels), error


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("true", "false"),
        ("up", "down"),
        ("good", "bad"),
        ("like", "dislike"),
        ("chosen", "rejected"),
        ("desirable", "undesirable"),
        (True, False),
        (1, 0),
        (1, -1),
        (1.0, 0.0),
        ("+1", "-1"),
        (" Yes ", "NO"),
        ("Thumbs up", "thumbs-down"),
        ("1.0", "0"),
        ("THUMBS_UP", "Thumbs Down"),
    ],
)
def test_common_values(good: object, bad: object, tmp_path: Path) -> None:
    found, text, error = read(tmp_path / "rows.jsonl", [good, bad, good])
    assert (found, error) == ([True, False, True], "")
    assert text == f"label: {label_text(good)} is desirable; {label_text(bad)} is undesirable"
    assert read(tmp_path / "rows.jsonl", [good, bad], column="preference")[0] == [True, False]


@pytest.mark.parametrize(
    ("values", "total", "line", "got"),
    [
        ([1, 0, 0.5, 1, 1], 1, 3, "1 (3 rows), 0 (1 row), 0.5 (1 row)"),
        ([1, 0, -1, 1], 1, 3, "1 (2 rows), -1 (1 row), 0 (1 row)"),  # a third value
        (["up", "down", "yes", "up"], 1, 3, "up (2 rows), down (1 row), yes (1 row)"),
        (["up", "down", True, 1, 0, "up"], 3, 3, "up (2 rows), 0 (1 row), 1 (1 row), down (1 row), true (1 row)"),
        (["A", "B", "A"], 3, 1, "a (2 rows), b (1 row)"),
        ([None, "", " ", "good"], 3, 1, '"" (3 rows), good (1 row)'),
    ],
)
def test_values_that_do_not_fit_are_counted(values: list, total: int, line: int, got: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    _, _, error = read(path, values)
    first, fault = error.splitlines()
    assert first == f"{total} broken row{'s' * (total > 1)}:"
    assert fault.startswith(f"  {path}:{line}: ")
    remedy = "model.data.drop=[unlabelled]" if None in values else "model.data.labels"
    assert fault == Message(f"got {got}", "label", "true and false", remedy)


def test_values_of_the_setting(tmp_path: Path) -> None:
    fields = Fields(labels=Labels.of({"desirable": [4, 5.0], "undesirable": ["1", "2", True]}))
    found, text, error = read(tmp_path / "rows.jsonl", [4, "5", 1, 2, "true"], fields)
    assert (found, error) == ([True, True, False, False, False], "")
    assert text == "label: 4, 5 is desirable; 1, 2, true is undesirable"
    assert Labels.parse("{desirable:[4,5],undesirable:[1, '2',\"true\"]}") == fields.labels
    _, _, error = read(tmp_path / "rows.jsonl", [4, 3, 1], fields)
    assert error == Message("rows.jsonl:2:", "4, 5, 1, 2, true (model.data.labels)", "3 (1 row)")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"desirable": [1]}, ["both classes", "undesirable"]),
        ({"desirable": [1, 2], "undesirable": ["2"]}, ["one class", "2"]),
        ({"good": [1], "undesirable": [2]}, ["good", "{desirable:[up],undesirable:[down]}"]),
    ],
)
def test_invalid_settings(values: dict, words: list[str]) -> None:
    with raises(UserError, *words):
        Labels.of(values)


@pytest.mark.parametrize(
    ("row", "setting"),
    [
        ({"question": "q", "answer": "a", "thumb": "up"}, "prompt:question,response:answer,label:thumb"),
        ({"prompt": "q", "response": "a", "rating": 4, "liked": True}, "label:liked"),
        ({"prompt": "q", "output": "a", "label": 1}, "response:output"),
        ({"query": "q", "winner": "a", "loser": "b"}, "prompt:query,chosen:winner,rejected:loser"),
    ],
)
def test_unknown_columns_are_suggested_in_one_setting(row: dict, setting: str, tmp_path: Path) -> None:
    write_rows(path := tmp_path / "rows.jsonl", [row])
    records, _, broken = read_file(path, Fields())
    assert records == []
    with raises(DataError, f"'fields={setting}'", json.dumps(path.name).strip('"')):
        broken.raise_if_any()
    fields = dict(pair.split(":") for pair in setting.split(","))
    reader = FileReader(fields=Fields(columns=fields), broken=(broken := RowErrors()))
    assert [*reader.kto_records(path, columns := FileColumns())] or columns.labels
    assert broken.total == 0


def test_values_that_are_no_label_are_left_out_by_name(tmp_path: Path) -> None:
    """The remedy of the error about them is executed."""
    file = tmp_path / "rows.jsonl"
    *_, error = read(file, ["👍", "👎🏽", "n/a", "skip it", "👍️"])
    setting = '{desirable:[👍],undesirable:[👎],unlabelled:["n/a",skip_it]}'.replace("👍", '"👍"').replace("👎", '"👎"')
    assert f"set 'model.data.labels={setting}'" in error
    fields = Fields(labels=Labels.parse(setting))
    found, _, error = read(file, ["👍", "👎🏽", "n/a", "skip it", "👍️"], fields)
    assert (found, error) == ([True, False, True], "")
    with pytest.raises(UserError, match="got n/a in two"):
        Labels.of({"desirable": ["up"], "undesirable": ["n/a"], "unlabelled": ["n/a"]})


PAIR = {"prompt": "p", "chosen": "a", "rejected": "b"}
MESSAGES = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "a"}]
PAIRS = partial(DPODataset, default_chosen_reward=1.0, default_rejected_reward=0.0)


def test_rows_of_every_format_may_have_a_weight() -> None:
    rows: list[Any] = [{"prompt": "p", "response": "a", "preference": "chosen"}, PAIR]
    rows.append({"messages": MESSAGES, "label": False})
    for row in rows:
        assert {record.weight for record in records_of_row({**row, "weight": 3}, 1)} == {3.0}
        assert {record.weight for record in records_of_row({**row, "weight": None}, 1)} == {1.0}
        assert {record.weight for record in records_of_row(row, 1)} == {1.0}
    pair = pair_of_row({**PAIR, "weight": 0.5}, 1)
    assert [each.weight for each in (pair, *pair.sides)] == [0.5] * 3


def test_wrong_weights_are_all_reported(tmp_path: Path) -> None:
    wrong = ["2", True, 0, -1, float("nan"), float("inf"), 10**400, 1e39, 1e-39, [1]]
    rows = [{**PAIR, "weight": weight} for weight in (1e-37, *wrong, 3e38)]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    for as_pairs in (True, False):
        records, _, broken = read_file(file, Fields(), as_pairs=as_pairs)
        assert [record.weight for record in records] == [1e-37] * (2 - as_pairs) + [3e38] * (2 - as_pairs)
        shown = ["'2'", "True", "0", "-1", "nan", "inf", f"1{'0' * 56}...", "1e+39", "1e-39", "[1]"]
        assert str(error_of(broken.raise_if_any)).splitlines() == [
            "10 broken rows:",
            *(
                Message(f"{file}:{line}", "weight", "number", "0", "fp32", f"{value}", "correct")
                for line, value in enumerate(shown, start=2)
            ),
        ]


def test_the_examples_of_a_file_have_the_weights_of_its_rows(tmp_path: Path) -> None:
    singles = [{**row, "share": 0.5 + number} for number, row in enumerate(numbered_rows(3))]
    train = train_split(str(write_rows(tmp_path / "a.jsonl", singles)), tmp_path, fields={"weight": "share"})
    assert [example.weight for example in train.__getitems__(range(3))] == [0.5, 1.5, 2.5]
    file = str(write_rows(tmp_path / "b.jsonl", [PAIR, {**PAIR, "weight": 4}]))
    pairs = train_split(file, tmp_path, kind=DPO_EXAMPLES, make=PAIRS)
    assert [example.weight for example in pairs.__getitems__([1, 0])] == [4.0, 1.0]


def test_the_fingerprint_depends_on_weights_other_than_1(tmp_path: Path) -> None:
    """Rows without a weight and rows of weight 1 train the same, so they have one fingerprint."""
    rows = numbered_rows(5)
    forms = [rows, [{**row, "weight": 1.0} for row in rows], [*rows[:4], {**rows[4], "weight": 2}]]
    files = [str(write_rows(tmp_path / f"{number}.jsonl", form)) for number, form in enumerate(forms)]
    none, ones, two = (train_split(file, tmp_path).fingerprint() for file in files)
    assert none == ones != two
    # recorded in checkpoints, which a run with another value refuses to resume
    assert none == "9daeee2f954c98c701e4e658896eeabff188e4215aacfba1673a323b3d518e75"


def test_auto_balance_uses_row_weights(tmp_path: Path) -> None:
    rows = [{**row, "weight": weight} for row, weight in zip(numbered_rows(4), (2.0, 1.0, 3.5, 1.0), strict=True)]
    train = train_split(str(write_rows(tmp_path / "a.jsonl", rows)), tmp_path)
    assert train.class_weights == (5.5, 2.0)
    assert "got 1 * 5.5 / (1 * 2) = 2.75; set" in (balance_warning(*train.class_weights, 1.0, 1.0) or "")
    section: Any = resolved("model.kto.auto_balance=true").cfg.loss
    desirable, undesirable = section.loss_weights(train)
    assert (desirable, undesirable) == (1.0, pytest.approx(2.75 / MAX_BALANCE)), "balanced rows would need no weights"
