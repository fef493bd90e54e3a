"""Throughput, padding fraction, memory and model FLOPs utilisation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nemo_kto.utils import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

# Peak FLOP/s in dense bf16 with fp32 accumulation, of GPUs that are missing from Lightning's table or for which it gives the
# value with sparsity, for two GPUs, or without tensor cores. From NVIDIA's datasheets; where these only give the value with
# sparsity, it is halved, as their footnotes say.
_BF16_PEAKS = {
    "NVIDIA B200": 2250e12,  # Blackwell architecture technical brief, HGX B200
    "NVIDIA GB200": 2500e12,  # GB200 NVL72 datasheet, for one of its 72 GPUs
    "NVIDIA GH200 480GB": 989.5e12,  # GH200 Grace Hopper Superchip datasheet; the three variants differ in memory
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


def throughput(
    sums: Mapping[str, float], *, seconds: float, world_size: int, peak_flops: float | None = None
) -> dict[str, float]:
    """Return the throughput of steps, from their wall-clock time and their sums over all ranks.

    The sums are ``tokens`` and ``kl_tokens`` (of the KL examples), which exclude padding, ``padded_tokens``, which is both
    with padding but without ``shared_tokens``, those of shared prompts, ``flops``, and ``saved_flops``, those that shared
    prompts would have needed in addition. ``peak_flops`` is the FLOP/s of one device (:func:`device_peak_flops`). The names
    are tokens_per_sec, tokens_per_sec_per_rank, padding_fraction (0 to 1), shared_fraction (saved FLOPs as a fraction of
    those without shared prompts, 0 to 1) if a prompt is shared, kl_tokens_per_sec if there are KL examples, and mfu (model
    FLOPs utilisation: model FLOP/s as a fraction of the peak of all devices, 0 to 1) if the peak is known.
    """
    tokens, kl_tokens = int(sums["tokens"]), int(sums.get("kl_tokens", 0))
    report = {
        "tokens_per_sec": tokens / seconds,
        "tokens_per_sec_per_rank": tokens / seconds / world_size,
        "padding_fraction": 1.0 - (tokens + kl_tokens - int(sums.get("shared_tokens", 0))) / int(sums["padded_tokens"]),
    }
    if saved := sums.get("saved_flops", 0):
        report["shared_fraction"] = saved / (sums["flops"] + saved)
    if kl_tokens:
        report["kl_tokens_per_sec"] = kl_tokens / seconds
    if peak_flops:
        report["mfu"] = sums["flops"] / seconds / (peak_flops * world_size)
    return report


def device_peak_flops(device: torch.device, dtype: torch.dtype, *, name: str) -> float | None:
    """Return the peak FLOP/s without sparsity of a device with torch's ``name``; None if no table has it for this dtype."""
    if device.type == "cpu":
        return None
    if dtype == torch.bfloat16 and name in _BF16_PEAKS:
        return _BF16_PEAKS[name]
    from lightning_fabric.utilities.throughput import get_available_flops

    try:
        return get_available_flops(device, dtype)
    except RuntimeError:  # a listed device, but not for this dtype
        return None
