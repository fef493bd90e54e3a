"""How fast a run learns, how much of its work is padding, and how much memory it holds."""

from __future__ import annotations

from collections.abc import Callable

import torch


class ThroughputMeter:
    """Adds up steps between two reports."""

    def __init__(self, *, world_size: int, peak_memory: Callable[[], int], peak_flops: float | None = None) -> None:
        """Start with nothing counted.

        Args:
            world_size: number of ranks that share the work.
            peak_memory: most bytes this rank has held so far.
            peak_flops: floating-point operations a second of one device at best (:func:`device_peak_flops`); None leaves
                the utilisation out.
        """
        self._world_size = world_size
        self._peak_memory = peak_memory
        self._peak_flops = peak_flops
        self._reset()

    def _reset(self) -> None:
        self._seconds = 0.0
        self._tokens = 0
        self._positions = 0
        self._flops = 0.0

    def update(self, *, seconds: float, tokens: int, positions: int, flops: float = 0.0) -> None:
        """Count one step, everything over the global batch.

        Args:
            seconds: wall-clock time of the step.
            tokens: tokens that are not padding.
            positions: tokens and padding together.
            flops: floating-point operations of the model in the step; 0 where not known.
        """
        self._seconds += seconds
        self._tokens += tokens
        self._positions += positions
        self._flops += flops

    def report_and_reset(self) -> dict[str, float]:
        """Figures since the last report; empty if there was no step.

        Returns:
            tokens_per_sec, tokens_per_sec_per_rank, padding_share (0 to 1), peak_memory_gb (10^9 bytes, this rank), and mfu
            (share of the devices' peak that the model's operations reached, 0 to 1) where peak and operations are known.
        """
        if self._seconds <= 0.0 or self._positions == 0:
            return {}
        report = {
            "tokens_per_sec": self._tokens / self._seconds,
            "tokens_per_sec_per_rank": self._tokens / self._seconds / self._world_size,
            "padding_share": 1.0 - self._tokens / self._positions,
            "peak_memory_gb": self._peak_memory() / 1e9,
        }
        if self._peak_flops and self._flops:
            report["mfu"] = self._flops / self._seconds / (self._peak_flops * self._world_size)
        self._reset()
        return report


def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Floating-point operations a second of ``device`` at best (Lightning's table); None for devices not in it."""
    if device.type == "cpu":
        return None
    from lightning_fabric.utilities.throughput import get_available_flops

    try:
        return get_available_flops(device, dtype)
    except RuntimeError:  # a listed device, but not for this dtype
        return None
