"""KL pairs against brute force, and the values of every tensor of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_kto.data.batches.collate import dpo_custom_collate, kl_partners, kto_custom_collate
from nemo_kto.data.batches.dataset import KTOExample
from nemo_kto.errors import UserError
from tests.helpers.messages import raises

EOS = 0


def row(prompt: list[int], response: list[int], desirable: bool = True, weight: float = 1.0) -> KTOExample:
    ids = {"prompt_ids": np.array(prompt, dtype=np.int32), "response_ids": np.array(response, dtype=np.int32)}
    return KTOExample(**ids, desirable=desirable, weight=weight)


THREE = [row([1, 2], [3, EOS]), row([4], [5, 6, EOS], desirable=False, weight=0.5), row([7, 8, 9], [EOS])]


def same_prompt_pairs(prompts: Sequence[str | int], partners: Sequence[int]) -> int:
    return sum(prompts[k] == prompts[partner] for k, partner in enumerate(partners))


@given(st.integers(2, 40))
def test_distinct_prompts_pair_with_the_next_row(count: int) -> None:
    assert kl_partners(list(range(count))) == [(k + 1) % count for k in range(count)]


@given(st.lists(st.sampled_from("abcd"), min_size=2, max_size=6))
def test_pairs_against_all_permutations(prompts: list[str]) -> None:
    partners = kl_partners(prompts)
    assert sorted(partners) == list(range(len(prompts)))
    assert all(partner != k for k, partner in enumerate(partners))
    fewest = min(same_prompt_pairs(prompts, candidate) for candidate in permutations(range(len(prompts))))
    assert same_prompt_pairs(prompts, partners) == fewest


def test_pairs_by_hand() -> None:
    # Groups a: rows 0, 2; b: rows 1, 3; c: row 4. In that order 0 2 1 3 4, shifted by two.
    assert kl_partners(["a", "b", "a", "b", "c"]) == [1, 4, 3, 0, 2]
    assert kl_partners(["a", "a", "a"]) == [1, 2, 0]
    assert kl_partners([]) == []
    with raises(ValueError, "2", "KL", "1"):
        kl_partners(["a"])


def test_every_tensor_of_a_small_batch() -> None:
    batch = kto_custom_collate(THREE, EOS)
    expected = {
        "samples": [[1, 2, 3, 0, 0, 0], [4, 5, 6, 0, 0, 0], [7, 8, 9, 0, 0, 0]],
        "sample_labels": [[-100, -100, 3, 0, -100, -100], [-100, 5, 6, 0, -100, -100], [-100] * 3 + [0, -100, -100]],
        "sample_lengths": [4, 4, 4],
        "kl_samples": [[1, 2, 5, 6, 0, 0], [4, 0, 0, 0, 0, 0], [7, 8, 9, 3, 0, 0]],
        "kl_sample_labels": [[-100, -100, 5, 6, 0, -100], [-100, 0] + [-100] * 4, [-100] * 3 + [3, 0, -100]],
        "kl_sample_lengths": [5, 2, 5],
        "preference": [1, 0, 1],
        "kl_same_prompt": [0, 0, 0],
        "position_ids": [list(range(6))] * 3,
        "kl_position_ids": [list(range(6))] * 3,
    }
    # 5 tokens are the longest row; checked at a width of 6.
    batch6: Any = kto_custom_collate(THREE, EOS, pad_to_multiple=6)
    for name, value in expected.items():
        assert batch6[name].tolist() == value, name
        assert batch6[name].dtype == torch.int64, name
    assert batch["samples"].shape == batch["kl_samples"].shape == (3, 5)
    assert batch6["attention_mask"].dtype == torch.bool
    assert batch6["attention_mask"].tolist() == [[True] * 4 + [False] * 2] * 3
    assert batch6["kl_attention_mask"].sum(1).tolist() == [5, 2, 5]
    assert batch6["weights"].tolist() == [1.0, 0.5, 1.0]
    assert batch6["weights"].dtype == torch.float32
    assert set(batch6) == {*expected, "attention_mask", "kl_attention_mask", "weights"}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shards_of_the_ranks_make_up_the_batch(size: int) -> None:
    rows = [row([k, k], list(range(1, 2 + k % 3)), bool(k % 2)) for k in range(1, 8)]
    whole: Any = kto_custom_collate(rows, EOS, pad_to_multiple=16)
    for rank in range(size):
        share: Any = kto_custom_collate(rows, EOS, pad_to_multiple=16, kept=range(rank, len(rows), size))
        for name, tensor in whole.items():
            assert torch.equal(share[name], tensor[rank::size]), name


def test_a_kl_example_is_truncated_at_its_end() -> None:
    rows = [row([1, 2, 3], [4]), row([5], [6, 7, EOS])]
    batch = kto_custom_collate(rows, EOS, seq_length=4)
    assert batch["kl_samples"].tolist() == [[1, 2, 3, 6], [5, 4, 0, 0]]
    assert batch["kl_sample_labels"].tolist() == [[-100, -100, -100, 6], [-100, 4, -100, -100]]
    assert kto_custom_collate(rows, EOS)["kl_samples"].shape == (2, 6)
    with raises(ValueError, "seq_length=3", "4"):
        kto_custom_collate(rows, EOS, seq_length=3)


def test_without_kl_examples_one_row_suffices() -> None:
    batch = kto_custom_collate(THREE[:1], EOS, with_kl=False)
    assert not [name for name in batch if name.startswith("kl_")]
    assert batch["samples"].tolist() == [[1, 2, 3, 0]]
    with raises(ValueError, "2", "examples"):
        kto_custom_collate(THREE[:1], EOS)


def test_same_prompts_are_marked() -> None:
    rows = [row([1], [2]), row([1], [3]), row([1], [4]), row([9], [5])]
    batch = kto_custom_collate(rows, EOS)
    assert batch["kl_same_prompt"].tolist() == [0, 1, 1, 0]
    assert sorted(batch["kl_samples"][:, 1].tolist()) == [2, 3, 4, 5]


@pytest.mark.parametrize("flag", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
@pytest.mark.parametrize(("collate", "batch"), [(kto_custom_collate, THREE), (dpo_custom_collate, [])])
def test_the_options_for_documents_must_be_false(collate: Callable[..., Any], batch: list[Any], flag: str) -> None:
    collate(batch, EOS, False, False, False)
    with raises(UserError, flag, "False", "True", "one prompt", "one answer"):
        collate(batch, EOS, **{flag: True})


@pytest.mark.parametrize(("collate", "kind"), [(kto_custom_collate, "KTOExample"), (dpo_custom_collate, "DPOExample")])
def test_other_items_are_refused(collate: Callable[..., Any], kind: str) -> None:
    with raises(UserError, kind, "dict"):
        collate([{"prompt_tokens": torch.tensor([1])}, {"prompt_tokens": torch.tensor([2])}], EOS)
