"""Pairs from a line of a file to the tensors of a batch, and auto-balanced weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_kto.data.batches.collate import dpo_custom_collate
from nemo_kto.data.batches.dataset import DPODataset, DPOExample, SplitCounts
from nemo_kto.data.rows.labels import MAX_BALANCE, MIN_BALANCE, balance_warning, balanced_weights, loss_balance
from nemo_kto.data.rows.records import RowError, pair_of_row
from nemo_kto.data.tokens.cache import DPO_EXAMPLES
from nemo_kto.data.tokens.truncation import Truncation
from tests.helpers.messages import Message, raises
from tests.unit.data.tiny_data import train_split, write_rows

EOS = 0
PAIR = {"prompt": "p", "chosen": "a", "rejected": "b"}


def pair(prompt: list[int], chosen: list[int], rejected: list[int]) -> DPOExample:
    prompt_ids, chosen_ids, rejected_ids = (np.array(part, dtype=np.int32) for part in (prompt, chosen, rejected))
    return DPOExample(
        prompt_ids=prompt_ids, chosen_ids=chosen_ids, rejected_ids=rejected_ids, chosen_reward=2.5, rejected_reward=-1.0
    )


def test_column_names_of_nemo_aligner_and_trl() -> None:
    theirs = pair_of_row({"prompt": "p", "chosen_response": "a", "rejected_response": "b"}, 7)
    assert theirs == pair_of_row(PAIR, 7)
    assert (theirs.prompt, theirs.chosen, theirs.rejected, theirs.line) == ("p", "a", "b", 7)
    assert theirs.chosen_reward is None
    rated = pair_of_row({**PAIR, "chosen_reward": 3, "rejected_reward": -0.5}, 1)
    assert (rated.chosen_reward, rated.rejected_reward) == (3.0, -0.5)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "p", "response": "a", "preference": "chosen"}, Message("KTO", "unpaired")),
        ({**PAIR, "chosen_reward": 1.0}, Message("chosen_reward", "rejected_reward")),
        ({**PAIR, "chosen_reward": True, "rejected_reward": 0}, Message("chosen_reward", "number", "True")),
        ({**PAIR, "chosen_reward": 10**400, "rejected_reward": 0}, Message("chosen_reward", "number", "...")),
        ({**PAIR, "chosen_reward": float("nan"), "rejected_reward": 0}, Message("chosen_reward", "number", "nan")),
        ({"prompt": "p", "chosen": "a"}, Message("chosen", "rejected")),
    ],
)
def test_errors_of_a_broken_pair(row: dict, text: Message) -> None:
    with pytest.raises(RowError) as error:
        pair_of_row(row, 1)
    assert str(error.value) == text


def test_the_prompt_is_truncated_once_for_the_longer_answer() -> None:
    cut = Truncation(5, "keep_end", None)
    assert cut.truncate_pair([1, 2, 3, 4], [5], [6, 7, 8]) == ([3, 4], [5], [6, 7, 8])
    cut = Truncation(4, "keep_start", None)
    assert cut.truncate_pair([1, 2, 3], [5] * 9, [6]) == ([1], [5] * 3, [6])


def test_every_tensor_of_a_batch_of_pairs() -> None:
    batch = dpo_custom_collate([pair([1, 2], [3, EOS], [4, 5, EOS]), pair([6], [7, EOS], [EOS])], EOS, pad_to_multiple=2)
    assert batch["chosen"].tolist() == [[1, 2, 3, 0, 0, 0], [6, 7, 0, 0, 0, 0]]
    assert batch["chosen_labels"].tolist() == [[-100, -100, 3, 0, -100, -100], [-100, 7, 0, -100, -100, -100]]
    assert batch["rejected"].tolist() == [[1, 2, 4, 5, 0, 0], [6, 0, 0, 0, 0, 0]]
    assert batch["rejected_labels"].tolist() == [[-100, -100, 4, 5, 0, -100], [-100, 0, -100, -100, -100, -100]]
    assert batch["chosen_lengths"].tolist() == [4, 3]
    assert batch["rejected_lengths"].tolist() == [5, 2]
    assert batch["chosen_rewards"].tolist() == [2.5, 2.5]
    assert batch["rejected_rewards"].tolist() == [-1.0, -1.0]
    assert batch["chosen_position_ids"].tolist() == [list(range(6))] * 2
    assert batch["rejected_attention_mask"].sum(1).tolist() == [5, 2]
    with raises(ValueError, "seq_length=4", "5"):
        dpo_custom_collate([pair([1, 2], [3], [4, 5, EOS])], EOS, seq_length=4)
    assert dpo_custom_collate([], EOS)["chosen"].shape == (0, 1)


def test_one_file_works_for_both_algorithms_and_defaults_are_not_cached(tmp_path: Path) -> None:
    rows: list[Any] = [{**PAIR, "prompt": f"{number}"} for number in range(4)]
    rows[1] |= {"chosen_reward": 5, "rejected_reward": 4}
    file = write_rows(tmp_path / "rows.jsonl", rows)
    for defaults in ((1.0, 0.0), (9.0, 8.0)):
        make = partial(DPODataset, default_chosen_reward=defaults[0], default_rejected_reward=defaults[1])
        pairs: Any = train_split({"train": str(file)}, tmp_path, seq_length=16, kind=DPO_EXAMPLES, make=make)
        rewards = [(row.chosen_reward, row.rejected_reward) for row in pairs.__getitems__(range(4))]
        assert rewards == [defaults, (5.0, 4.0), defaults, defaults]
        assert pairs.counts == SplitCounts(rows=4, desirable=None, tokens=24, longest=3, cut_prompts=0, cut_responses=0)
    judged = train_split({"train": str(file)}, tmp_path, seq_length=16)
    assert len(judged) == 8
    assert judged.counts.classes == {"desirable": 4, "undesirable": 4}
    assert len(list((tmp_path / "cache").glob("*.arrow"))) == 2


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.floats(0.1, 10), st.floats(0.1, 10))
def test_auto_balanced_weights(good: int, bad: int, w_good: float, w_bad: float) -> None:
    balanced = balanced_weights(good, bad, w_good, w_bad)
    balance = loss_balance(good, bad, *balanced)
    assert balance is not None
    assert MIN_BALANCE * (1 - 1e-9) <= balance <= MAX_BALANCE * (1 + 1e-9)
    assert balanced[0] >= w_good
    assert balanced[1] >= w_bad
    assert balance_warning(good, bad, *balanced) is None
