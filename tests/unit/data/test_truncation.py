"""Tokens that remain after truncation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_kto.data.tokens.truncation import Truncation
from tests.helpers.messages import raises


@pytest.mark.parametrize(
    ("prompt", "response", "seq_length", "mode", "bos_id", "expected"),
    [
        ([1, 2, 3], [8, 9], 5, "keep_end", None, ([1, 2, 3], [8, 9])),
        ([1, 2, 3], [8, 9], 4, "keep_end", None, ([2, 3], [8, 9])),
        ([1, 2, 3], [8, 9], 4, "keep_start", None, ([1, 2], [8, 9])),
        ([1, 2, 3, 4], [8, 9], 4, "keep_end", 1, ([1, 4], [8, 9])),  # the BOS stays in front
        ([1, 2, 3, 4], [8, 9], 3, "keep_end", 1, ([4], [8, 9])),  # one place: for the last token, not for the BOS
        ([1, 2, 3], [7, 8, 9], 3, "keep_end", None, ([3], [7, 8])),  # the answer itself is too long
        ([1, 2, 3], [7, 8, 9], 2, "keep_start", None, ([1], [7])),
    ],
)
def test_truncation_examples(
    prompt: list, response: list, seq_length: int, mode: str, bos_id: int | None, expected: tuple
) -> None:
    assert Truncation(seq_length, mode, bos_id).truncate(prompt, response) == expected


@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    response=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    seq_length=st.integers(2, 15),
    mode=st.sampled_from(["keep_end", "keep_start"]),
    bos_id=st.sampled_from([None, 0]),
)
def test_a_truncated_row_fits_and_keeps_all_answer_tokens_it_can(
    prompt: list, response: list, seq_length: int, mode: str, bos_id: int | None
) -> None:
    short, answer = Truncation(seq_length, mode, bos_id).truncate(prompt, response)
    assert len(short) >= 1
    assert answer == response[: seq_length - 1]
    assert len(short) + len(answer) == min(len(prompt) + len(answer), seq_length)


def test_impossible_settings_are_refused() -> None:
    with raises(ValueError, "2", "1"):
        Truncation(1, "keep_end", None)
    with raises(ValueError, "keep_end", "keep_start", "middle"):
        Truncation(8, "middle", None)
