"""Row weights from a line of a file to the examples and the auto-balanced weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.data.batches.class_balance import MAX_BALANCE, balance_warning
from nemo_kto.data.batches.dataset import DPODataset, KTODataset
from nemo_kto.data.rows.reader import Fields, FileColumns, FileReader, RowErrors
from nemo_kto.data.rows.records import DataError, pair_of_row, records_of_row
from nemo_kto.data.tokens.tokeniser import DPO_EXAMPLES, KTO_EXAMPLES
from tests.helpers.messages import Message
from tests.unit.data.test_fingerprint import fingerprint, splits
from tests.unit.data.tiny_data import numbered_rows, write_rows
from tests.unit.run.test_build_rows import resolved

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
        broken = RowErrors()
        reader = FileReader(fields=Fields(), broken=broken)
        read = reader.dpo_records if as_pairs else reader.kto_records
        assert [record.weight for record in read(file, FileColumns())] == [1e-37] * (2 - as_pairs) + [3e38] * (2 - as_pairs)
        with pytest.raises(DataError) as error:
            broken.raise_if_any()
        shown = ["'2'", "True", "0", "-1", "nan", "inf", f"1{'0' * 56}...", "1e+39", "1e-39", "[1]"]
        assert str(error.value).splitlines() == [
            "10 broken rows:",
            *(
                Message(f"{file}:{line}", "weight", "number", "0", "fp32", f"{value}", "correct")
                for line, value in enumerate(shown, start=2)
            ),
        ]


def test_the_examples_of_a_file_have_the_weights_of_its_rows(tmp_path: Path) -> None:
    singles = [{**row, "share": 0.5 + number} for number, row in enumerate(numbered_rows(3))]
    train = splits(str(write_rows(tmp_path / "a.jsonl", singles)), tmp_path, fields={"weight": "share"}).train
    assert train is not None
    assert [example.weight for example in train.__getitems__(range(3))] == [0.5, 1.5, 2.5]
    file = str(write_rows(tmp_path / "b.jsonl", [PAIR, {**PAIR, "weight": 4}]))
    pairs = splits(file, tmp_path, kind=DPO_EXAMPLES, make=PAIRS).train
    assert pairs is not None
    assert [example.weight for example in pairs.__getitems__([1, 0])] == [4.0, 1.0]


def test_the_fingerprint_depends_on_weights_other_than_1(tmp_path: Path) -> None:
    """Rows without a weight and rows of weight 1 train the same, so they have one fingerprint."""
    rows = numbered_rows(5)
    forms = [rows, [{**row, "weight": 1.0} for row in rows], [*rows[:4], {**rows[4], "weight": 2}]]
    files = [str(write_rows(tmp_path / f"{number}.jsonl", form)) for number, form in enumerate(forms)]
    none, ones, two = (fingerprint(file, tmp_path) for file in files)
    assert none == ones != two
    # recorded in checkpoints, which a run with another value refuses to resume
    assert none == "9daeee2f954c98c701e4e658896eeabff188e4215aacfba1673a323b3d518e75"


def test_auto_balance_uses_row_weights(tmp_path: Path) -> None:
    rows = [{**row, "weight": weight} for row, weight in zip(numbered_rows(4), (2.0, 1.0, 3.5, 1.0), strict=True)]
    train = splits(str(write_rows(tmp_path / "a.jsonl", rows)), tmp_path, kind=KTO_EXAMPLES, make=KTODataset).train
    assert train is not None
    assert train.class_weights == (5.5, 2.0)
    assert "got 1 * 5.5 / (1 * 2) = 2.75; set" in (balance_warning(*train.class_weights, 1.0, 1.0) or "")
    section: Any = resolved("model.kto.auto_balance=true").cfg.loss
    desirable, undesirable = section.loss_weights(train)
    assert (desirable, undesirable) == (1.0, pytest.approx(2.75 / MAX_BALANCE)), "balanced rows would need no weights"
