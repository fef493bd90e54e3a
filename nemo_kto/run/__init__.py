"""Assembly of a run: data, policy, reference and trainer from a configuration.

The modules of this package import megatron-core, which imports optional packages if they are installed. ``nemo_kto.device``
is imported first, because it controls which of them megatron-core may use.
"""

import nemo_kto.device  # noqa: F401
