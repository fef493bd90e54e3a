"""Import and export of weights and adapters in Hugging Face and PEFT formats.

``nemo_kto.device`` is imported first because it settles which optional packages megatron-core may import.
"""

import nemo_kto.device  # noqa: F401
