"""How fast a run learns, how much of its work is padding, and how much memory it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_kto.utils.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

# Dense bf16 with sums in fp32, of cards that Lightning's table lacks, or has with sparsity, of two cards or without tensor
# cores. By NVIDIA's datasheets; those that state sparsity only are halved, as their footnotes say.
_BF16_PEAKS = {
    "NVIDIA B200": 2250e12,  # Blackwell architecture technical brief, HGX B200
    "NVIDIA GB200": 2500e12,  # GB200 NVL72 datasheet, for each of the 72
    "NVIDIA GH200 480GB": 989.5e12,  # GH200 Grace Hopper Superchip datasheet; the three differ in memory
    "NVIDIA GH200 120GB": 989.5e12,
    "NVIDIA GH200 144G HBM3e": 989.5e12,
    "NVIDIA H200": 989.5e12,  # H200 Tensor Core GPU datasheet
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA H100 NVL": 835.5e12,  # H100 Tensor Core GPU datasheet
    "NVIDIA L40S": 362.05e12,  # L40S datasheet
    "NVIDIA L40": 181.05e12,  # L40 datasheet
    "NVIDIA A40": 149.7e12,  # A40 datasheet
    "NVIDIA A10": 125e12,  # A10 datasheet
    "NVIDIA RTX A6000": 154.8e12,  # GA102 architecture whitepaper, appendix
    "NVIDIA RTX 6000 Ada Generation": 364.2e12,  # RTX 6000 Ada datasheet
    "NVIDIA GeForce RTX 4090": 165.2e12,  # Ada architecture whitepaper, appendix
    "NVIDIA GeForce RTX 3090": 71e12,  # GA102 architecture whitepaper
}


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

    def figures(
        self, *, seconds: float, tokens: int, padded_tokens: int, flops: float, kl_tokens: int = 0
    ) -> dict[str, float]:
        """Figures of one step, from its wall-clock time and what it asks of the model over the global batch.

        Args:
            seconds: of the step.
            tokens: that are trained on, without padding.
            padded_tokens: tokens, KL tokens and padding together.
            flops: floating-point operations.
            kl_tokens: of the KL examples, without padding.

        Returns:
            tokens_per_sec, tokens_per_sec_per_rank, padding_fraction (0 to 1), peak_memory_gb (10^9 bytes, this rank),
            kl_tokens_per_sec where there are KL examples, and mfu (fraction of the devices' peak that the model's operations
            reached, 0 to 1) where the peak is known.
        """
        report = {
            "tokens_per_sec": tokens / seconds,
            "tokens_per_sec_per_rank": tokens / seconds / self.world_size,
            "padding_fraction": 1.0 - (tokens + kl_tokens) / padded_tokens,
            "peak_memory_gb": self.peak_memory() / 1e9,
        }
        if kl_tokens:
            report["kl_tokens_per_sec"] = kl_tokens / seconds
        if self.peak_flops:
            report["mfu"] = flops / seconds / (self.peak_flops * self.world_size)
        return report


def device_peak_flops(device: torch.device, dtype: torch.dtype, *, name: str) -> float | None:
    """Floating-point operations a second of ``device`` at best, without sparsity; None for devices that no table has.

    Args:
        device: what computes.
        dtype: of the operands.
        name: what the device is sold as, in torch's words.
    """
    if device.type == "cpu":
        return None
    if dtype == torch.bfloat16 and name in _BF16_PEAKS:
        return _BF16_PEAKS[name]
    from lightning_fabric.utilities.throughput import get_available_flops

    try:
        return get_available_flops(device, dtype)
    except RuntimeError:  # a listed device, but not for this dtype
        return None
