"""Sequences are cut into micro-batches that keep within their limits, and none is lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_kto.models import sequences
from nemo_kto.models.sequences import MicroBatchLimits, SequenceBatch, width_multiple


def batch_of(lengths: list[int], *, answers: int = 1) -> SequenceBatch:
    """Sequences of these lengths, whose last token is the response."""
    width = max(lengths, default=1)
    tokens_BS = torch.arange(len(lengths) * width).view(len(lengths), width)
    last_B = torch.tensor(lengths, dtype=torch.long) - 1
    labels_BS = torch.where(torch.arange(width) == last_B[:, None], tokens_BS, -100)
    positions_BS = torch.arange(width).expand_as(tokens_BS)
    return SequenceBatch(
        tokens_BS=tokens_BS, labels_BS=labels_BS, lengths_B=last_B + 1, positions_BS=positions_BS, answers=answers
    )


def cut(batch: SequenceBatch, **limits: int | None) -> list[tuple[list[int], int]]:
    """Sequences of each micro-batch, and its width."""
    wanted = MicroBatchLimits(**{"prompts": None, "tokens": None, "multiple": 1, **limits})  # type: ignore[arg-type]
    return [(each.sequence_index_b.tolist(), each.tokens_bs.shape[1]) for each in batch.micro_batches(wanted)]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, [([1, 4, 0, 2, 3], 8)]),
        ({"prompts": 2}, [([1, 4], 8), ([0, 2], 3), ([3], 2)]),
        ({"tokens": 16}, [([1, 4], 8), ([0, 2, 3], 3)]),
        ({"tokens": 15}, [([1], 8), ([4, 0], 7), ([2, 3], 2)]),
        ({"tokens": 1}, [([1], 8), ([4], 7), ([0], 3), ([2], 2), ([3], 2)]),
        ({"tokens": 16, "prompts": 1}, [([1], 8), ([4], 7), ([0], 3), ([2], 2), ([3], 2)]),
        ({"tokens": 16, "multiple": 4}, [([1, 4], 8), ([0, 2, 3], 4)]),
    ],
)
def test_what_a_micro_batch_holds(limits: dict[str, int], expected: list[tuple[list[int], int]]) -> None:
    assert cut(batch_of([3, 8, 2, 2, 7]), **limits) == expected, "the longest first, as wide as needed"


def test_empty_micro_batches_make_the_groups_whole() -> None:
    """They have no sequence and no response token, and as few tokens as the width allows."""
    batch = batch_of([3, 8, 2, 2, 7])
    assert cut(batch, prompts=2, group=2) == [([1, 4], 8), ([0, 2], 3), ([3], 2), ([], 1)]
    assert cut(batch, prompts=2, group=4, multiple=2) == [([1, 4], 8), ([0, 2], 4), ([3], 2), ([], 2)]
    assert cut(batch, tokens=16, group=2) == [([1, 4], 8), ([0, 2, 3], 3)]
    assert cut(batch, prompts=8, group=3)[1:] == [([], 1)] * 2
    assert cut(batch_of([]), group=2) == []
    limits = MicroBatchLimits(prompts=2, tokens=None, multiple=2, group=4)
    *_, empty = batch.micro_batches(limits)
    assert (empty.tokens_bs.shape, empty.positions_bs.shape) == ((1, 2), (1, 2))
    assert [len(each) for each in (empty.hidden_index_T, empty.target_T, empty.sequence_T)] == [0, 0, 0]
    assert batch.padded_tokens(limits) == 2 * 8 + 2 * 4 + 2 + 2


def test_both_answers_to_a_prompt_count() -> None:
    pairs = batch_of([5, 4, 1, 2, 4, 3], answers=2)
    assert cut(pairs, tokens=16) == [([0, 3], 5), ([1, 2, 4, 5], 4)]
    assert cut(pairs, tokens=9) == [([0, 3], 5), ([1, 4], 4), ([2, 5], 3)]


@given(
    lengths=st.lists(st.integers(1, 40), max_size=30),
    answers=st.integers(1, 3),
    prompts=st.none() | st.integers(1, 8),
    tokens=st.none() | st.integers(1, 200),
    multiple=st.integers(1, 8),
)
def test_every_sequence_is_in_one_micro_batch_within_its_limits(
    lengths: list[int], answers: int, prompts: int | None, tokens: int | None, multiple: int
) -> None:
    batch = batch_of(lengths * answers, answers=answers)
    limits = MicroBatchLimits(prompts=prompts, tokens=tokens, multiple=multiple)
    micro_batches = batch.micro_batches(limits)
    held = [each.sequence_index_b.tolist() for each in micro_batches]
    assert sorted(number for numbers in held for number in numbers) == list(range(len(batch)))
    carried = 0
    for numbers in held:
        width = limits.width(max(int(batch.lengths_B[number]) for number in numbers))
        carried += len(numbers) * width
        assert width % multiple == 0
        assert len({number % len(lengths) for number in numbers}) * answers == len(numbers), "answers stay together"
        assert prompts is None or len(numbers) <= prompts * answers
        assert tokens is None or len(numbers) == answers or len(numbers) * width <= tokens
    assert batch.padded_tokens(limits) == carried


@pytest.mark.parametrize(
    ("on_gpu", "tensor", "sharded", "expected"),
    [(False, 4, False, 1), (False, 4, True, 4), (True, 1, False, 64), (True, 4, True, 64), (True, 3, True, 192)],
)
def test_widths(on_gpu: bool, tensor: int, sharded: bool, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences.device, "on_gpu", lambda: on_gpu)
    assert width_multiple(tensor_parallel=tensor, sequence_parallel=sharded) == expected


@pytest.mark.parametrize(("tensor", "sharded", "expected"), [(8, False, 64), (4, True, 64), (8, True, 128)])
def test_shards_in_fp8_are_multiples_of_16(tensor: int, sharded: bool, expected: int) -> None:
    assert width_multiple(tensor_parallel=tensor, sequence_parallel=sharded, fp8=True, on_gpu=True) == expected


def test_the_limits_in_words() -> None:
    assert str(MicroBatchLimits(prompts=4, tokens=None, multiple=1)) == "4"
    assert str(MicroBatchLimits(prompts=None, tokens=8192, multiple=64)) == "up to 8,192 tokens"
    assert str(MicroBatchLimits(prompts=4, tokens=8192, multiple=1)) == "4, up to 8,192 tokens"
