"""nemo_kto: alignment on feedback, with or without pairs, at Megatron scale."""

__version__ = "0.2.0"
