"""Its modules import megatron-core, which takes from what is installed; what it may take is settled before."""

import nemo_kto.device  # noqa: F401
