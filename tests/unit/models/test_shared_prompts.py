"""Prompts are shared within a micro-batch: each answer sees its prompt, and every target the state that predicts it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_kto.architecture.rope import read_rope
from nemo_kto.layers.attention import PackedSequences
from nemo_kto.layers.packing import key_indices, token_positions
from nemo_kto.layers.rope_tables import RopeTable
from nemo_kto.models.engine.sequences import MicroBatchLimits, SequenceBatch
from tests.unit.layers.test_attention import GROUPS, HEADS, SINKS, D, attention

LIMITS = MicroBatchLimits(prompts=None, tokens=None, multiple=1, share_prompts=True)


def batch_of(examples: list[tuple[int, list[int]]]) -> SequenceBatch:
    """Examples with the number of their prompt, which has number // 3 + 1 tokens, and the lengths of their answers."""
    answers, texts = len(examples[0][1]), list[tuple[list[int], list[int]]]()
    for k in range(answers):
        for number, (kind, lengths) in enumerate(examples):
            tokens = [100 * k + 10 * number + each % 7 for each in range(lengths[k])]
            texts.append(([1000 + kind] * (kind // 3 + 1), tokens))
    width = -(-max(len(prompt) + len(answer) for prompt, answer in texts) // 4) * 4
    tokens_BS, labels_BS = torch.zeros(len(texts), width, dtype=torch.long), torch.full((len(texts), width), -100)
    for k, (prompt, answer) in enumerate(texts):
        tokens_BS[k, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels_BS[k, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return SequenceBatch(
        tokens_BS=tokens_BS,
        labels_BS=labels_BS,
        lengths_B=torch.tensor([len(prompt) + len(answer) for prompt, answer in texts]),
        answers=answers,
    )


def batches() -> st.SearchStrategy[SequenceBatch]:
    def examples(answers: int) -> st.SearchStrategy[list[tuple[int, list[int]]]]:
        lengths = st.lists(st.integers(0, 9), min_size=answers, max_size=answers)
        return st.lists(st.tuples(st.integers(0, 11), lengths), min_size=1, max_size=12)

    return st.integers(1, 3).flatmap(examples).map(batch_of)


@settings(max_examples=40, deadline=None)
@given(
    batch=batches(),
    prompts=st.none() | st.integers(1, 4),
    tokens=st.none() | st.integers(1, 60),
    multiple=st.sampled_from([1, 4]),
    with_prompts=st.booleans(),
)
def test_every_target_is_predicted_from_its_sequence(
    batch: SequenceBatch, prompts: int | None, tokens: int | None, multiple: int, with_prompts: bool
) -> None:
    limits = replace(LIMITS, prompts=prompts, tokens=tokens, multiple=multiple)
    if with_prompts:
        batch = batch.with_prompts(torch.arange(len(batch)) % 2 == 0)
    micro_batches, seen, computed = batch.micro_batches(limits), list[int](), 0
    for micro_batch in micro_batches:
        indices = micro_batch.sequence_index_b.tolist()
        seen += indices
        if micro_batch.lengths is None:  # no two sequences of the batch have the same prompt
            assert batch.limits_of(limits).share_prompts is False
            continue
        assert prompts is None or len(indices) <= prompts * batch.answers
        width, size = micro_batch.tokens_bs.shape[1], len(indices)
        assert width % multiple == 0
        assert tokens is None or len(indices) == batch.answers or width < tokens + multiple
        position_t = token_positions(micro_batch.lengths, prompts=micro_batch.prompts)
        # the tokens that the last token of each segment attends to, and those of its prompt
        ends = torch.tensor(micro_batch.lengths).cumsum(0)
        befores = [0 if prompt is None else micro_batch.lengths[prompt] for prompt in micro_batch.prompts or ()]
        counts = [before + n for before, n in zip(befores, micro_batch.lengths, strict=True)]
        visible = key_indices(micro_batch.lengths, micro_batch.prompts).split(counts)
        targets: dict[int, list[int]] = {k: [] for k in range(2 * size)}
        for hidden, target, place in zip(
            micro_batch.hidden_index_T.tolist(), micro_batch.target_T.tolist(), micro_batch.logprob_T.tolist(), strict=True
        ):
            sequence, position = indices[place % size], int(position_t[hidden])
            segment = int((ends > hidden).nonzero()[0])
            context = micro_batch.tokens_bs[0, visible[segment][: position + 1]]
            assert torch.equal(context, batch.tokens_BS[sequence, : position + 1])
            assert target == batch.tokens_BS[sequence, position + 1]
            assert micro_batch.owners_nb[micro_batch.segment_bs[0, hidden], place % size] == (batch.counted_B[sequence] > 0)
            targets[place].append(target)
        for place, sequence in enumerate(indices * (1 + with_prompts)):
            labels = batch.label_sets[place // size][sequence, 1:]
            assert sorted(targets[place]) == sorted(labels[labels != -100].tolist())
        owned_b = micro_batch.owners_nb[micro_batch.segment_bs[0]].sum(dim=0)
        assert torch.equal(owned_b, batch.counted_B[micro_batch.sequence_index_b]), "a shared token counts for each"
        computed += int((micro_batch.segment_bs >= 0).sum())
    assert sorted(seen) == list(range(len(batch)))
    assert batch.padded_tokens(limits) == sum(each.tokens_bs.numel() for each in micro_batches)
    if computed:
        assert computed == int(batch.lengths_B.sum()) - sum(batch.shared_prompts(limits))


def test_prompts_that_are_shared() -> None:
    """An answer without tokens is no answer to a prompt."""
    batch = batch_of([(5, [3]), (8, [1]), (5, [0]), (5, [4]), (2, [2])])
    assert batch.shared_prompts(LIMITS) == [2]
    (micro_batch,) = batch.micro_batches(LIMITS)
    assert sorted(micro_batch.lengths or ()) == [2, 2, 3, 3, 4, 4]
    assert batch.shared_prompts(replace(LIMITS, prompts=1)) == []
    assert [each.prompts for each in batch.micro_batches(replace(LIMITS, share_prompts=False, packed=True))] == [None]
    pairs = batch_of([(5, [3, 1]), (8, [1, 2]), (5, [2, 2])])
    assert sorted(pairs.shared_prompts(LIMITS)) == [2, 2, 2, 3]
    assert sorted(pairs.shared_prompts(replace(LIMITS, prompts=1))) == [2, 2, 3]


def test_nothing_to_share_changes_nothing() -> None:
    batch = batch_of([(5, [3]), (8, [1]), (2, [2])])
    for padded, shared in zip(
        batch.micro_batches(replace(LIMITS, share_prompts=False, prompts=2)),
        batch.micro_batches(replace(LIMITS, prompts=2)),
        strict=True,
    ):
        assert torch.equal(padded.tokens_bs, shared.tokens_bs)
        assert shared.packed is None


@pytest.mark.parametrize(("answer", "shares"), [(15, True), (16, False)])
def test_prompts_that_save_little_are_not_shared(answer: int, shares: bool) -> None:
    """A prompt of one token and two answers of 15 tokens are 31 tokens instead of 32."""
    batch = batch_of([(0, [answer, answer])])
    assert batch.limits_of(LIMITS) == replace(LIMITS, share_prompts=shares, packed=shares)
    micro_batches = batch.micro_batches(LIMITS)
    assert [each.tokens_bs.shape for each in micro_batches] == [(1, 31) if shares else (2, answer + 1)]


def test_context_parallelism_is_refused() -> None:
    with pytest.raises(ValueError, match="share_prompts must be False"):
        replace(LIMITS, context_parallel=2)


KINDS = {
    "causal": {},
    "window": {"window_size": (2, 0)},
    "chunks": {"window_size": (3, 0), "chunked": True},
    "sinks": {"sinks": True},
    "sinks_in_a_window": {"sinks": True, "window_size": (2, 0)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_answers_attend_to_their_prompt(kind: str) -> None:
    """Outputs and gradients are those of a sequence for each answer; the gradients of a prompt are summed."""
    layer = attention(**KINDS[kind])  # type: ignore[arg-type]
    layer.rope = RopeTable(rope=read_rope({"rope_theta": 1e4, "hidden_size": D, "num_attention_heads": 1}))
    if layer.softmax_offset is not None:
        layer.softmax_offset.data = SINKS
    lengths, prompts = (5, 3, 4, 6, 2), (None, 0, 0, None, 0)
    draw = torch.Generator().manual_seed(0)
    shared = [torch.randn(20, number, D, generator=draw, requires_grad=True) for number in (HEADS, GROUPS, GROUPS)]
    sequences = [[*range(5), *range(5, 8)], [*range(5), *range(8, 12)], [*range(12, 18)], [*range(5), *range(18, 20)]]
    index_t = torch.tensor([*itertools.chain(*sequences)])
    packed = PackedSequences.of([(8, 9, 6, 7)])[0]
    expected = layer(*(each[index_t] for each in shared), None, packed_seq_params=packed)
    grad = torch.randn(expected.shape, generator=draw)
    expected_grads = torch.autograd.grad(expected, shared, grad)
    found = layer(*shared, None, packed_seq_params=PackedSequences.of([lengths], [prompts])[0])
    torch.testing.assert_close(found[index_t], expected, rtol=1e-6, atol=1e-6)
    grads = torch.autograd.grad(found, shared, torch.zeros_like(found).index_add(0, index_t, grad))
    for found_grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(found_grad, expected_grad, rtol=1e-5, atol=1e-6)


def test_layers_share_the_masks_of_a_pack() -> None:
    """A pack with two answers of the same length has one mask, whatever the number of layers."""
    packed = PackedSequences.of([(5, 3, 3, 4)], [(None, 0, 0, None)])[0]
    heads = [torch.randn(15, number, D, requires_grad=True) for number in (HEADS, GROUPS, GROUPS)]
    saved = list[torch.Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: heads[0]):
        kept = [attention()(*heads, None, packed_seq_params=packed) for _ in range(2)]
    ((size, mask),) = packed.masks.items()
    assert size == (3, 8)
    assert mask.tolist() == [[0.0] * (6 + row) + [-math.inf] * (2 - row) for row in range(3)]
    masks = [each.untyped_storage().data_ptr() for each in saved if each.shape[-2:] == size]
    assert set(masks) == {mask.untyped_storage().data_ptr()}
    assert len(masks) == 2 * len(kept)
