"""Rotary position embeddings as Hugging Face configurations describe them."""

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
