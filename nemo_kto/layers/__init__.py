"""Layers on megatron-core; the device package is imported first, as it decides what megatron-core may import."""

import nemo_kto.device  # noqa: F401
