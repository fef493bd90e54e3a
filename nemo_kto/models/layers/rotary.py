"""Rotary embedding inside attention, and attention temperature scaling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nemo_kto.architecture.families import Temperature
from nemo_kto.architecture.rope import Rope
from nemo_kto.device import device
from nemo_kto.models.layers.spans import token_positions


class TemperatureTable:
    """Attention temperature scaling: a factor on the queries for each position.

    The factors of the last packed sequences are cached for the next calls.

    Args:
        temperature: parameters of the scaling.
    """

    def __init__(self, *, temperature: Temperature) -> None:
        self._temperature = temperature
        self._of_row: tuple[tuple[int, ...], Tensor] | None = None

    def scale(self, query_sbhd: Tensor, lengths: tuple[int, ...] | None = None, *, rank: int = 0, size: int = 1) -> Tensor:
        """Multiply queries by the factors of their positions.

        Args:
            query_sbhd: queries [sequence, batch, heads, head size].
            lengths: lengths of the packed sequences, each starting at position 0; None for a single sequence.
            rank, size: rank in the context-parallel group, and its size. They must be the same in every call.
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
    """Return the factor 1 + scale * log(1 + floor((p + 1) / floor)) of each position p: fp32 [s]."""
    return 1 + temperature.scale * torch.log1p(torch.floor((position_s.float() + 1) / temperature.floor))


class RotaryTable:
    """RoPE with cached cosines and sines, shared by all layers of a model.

    megatron-core instead recomputes them in each layer, for queries and for keys.

    Args:
        rope: the rotation frequencies.
        interleaved: rotate channels 0 and 1 of a head as a pair, 2 and 3, and so on, in fp32; if False, the pairs are
            channels c and c + half the number of rotated channels.
    """

    def __init__(self, *, rope: Rope, interleaved: bool = False) -> None:
        self._rope = rope
        self._interleaved = interleaved
        self._cos_and_sin: tuple[Tensor, Tensor] | None = None
        self._of_row: tuple[tuple[int, ...], tuple[Tensor, Tensor]] | None = None

    def rotate(self, heads_sbhd: Tensor, lengths: tuple[int, ...] | None = None, *, rank: int = 0, size: int = 1) -> Tensor:
        """Rotate the first channels of queries or keys by their positions; the other channels stay unchanged.

        Args:
            heads_sbhd: queries or keys [sequence, batch, heads, head size].
            lengths: lengths of the packed sequences, each starting at position 0; None for a single sequence.
            rank, size: rank in the context-parallel group, and its size; above size 1, ``lengths`` is required. They must be
                the same in every call.
        """
        dtype = heads_sbhd.dtype
        if self._interleaved:
            heads_sbhd = heads_sbhd.float()
        if lengths is None:
            cos_s11d, sin_s11c = self._from_zero(len(heads_sbhd), heads_sbhd)
        else:
            cos_s11d, sin_s11c = self._row(lengths, heads_sbhd, rank=rank, size=size)
        first, rest = heads_sbhd.tensor_split([cos_s11d.size(-1)], dim=-1)
        rotated: Tensor = _Rotation.apply(first, cos_s11d, sin_s11c, self._interleaved)  # type: ignore[no-untyped-call]
        return (torch.cat((rotated, rest), dim=-1) if rest.size(-1) else rotated).to(dtype)

    def _from_zero(self, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines [positions, 1, 1, rotated channels] and sines [positions, 1, 1, rotated channels / 2]."""
        kept = self._cos_and_sin
        if kept is None or len(kept[0]) < positions or kept[0].dtype != like.dtype:
            kept = self._cos_and_sin = self._tables_like(positions, like)
        return kept[0][:positions], kept[1][:positions]

    def _row(self, lengths: tuple[int, ...], like: Tensor, *, rank: int, size: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for packed sequences; those of the last call are cached for the other layers."""
        if self._of_row is None or self._of_row[0] != lengths or self._of_row[1][0].dtype != like.dtype:
            cos_s11d, sin_s11c = self._from_zero(max(lengths), like)
            (position_t,) = device.upload([token_positions(lengths, rank=rank, size=size)])
            self._of_row = lengths, (cos_s11d[position_t], sin_s11c[position_t])
        return self._of_row[1]

    def _tables_like(self, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Compute cosines and sines in fp32 and return them in the dtype of ``like``."""
        frequency_c = self._rope.inverse_frequencies().to(like.device)
        position_s = torch.arange(positions, dtype=torch.float32, device=like.device)
        angle_s11c = torch.outer(position_s, frequency_c)[:, None, None, :]
        factor = self._rope.attention_factor if self._rope.factor_in_table else 1.0
        cos_s11c, sin_s11c = angle_s11c.cos() * factor, angle_s11c.sin() * factor
        cos_s11d = cos_s11c.repeat_interleave(2, dim=-1) if self._interleaved else cos_s11c.repeat(1, 1, 1, 2)
        return cos_s11d.to(like.dtype), sin_s11c.to(like.dtype)


class _Rotation(torch.autograd.Function):
    """Rotation of each pair of channels; the backward pass rotates the gradient in the opposite direction."""

    @staticmethod
    def forward(ctx: Any, heads_sbhd: Tensor, cos_s11d: Tensor, sin_s11c: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos_s11d, sin_s11c)
        ctx.interleaved = interleaved
        return _rotated(heads_sbhd, cos_s11d, sin_s11c, interleaved=interleaved, direction=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _rotated(grads[0], *ctx.saved_tensors, interleaved=ctx.interleaved, direction=-1), None, None, None


def _rotated(heads_sbhd: Tensor, cos_s11d: Tensor, sin_s11c: Tensor, *, interleaved: bool, direction: int) -> Tensor:
    rotated_sbhd = heads_sbhd * cos_s11d
    (low, high), (rotated_low, rotated_high) = (_pairs(each, interleaved) for each in (heads_sbhd, rotated_sbhd))
    rotated_low.addcmul_(high, sin_s11c, value=-direction)
    rotated_high.addcmul_(low, sin_s11c, value=direction)
    return rotated_sbhd


def _pairs(heads_sbhd: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return views of the first and of the second channel of each pair, [..., channels / 2]."""
    if interleaved:
        return heads_sbhd[..., 0::2], heads_sbhd[..., 1::2]
    low, high = heads_sbhd.chunk(2, dim=-1)
    return low, high
