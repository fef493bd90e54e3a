"""Imported once by the process that every rank is forked from, so that no rank imports torch and megatron-core itself.

Imported modules must not start threads, because a fork has none of them.
"""

from __future__ import annotations

import gc

gc.disable()  # nothing of what an import leaves is garbage, and looking for it is half the time that imports take

import torch  # noqa: E402
import transformers.models.llama.configuration_llama  # noqa: E402, F401  (imports most of transformers)

import nemo_kto.run.train  # noqa: E402, F401
import tests.helpers.composed  # noqa: E402, F401

torch.set_num_threads(1)
gc.freeze()  # megatron-core collects garbage at each save: a second of looking at modules otherwise
gc.enable()
