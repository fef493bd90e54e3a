"""Saving and loading of training checkpoints; importing nemo_kto.device first decides what megatron-core may import."""

import nemo_kto.device  # noqa: F401
