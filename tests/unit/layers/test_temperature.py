"""Attention temperature scaling: the formula, packed sequences, and context-parallel ranks.

That they are transformers' is seen in the logits of Llama 4 (tests/parity/test_huggingface.py).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from nemo_kto.layers.layer_settings import Temperature
from nemo_kto.layers.packing import local_token_indices
from nemo_kto.layers.rope_tables import TemperatureTable

TEMPERATURE = Temperature(floor=3, scale=0.4)


def grown(queries: torch.Tensor, *arguments: tuple[int, ...], **shares: Any) -> list[float]:
    """By which factor each place of queries of ones grows."""
    return TemperatureTable(temperature=TEMPERATURE).scale(queries, *arguments, **shares)[:, 0, 0, 0].tolist()


def by_hand(*steps: int) -> Any:
    return pytest.approx([1 + 0.4 * math.log(1 + step) for step in steps], rel=1e-6)


def ones(tokens: int) -> torch.Tensor:
    return torch.ones(tokens, 1, 2, 4)


def test_the_scale_grows_at_each_multiple_of_the_floor() -> None:
    assert grown(ones(9)) == by_hand(0, 0, 1, 1, 1, 2, 2, 2, 3)


def test_positions_start_at_zero_for_each_packed_sequence() -> None:
    assert grown(ones(9), (4, 2, 3)) == by_hand(0, 0, 1, 1, 0, 0, 0, 0, 1)


def test_ranks_use_the_scales_of_their_tokens() -> None:
    lengths = (12, 4)
    whole = torch.tensor(grown(ones(16), lengths))
    for rank in range(2):
        assert grown(ones(8), lengths, rank=rank, size=2) == whole[local_token_indices(lengths, rank=rank, size=2)].tolist()


def test_the_dtype_is_kept_and_another_row_has_another_table() -> None:
    table = TemperatureTable(temperature=TEMPERATURE)
    assert table.scale(ones(5).bfloat16()).dtype == torch.bfloat16
    assert table.scale(ones(5), (2, 3))[:, 0, 0, 0].tolist() == by_hand(0, 0, 0, 0, 1)
    assert table.scale(ones(3))[:, 0, 0, 0].tolist() == by_hand(0, 0, 1)
