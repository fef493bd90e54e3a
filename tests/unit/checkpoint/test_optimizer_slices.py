"""A range of a tensor's flattened values is split into slices of the tensor, in order."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from nemo_kto.checkpoint.sharded_state import Block, blocks


@pytest.mark.parametrize("shape", [(7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (1, 3, 4), (2, 1, 3)])
def test_slices_make_up_the_range(shape: tuple[int, ...]) -> None:
    length = math.prod(shape)
    whole = torch.arange(length).view(shape)
    for start, end in itertools.combinations(range(length + 1), 2):
        found = list(blocks(shape, start, end))
        slices = [[slice(at, at + size) for at, size in zip(each.offsets, each.sizes, strict=True)] for each in found]
        parts = [whole[tuple(of_axes)] for of_axes in slices]
        assert torch.cat([part.flatten() for part in parts]).tolist() == list(range(start, end))
        assert [each.start for each in found] == [int(part.flatten()[0]) for part in parts]
        assert len(found) <= 2 * len(shape) - 1


def test_a_range_is_a_partial_row_complete_rows_and_a_partial_row() -> None:
    assert list(blocks((4, 5), 3, 17)) == [Block(3, (0, 3), (1, 2)), Block(5, (1, 0), (2, 5)), Block(15, (3, 0), (1, 2))]
    assert list(blocks((4, 5), 6, 8)) == [Block(6, (1, 1), (1, 2))]
    assert list(blocks((4, 5), 8, 8)) == []
