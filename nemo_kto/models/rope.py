"""Rotary position embeddings: as Hugging Face configurations describe them, and applied to queries and keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

ROPE_TYPES = ("default", "linear", "llama3")
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Which rotation a position means.

    Attributes:
        theta: base of the geometric row of wavelengths.
        kind: default, linear (all wavelengths times ``factor``) or llama3 (only the long ones).
        factor: how much longer the context became.
        low_freq_factor: wavelengths above original_max_positions / low_freq_factor are stretched by the whole ``factor``.
        high_freq_factor: wavelengths below original_max_positions / high_freq_factor are not changed; between, a blend.
        original_max_positions: tokens of context before the stretch.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """Radians a position for each pair of channels, fp32 [head_dim / 2].

        megatron-core can compute the llama3 stretch itself, but with fixed low and high factors and original context.
        """
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / (self.theta**exponents)
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind != "llama3":
            return frequencies
        wavelengths = 2 * math.pi / frequencies
        turns = self.original_max_positions / wavelengths  # full turns over the original context
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0.0, 1.0)
        return (1 - kept) * frequencies / self.factor + kept * frequencies


class RotaryTable:
    """Cosines and sines of all positions so far; one for all layers of a model.

    megatron-core computes them again in each layer, of queries and of keys.
    """

    def __init__(self, *, rope: Rope, head_dim: int) -> None:
        self._rope, self._head_dim = rope, head_dim
        self._cos_and_sin: tuple[Tensor, Tensor] | None = None

    def rotate(self, heads_sbhd: Tensor) -> Tensor:
        """Queries or keys [sequence, batch, heads, head size], each rotated by its place in the sequence."""
        positions, kept = len(heads_sbhd), self._cos_and_sin
        if kept is None or len(kept[0]) < positions or kept[0].dtype != heads_sbhd.dtype:
            kept = self._cos_and_sin = self._tables_like(heads_sbhd)
        rotated: Tensor = _Rotation.apply(heads_sbhd, *(table[:positions] for table in kept))  # type: ignore[no-untyped-call]
        return rotated

    def _tables_like(self, heads_sbhd: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines [sequence, 1, 1, head size] and sines [.., half of it] in the dtype of the heads, computed in fp32."""
        frequency_c = self._rope.inverse_frequencies(self._head_dim).to(heads_sbhd.device)
        position_s = torch.arange(len(heads_sbhd), dtype=torch.float32, device=heads_sbhd.device)
        angle_s11c = torch.outer(position_s, frequency_c)[:, None, None, :]
        cos_s11d, sin_s11c = angle_s11c.cos().repeat(1, 1, 1, 2), angle_s11c.sin()
        return cos_s11d.to(heads_sbhd.dtype), sin_s11c.to(heads_sbhd.dtype)


class _Rotation(torch.autograd.Function):
    """Channel c and channel c + half of the head are a pair. The gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, heads_sbhd: Tensor, cos_s11d: Tensor, sin_s11c: Tensor) -> Tensor:
        ctx.save_for_backward(cos_s11d, sin_s11c)
        return _rotated(heads_sbhd, cos_s11d, sin_s11c, direction=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _rotated(grads[0], *ctx.saved_tensors, direction=-1), None, None


def _rotated(heads_sbhd: Tensor, cos_s11d: Tensor, sin_s11c: Tensor, *, direction: int) -> Tensor:
    rotated_sbhd = heads_sbhd * cos_s11d
    (low, high), (rotated_low, rotated_high) = heads_sbhd.chunk(2, dim=-1), rotated_sbhd.chunk(2, dim=-1)
    rotated_low.addcmul_(high, sin_s11c, value=-direction)
    rotated_high.addcmul_(low, sin_s11c, value=direction)
    return rotated_sbhd


def check_rope_type(config: Mapping[str, Any]) -> str:
    """The rope type that a configuration names.

    Raises:
        ValueError: it is not implemented, or differs between layers.
    """
    settings = _settings(config)
    nested = sorted(name for name, value in settings.items() if isinstance(value, Mapping))
    if nested:
        told = f"rope_parameters must be the same for all layers, got one set for each of {', '.join(nested)}"
        raise ValueError(f"{told}; choose another model")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ValueError(f"the rope type must be one of {', '.join(ROPE_TYPES)}, got {kind!r}; choose another model")
    return kind


def read_rope(config: Mapping[str, Any]) -> Rope:
    """Read the rotary embedding out of a Hugging Face configuration, in its old form (rope_theta, rope_scaling) or its new
    one (rope_parameters).

    Args:
        config: the configuration as a dict, with the family's defaults filled in.

    Raises:
        ValueError: a rope type that is not implemented, or one of its numbers is missing.
    """
    settings, kind = _settings(config), check_rope_type(config)
    theta = settings.get("rope_theta", config.get("rope_theta"))
    needed = {"default": (), "linear": ("factor",), "llama3": _LLAMA3_KEYS}[kind]
    missing = [name for name in needed if settings.get(name) is None] + ([] if theta is not None else ["rope_theta"])
    if missing or theta is None:
        told = f"rope type {kind!r} needs {', '.join(missing)}, missing in rope_parameters (or rope_scaling)"
        raise ValueError(f"{told}; add what is missing")
    if settings.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError(f"partial_rotary_factor must be 1.0, got {settings['partial_rotary_factor']}; choose another model")
    rope = Rope(theta=float(theta), kind=kind, factor=float(settings.get("factor") or 1.0))
    if kind != "llama3":
        return rope
    low, high = float(settings["low_freq_factor"]), float(settings["high_freq_factor"])
    original = int(settings["original_max_position_embeddings"])
    return replace(rope, low_freq_factor=low, high_freq_factor=high, original_max_positions=original)


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
