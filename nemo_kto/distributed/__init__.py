"""Distributed setup and collectives; importing nemo_kto.device first decides which packages megatron-core may use."""

import nemo_kto.device  # noqa: F401
