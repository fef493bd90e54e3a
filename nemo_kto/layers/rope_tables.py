"""RoPE inside attention, and attention temperature scaling.

In both tables ``lengths`` are the lengths of packed segments, None for a single sequence, and ``prompts`` the segments that
they continue (see ``layers/packing.py``); a segment without one starts at position 0. ``rank`` and ``size`` are the
rank in the context-parallel group, and its size; they must be the same in every call, and above size 1 ``lengths`` is
required. Values for the last pack are cached for the next layers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from nemo_kto.device import device
from nemo_kto.device.kernels import FusedKernel
from nemo_kto.layers.layer_settings import Rope, Temperature
from nemo_kto.layers.packing import Prompts, shared_lengths, token_positions


class TemperatureTable:
    """Attention temperature scaling: a factor on the queries for each position."""

    def __init__(self, *, temperature: Temperature) -> None:
        self._temperature = temperature
        self.with_rope = temperature.with_rope
        self._packed: tuple[object, Tensor] | None = None

    def scale(
        self,
        query_sbhd: Tensor,
        lengths: tuple[int, ...] | None = None,
        *,
        prompts: Prompts = None,
        rank: int = 0,
        size: int = 1,
    ) -> Tensor:
        """Multiply queries at position p by 1 + scale * log(1 + floor(p / floor)), computed in fp32."""
        lengths = (len(query_sbhd),) if lengths is None else lengths
        floor, scale, first = self._temperature.floor, self._temperature.scale, self._temperature.first
        if _end(lengths, prompts) + first <= floor:  # every factor is 1
            return query_sbhd
        if self._packed is None or self._packed[0] != (lengths, prompts):
            position_s = _positions(lengths, prompts, rank, size)
            factor_s = 1 + scale * torch.log1p(torch.floor((position_s.float() + first) / floor))
            self._packed = (lengths, prompts), factor_s[:, None, None, None]
        return (query_sbhd * self._packed[1]).to(query_sbhd.dtype)


@functools.lru_cache(maxsize=32)  # the same for all layers and passes
def _positions(lengths: tuple[int, ...], prompts: Prompts, rank: int, size: int) -> Tensor:
    """Return :func:`token_positions` on the device."""
    (position_t,) = device.upload([token_positions(lengths, prompts=prompts, rank=rank, size=size)])
    return position_t  # type: ignore[no-any-return]


def _end(lengths: tuple[int, ...], prompts: Prompts) -> int:
    """Return the number of tokens of the longest sequence."""
    return max(map(sum, zip(lengths, shared_lengths(lengths, prompts), strict=True)))


class RopeTable:
    """RoPE with cached cosines and sines, shared by all layers; megatron-core instead recomputes them in each layer."""

    def __init__(self, *, rope: Rope, interleaved: bool = False) -> None:
        """Store the rotation frequencies.

        With ``interleaved``, channels 0 and 1 of a head are rotated as a pair, 2 and 3, and so on, in fp32; otherwise the
        pairs are channels c and c + half the number of rotated channels.
        """
        self._rope = rope
        self._interleaved = interleaved
        self._cos_and_sin: tuple[Tensor, Tensor] | None = None
        self._packed: tuple[object, tuple[Tensor, Tensor]] | None = None

    def rotate(
        self,
        heads_sbhd: Tensor,
        lengths: tuple[int, ...] | None = None,
        *,
        prompts: Prompts = None,
        rank: int = 0,
        size: int = 1,
    ) -> Tensor:
        """Rotate the first channels of queries or keys [sequence, batch, heads, head size] by their positions."""
        dtype = heads_sbhd.dtype
        if self._interleaved:
            heads_sbhd = heads_sbhd.float()
        if lengths is None:
            cos_s11d, sin_s11c = self._from_zero(len(heads_sbhd), heads_sbhd)
        else:
            known = lengths, prompts, heads_sbhd.dtype
            if self._packed is None or self._packed[0] != known:
                cos_s11d, sin_s11c = self._from_zero(_end(lengths, prompts), heads_sbhd)
                position_t = _positions(lengths, prompts, rank, size)
                self._packed = known, (cos_s11d[position_t], sin_s11c[position_t])
            cos_s11d, sin_s11c = self._packed[1]
        first, rest = heads_sbhd.tensor_split([cos_s11d.size(-1)], dim=-1)
        rotated: Tensor = _Rotation.apply(first, cos_s11d, sin_s11c, self._interleaved)  # type: ignore[no-untyped-call]
        return (torch.cat((rotated, rest), dim=-1) if rest.size(-1) else rotated).to(dtype)

    def _from_zero(self, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines [positions, 1, 1, rotated channels] and sines [..., rotated channels / 2], computed in fp32."""
        cached = self._cos_and_sin
        if cached is None or len(cached[0]) < positions or cached[0].dtype != like.dtype:
            (frequency_c,) = device.upload([self._rope.inverse_frequencies()])
            rows = 1 << (positions - 1).bit_length()  # so that a slightly longer sequence needs no new table
            position_s = torch.arange(rows, dtype=torch.float32, device=like.device)
            angle_s11c = torch.outer(position_s, frequency_c.to(like.device))[:, None, None, :]
            factor = self._rope.attention_factor if self._rope.factor_in_table else 1.0
            cos_s11c, sin_s11c = angle_s11c.cos() * factor, angle_s11c.sin() * factor
            cos_s11d = cos_s11c.repeat_interleave(2, dim=-1) if self._interleaved else cos_s11c.repeat(1, 1, 1, 2)
            cached = self._cos_and_sin = cos_s11d.to(like.dtype), sin_s11c.to(like.dtype)
        return cached[0][:positions], cached[1][:positions]


class _Rotation(torch.autograd.Function):
    """Rotation of each pair of channels; the backward pass rotates the gradient in the opposite direction."""

    @staticmethod
    def forward(ctx: Any, heads_sbhd: Tensor, cos_s11d: Tensor, sin_s11c: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos_s11d, sin_s11c)
        ctx.interleaved = interleaved
        return _rotate(heads_sbhd, cos_s11d, sin_s11c, interleaved, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos_s11d, sin_s11c = ctx.saved_tensors
        return _rotate(grads[0], cos_s11d, sin_s11c, ctx.interleaved, True), None, None, None


def _pairs(heads: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    low, high = (heads[..., 0::2], heads[..., 1::2]) if interleaved else heads.chunk(2, dim=-1)
    return low, high


def _fusable_rotation(heads_sbhd: Tensor, cos_s11d: Tensor, sin_s11c: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    (low, high), (cos_low, cos_high) = _pairs(heads_sbhd, interleaved), _pairs(cos_s11d, interleaved)
    sin_s11c = -sin_s11c if inverse else sin_s11c
    rotated = low * cos_low - high * sin_s11c, high * cos_high + low * sin_s11c
    return torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)


def _eager_rotation(heads_sbhd: Tensor, cos_s11d: Tensor, sin_s11c: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    rotated_sbhd = heads_sbhd * cos_s11d
    (low, high), (rotated_low, rotated_high) = _pairs(heads_sbhd, interleaved), _pairs(rotated_sbhd, interleaved)
    direction = -1 if inverse else 1
    rotated_low.addcmul_(high, sin_s11c, value=-direction)
    rotated_high.addcmul_(low, sin_s11c, value=direction)
    return rotated_sbhd


_rotate = FusedKernel(compiled=_fusable_rotation, eager=_eager_rotation)
