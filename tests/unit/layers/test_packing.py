"""Packed rows: their contents, and the tokens of each context-parallel rank with the tokens they attend to."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_kto.layers.packing import causal_spans, local_token_indices, pack_lengths, token_positions, unshard_tokens
from tests.helpers.messages import raises


def seen_by(lengths: tuple[int, ...], places_t: torch.Tensor, window: int | None) -> torch.Tensor:
    """True where the token at a place of the row (row) sees a token of the row (column): its own sequence, up to itself, or
    of that its own window."""
    number_t = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    window_t = token_positions(lengths) // (window or sum(lengths))
    seen = torch.ones(sum(lengths), sum(lengths), dtype=torch.bool).tril()
    for same_t in (number_t, window_t):
        seen &= same_t[:, None] == same_t[None, :]
    return seen[places_t]


def seen_in_spans(lengths: tuple[int, ...], *, rank: int, size: int, window: int | None = None) -> torch.Tensor:
    """The same from the spans: the last query of a span sees all of its keys, the one before one less."""
    seen = torch.zeros(sum(lengths) // size, sum(lengths), dtype=torch.bool)
    for span in causal_spans(lengths, rank=rank, size=size, window=window):
        queries, keys = (each.stop - each.start for each in span)
        seen[span.queries, span.keys] = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return seen


def test_a_row_of_two_sequences_on_two_ranks() -> None:
    assert local_token_indices((8, 4), rank=0, size=2).tolist() == [0, 1, 6, 7, 8, 11]
    assert local_token_indices((8, 4), rank=1, size=2).tolist() == [2, 3, 4, 5, 9, 10]
    assert token_positions((8, 4), rank=0, size=2).tolist() == [0, 1, 6, 7, 0, 3]
    assert [(each.queries, each.keys) for each in causal_spans((8, 4), rank=1, size=2)] == [
        (slice(0, 2), slice(0, 4)),
        (slice(2, 4), slice(0, 6)),
        (slice(4, 5), slice(8, 10)),
        (slice(5, 6), slice(8, 11)),
    ]


@settings(deadline=None)
@given(
    size=st.integers(1, 4), chunks=st.lists(st.integers(1, 3), min_size=1, max_size=4), window=st.none() | st.integers(1, 9)
)
def test_each_token_is_on_one_rank_and_attends_to_the_same_tokens(size: int, chunks: list[int], window: int | None) -> None:
    lengths = tuple(2 * size * width for width in chunks)
    places = [local_token_indices(lengths, rank=rank, size=size) for rank in range(size)]
    whole = token_positions(lengths)
    assert sorted(torch.cat(places).tolist()) == list(range(sum(lengths)))
    assert torch.equal(unshard_tokens(torch.cat(places), lengths, size=size), torch.arange(sum(lengths)))
    for rank, places_t in enumerate(places):
        assert torch.equal(token_positions(lengths, rank=rank, size=size), whole[places_t])
        assert torch.equal(seen_in_spans(lengths, rank=rank, size=size, window=window), seen_by(lengths, places_t, window))


def test_ranks_have_equal_work() -> None:
    pairs = [int(seen_in_spans((48, 16), rank=rank, size=4).sum()) for rank in range(4)]
    assert len(set(pairs)) == 1


def test_an_indivisible_length_is_refused() -> None:
    with raises(ValueError, "2", "4", "6"):
        causal_spans((8, 6), rank=0, size=2)


@given(
    lengths=st.lists(st.integers(1, 50), max_size=60),
    tokens=st.none() | st.integers(1, 120),
    prompts=st.none() | st.integers(1, 5),
)
def test_every_item_is_in_one_row_within_its_limits(lengths: list[int], tokens: int | None, prompts: int | None) -> None:
    rows = pack_lengths(lengths, tokens=tokens, prompts=prompts)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    for row in rows:
        assert row, "no row is empty"
        assert prompts is None or len(row) <= prompts
        assert tokens is None or len(row) == 1 or sum(lengths[item] for item in row) <= tokens


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_rows_are_equally_full_but_for_one_item(lengths: list[int]) -> None:
    rows = [sum(lengths[item] for item in row) for row in pack_lengths(lengths, tokens=120)]
    assert max(rows) - min(rows) <= max(lengths), "always the row with the fewest tokens"
