"""Queries that grow with their position, in layers without rotary embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_kto.architecture.families import Temperature
from nemo_kto.device import device
from nemo_kto.models.layers.spans import token_positions


class TemperatureTable:
    """What queries are multiplied by at each place; the factors of the last row of sequences are kept, for other passes.

    Args:
        temperature: the formula and its numbers.
    """

    def __init__(self, *, temperature: Temperature) -> None:
        self._temperature = temperature
        self._of_row: tuple[tuple[int, ...], Tensor] | None = None

    def scale(self, query_sbhd: Tensor, lengths: tuple[int, ...] | None = None, *, rank: int = 0, size: int = 1) -> Tensor:
        """Queries [sequence, batch, heads, head size] times the factor of their place.

        Args:
            query_sbhd: what is multiplied.
            lengths: of the sequences that lie one after the other, each of which begins at 0; None for one.
            rank, size: of the context-parallel group, whose ranks share the sequences. The same in every call.
        """
        lengths = (len(query_sbhd),) if lengths is None else lengths
        if max(lengths) < self._temperature.floor:  # every factor is 1
            return query_sbhd
        if self._of_row is None or self._of_row[0] != lengths:
            factor_s = factors(self._temperature, token_positions(lengths, rank=rank, size=size))
            (factor_s,) = device.upload([factor_s])
            self._of_row = lengths, factor_s[:, None, None, None]
        return (query_sbhd * self._of_row[1]).to(query_sbhd.dtype)


def factors(temperature: Temperature, position_s: Tensor) -> Tensor:
    """1 + scale * log(1 + floor((p + 1) / floor)) of each position p: fp32 [s]."""
    return 1 + temperature.scale * torch.log1p(torch.floor((position_s.float() + 1) / temperature.floor))
