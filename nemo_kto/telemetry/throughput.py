"""How fast a run learns, how much of its work is padding, and how much memory it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class ThroughputMeter:
    """Turns the counts of a step into rates.

    Attributes:
        world_size: number of ranks that share the work.
        peak_memory: most bytes this rank has held so far.
        peak_flops: of one device (:func:`device_peak_flops`); None leaves the utilisation out.
    """

    world_size: int
    peak_memory: Callable[[], int]
    peak_flops: float | None = None

    def figures(self, *, seconds: float, tokens: int, padded_tokens: int, flops: float) -> dict[str, float]:
        """Figures of one step, from its wall-clock time and what it asks of the model over the global batch.

        Args:
            seconds: of the step.
            tokens: without padding.
            padded_tokens: tokens and padding together.
            flops: floating-point operations.

        Returns:
            tokens_per_sec, tokens_per_sec_per_rank, padding_fraction (0 to 1), peak_memory_gb (10^9 bytes, this rank), and
            mfu (fraction of the devices' peak that the model's operations reached, 0 to 1) where the peak is known.
        """
        report = {
            "tokens_per_sec": tokens / seconds,
            "tokens_per_sec_per_rank": tokens / seconds / self.world_size,
            "padding_fraction": 1.0 - tokens / padded_tokens,
            "peak_memory_gb": self.peak_memory() / 1e9,
        }
        if self.peak_flops:
            report["mfu"] = flops / seconds / (self.peak_flops * self.world_size)
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
