"""Assembly of a run: data, policy, reference and trainer from a configuration.

``nemo_kto.device`` is imported before megatron-core, because it controls which optional packages megatron-core may use.
"""

import nemo_kto.device  # noqa: F401
