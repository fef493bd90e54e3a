"""Rows of sequences: each item is in one row, rows are as full and as equal as they can be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nemo_kto.models.spans import packed_rows


@given(
    lengths=st.lists(st.integers(1, 50), max_size=60),
    tokens=st.none() | st.integers(1, 120),
    prompts=st.none() | st.integers(1, 5),
)
def test_every_item_is_in_one_row_within_its_limits(lengths: list[int], tokens: int | None, prompts: int | None) -> None:
    rows = packed_rows(lengths, tokens=tokens, prompts=prompts)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    for row in rows:
        assert row, "no row is empty"
        assert prompts is None or len(row) <= prompts
        assert tokens is None or len(row) == 1 or sum(lengths[item] for item in row) <= tokens


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_rows_are_equally_full_but_for_one_item(lengths: list[int]) -> None:
    rows = [sum(lengths[item] for item in row) for row in packed_rows(lengths, tokens=120)]
    assert max(rows) - min(rows) <= max(lengths), "the row with the fewest tokens always came first"
