"""Mistral, dense: llama with a window of attention in every layer where ``sliding_window`` is set."""

from __future__ import annotations

from nemo_kto.models.families.dense import DENSE_MAPPINGS
from nemo_kto.models.families.table import Family, window_everywhere

MISTRAL = Family(name="mistral", hf_architecture="MistralForCausalLM", mappings=DENSE_MAPPINGS, windows=window_everywhere)
