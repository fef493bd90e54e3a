"""Sequences are divided into micro-batches within the limits, and none is lost."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_kto.models.engine import sequences
from nemo_kto.models.engine.reference import sequence_keys
from nemo_kto.models.engine.sequences import MicroBatchLimits, SequenceBatch, width_multiple


def batch_of(lengths: list[int], *, answers: int = 1) -> SequenceBatch:
    """Sequences of these lengths, whose last token is the response."""
    width = max(lengths, default=1)
    tokens_BS = torch.arange(len(lengths) * width).view(len(lengths), width)
    last_B = torch.tensor(lengths, dtype=torch.long) - 1
    labels_BS = torch.where(torch.arange(width) == last_B[:, None], tokens_BS, -100)
    return SequenceBatch(tokens_BS=tokens_BS, labels_BS=labels_BS, lengths_B=last_B + 1, answers=answers)


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
def test_contents_of_a_micro_batch(limits: dict[str, int], expected: list[tuple[list[int], int]]) -> None:
    assert cut(batch_of([3, 8, 2, 2, 7]), **limits) == expected, "the longest first, without extra padding"


def test_much_shorter_sequences_start_another_micro_batch_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding costs more than a micro-batch there; not on a GPU, and not if the number of sequences is given."""
    batch = batch_of([60, 44, 43, 30])
    assert cut(batch, tokens=512) == [([0, 1], 60), ([2, 3], 43)]
    assert cut(batch, prompts=4) == [([0, 1, 2, 3], 60)]
    monkeypatch.setattr(sequences.device, "on_gpu", lambda: True)
    assert [len(part) for part in batch._partition(MicroBatchLimits(prompts=None, tokens=512, multiple=1))] == [4]


def test_empty_micro_batches_complete_the_groups() -> None:
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
    assert [len(each) for each in (empty.hidden_index_T, empty.target_T, empty.logprob_T)] == [0, 0, 0]
    assert batch.padded_tokens(limits) == 2 * 8 + 2 * 4 + 2 + 2


def test_both_answers_to_a_prompt_stay_together() -> None:
    pairs = batch_of([5, 4, 1, 2, 4, 3], answers=2)
    assert cut(pairs, tokens=16) == [([0, 3], 5), ([1, 2, 4, 5], 4)]
    assert cut(pairs, tokens=9) == [([0, 3], 5), ([1, 4], 4), ([2, 5], 3)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("share_prompts", [False, True])
def test_tokens_beyond_the_shorter_answer_have_another_weight(packed: bool, share_prompts: bool) -> None:
    """Pairs with answers of 1 and 4, 3 and 2, 2 and 2 tokens, to prompts of two tokens; the weight of each target."""
    counts, width = [1, 3, 2, 4, 2, 2], 7
    lengths = torch.tensor(counts) + 2
    tokens = torch.tensor([[9, k % 3] for k in range(6)])
    tokens = torch.cat([tokens, torch.arange(10, 40).view(6, 5)], dim=1)
    places = torch.arange(width)
    labels = torch.where((places >= 2) & (places < lengths[:, None]), tokens, -100)
    plain = SequenceBatch(tokens_BS=tokens, labels_BS=labels, lengths_B=lengths, answers=2)
    batch = plain.desensitized(torch.tensor([0.5, 0.25, 0.0]))
    limits = MicroBatchLimits(prompts=2, tokens=None, multiple=1, packed=packed, share_prompts=share_prompts)
    weight_of: dict[int, float] = {}
    for each in batch.with_prompts(torch.arange(6) < 0).micro_batches(limits):
        assert each.weight_T is not None
        weight_of |= dict(zip(each.target_T.tolist(), each.weight_T.tolist(), strict=True))
    expected = [1.0, 1, 1, 0.25, 1, 1, 1, 0.5, 0.5, 0.5, 1, 1, 1, 1]
    targets = [int(token) for row, count in zip(tokens, counts, strict=True) for token in row[2 : 2 + count]]
    assert [weight_of[target] for target in targets] == expected
    taken = batch.take(torch.tensor([3]))
    assert taken.weights_BS is not None
    assert taken.weights_BS[0, 2:6].tolist() == [1.0, 0.5, 0.5, 0.5]
    assert (sequence_keys(batch) == sequence_keys(plain)).all(axis=1).tolist() == [False] * 6
    assert (sequence_keys(batch)[3] == sequence_keys(taken)[0]).all()


LIMITS: dict[str, st.SearchStrategy[Any]] = {
    "answers": st.integers(1, 3),
    "prompts": st.none() | st.integers(1, 8),
    "tokens": st.none() | st.integers(1, 200),
    "multiple": st.integers(1, 8),
}


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 40), max_size=30), **LIMITS)
def test_every_sequence_is_in_one_micro_batch_within_its_limits(
    lengths: list[int], answers: int, prompts: int | None, tokens: int | None, multiple: int
) -> None:
    batch = batch_of(lengths * answers, answers=answers)
    limits = MicroBatchLimits(prompts=prompts, tokens=tokens, multiple=multiple)
    micro_batches = batch.micro_batches(limits)
    groups = [each.sequence_index_b.tolist() for each in micro_batches]
    assert sorted(number for numbers in groups for number in numbers) == list(range(len(batch)))
    carried = 0
    for numbers in groups:
        width = limits.width(max(int(batch.lengths_B[number]) for number in numbers))
        carried += len(numbers) * width
        assert width % multiple == 0
        together = {number % len(lengths) for number in numbers}  # answers to a prompt
        assert len(together) * answers == len(numbers)
        assert prompts is None or len(numbers) <= prompts * answers
        assert tokens is None or len(numbers) == answers or len(numbers) * width <= tokens
    assert batch.padded_tokens(limits) == carried


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), **LIMITS)
def test_packed_rows_contain_every_sequence_once(
    lengths: list[int], answers: int, prompts: int | None, tokens: int | None, multiple: int
) -> None:
    batch = batch_of(lengths * answers, answers=answers)
    limits = MicroBatchLimits(prompts=prompts, tokens=tokens, multiple=multiple, packed=True)
    micro_batches = batch.micro_batches(limits)
    groups = [each.sequence_index_b.tolist() for each in micro_batches]
    assert sorted(number for numbers in groups for number in numbers) == list(range(len(batch)))
    carried = 0
    for numbers, each in zip(groups, micro_batches, strict=True):
        own = [int(batch.lengths_B[number]) for number in numbers]
        width = limits.width(sum(own))
        carried += width
        assert each.tokens_bs.shape == (1, width)
        assert each.lengths == (*own[:-1], own[-1] + width - sum(own)), "padding is at the end, with the last sequence"
        tokens_of = each.tokens_bs[0, : sum(own)].split(own)
        assert all(torch.equal(found, batch.tokens_BS[n, :k]) for found, n, k in zip(tokens_of, numbers, own, strict=True))
        together = {number % len(lengths) for number in numbers}  # answers to a prompt
        assert len(together) * answers == len(numbers)
        assert prompts is None or len(numbers) <= prompts * answers
        assert tokens is None or len(numbers) == answers or sum(own) <= tokens
        assert each.packed is not None
        assert each.packed.cu_seqlens_q.tolist() == [0, *itertools.accumulate(each.lengths)]
        assert each.packed.max_seqlen_q == max(each.lengths)
    assert batch.padded_tokens(limits) == carried


def test_predictor_positions_of_a_packed_row() -> None:
    """Sequences of 4 and 2 tokens; the last two of the first, and the last of the second, are the response."""
    labels_BS = torch.tensor([[-100, 9, -100, -100], [-100, -100, 7, 8]])
    batch = replace(batch_of([2, 4]), labels_BS=labels_BS)
    (row,) = batch.micro_batches(MicroBatchLimits(prompts=None, tokens=None, multiple=1, packed=True))
    assert row.sequence_index_b.tolist() == [1, 0], "the longest first"
    assert row.hidden_index_T.tolist() == [1, 2, 4]
    assert (row.target_T.tolist(), row.logprob_T.tolist()) == ([7, 8, 9], [0, 0, 1])


def test_the_log_probs_of_prompts() -> None:
    """Two sequences of 4 and 3 tokens, each with a response of one; the first token of a prompt has no predictor."""
    tokens_BS = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 0]])
    labels_BS = torch.tensor([[-100, -100, -100, 13], [-100, -100, 22, -100]])
    batch = replace(batch_of([4, 3]), tokens_BS=tokens_BS, labels_BS=labels_BS)
    assert batch.prompt_counts_B.tolist() == [0, 0]
    both, first = batch.with_prompts(torch.tensor([True, True])), batch.with_prompts(torch.tensor([True, False]))
    assert (both.prompt_counts_B.tolist(), first.prompt_counts_B.tolist()) == ([2, 1], [2, 0])
    assert both.response_counts_B.tolist() == batch.response_counts_B.tolist() == [1, 1]
    for packed, hidden in ((False, [4, 3, 0, 2, 1]), (True, [2, 5, 0, 1, 4])):
        (row,) = both.micro_batches(MicroBatchLimits(prompts=None, tokens=None, multiple=1, packed=packed))
        assert row.hidden_index_T.tolist() == hidden
        assert (row.target_T.tolist(), row.logprob_T.tolist()) == ([13, 22, 11, 12, 21], [0, 1, 2, 2, 3])
        assert row.num_logprobs == 4


@pytest.mark.parametrize(
    ("on_gpu", "tensor", "sharded", "expected"),
    [(False, 4, False, 1), (False, 4, True, 4), (True, 1, False, 64), (True, 4, True, 64), (True, 3, True, 192)],
)
def test_widths(on_gpu: bool, tensor: int, sharded: bool, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences.device, "on_gpu", lambda: on_gpu)
    assert width_multiple(tensor_parallel=tensor, sequence_parallel=sharded) == expected


@pytest.mark.parametrize(
    ("on_gpu", "tensor", "context", "expected"),
    [(False, 1, 2, 4), (False, 2, 2, 8), (False, 3, 4, 24), (True, 2, 4, 64), (True, 8, 8, 128)],
)
def test_widths_with_two_chunks_per_rank(on_gpu: bool, tensor: int, context: int, expected: int) -> None:
    found = width_multiple(tensor_parallel=tensor, sequence_parallel=True, context_parallel=context, on_gpu=on_gpu)
    assert found == expected


@pytest.mark.parametrize(("tensor", "sharded", "expected"), [(8, False, 64), (4, True, 64), (8, True, 128)])
def test_shards_in_fp8_are_multiples_of_16(tensor: int, sharded: bool, expected: int) -> None:
    assert width_multiple(tensor_parallel=tensor, sequence_parallel=sharded, fp8=True, on_gpu=True) == expected


def test_context_parallel_ranks_have_their_tokens_and_targets() -> None:
    tokens_BS = torch.tensor([[10, 11, 12, 13, 14, 15, 16, 17], [20, 21, 22, 0, 0, 0, 0, 0]])
    labels_BS = torch.where((torch.arange(8) > 1) & (tokens_BS > 0), tokens_BS, -100)
    batch = SequenceBatch(tokens_BS=tokens_BS, labels_BS=labels_BS, lengths_B=torch.tensor([8, 3]))
    limits = MicroBatchLimits(prompts=None, tokens=None, multiple=4, context_parallel=2)
    (first,), (second,) = (batch.micro_batches(limits, context_rank=rank) for rank in range(2))
    assert first.tokens_bs.tolist() == [[10, 11, 16, 17], [20, 21, 0, 0]]
    assert first.positions_bs.tolist() == [[0, 1, 6, 7]] * 2
    assert second.tokens_bs.tolist() == [[12, 13, 14, 15], [22, 0, 0, 0]]
    # the hidden state before each response token, as place * rows + row of the share
    predicted = [list(zip(*(values.tolist() for values in of_rank), strict=True)) for of_rank in (
        (first.hidden_index_T, first.target_T, first.logprob_T),
        (second.hidden_index_T, second.target_T, second.logprob_T),
    )]  # fmt: skip
    assert predicted[0] == [(2, 12, 0), (4, 17, 0), (3, 22, 1)]
    assert predicted[1] == [(0, 13, 0), (2, 14, 0), (4, 15, 0), (6, 16, 0)]
    assert first.sequence_index_b.tolist() == second.sequence_index_b.tolist() == [0, 1]
