"""Tables of the model families. To add a family, write its table and add it to ``FAMILIES``."""

from __future__ import annotations

from nemo_kto.architecture.families.dense import GEMMA2, GEMMA3, LLAMA, MISTRAL, OLMO2, OLMO3, PHI3, QWEN2, QWEN3, SMOLLM3
from nemo_kto.architecture.families.mixture import GPT_OSS, LLAMA4, MIXTRAL, QWEN2_MOE, QWEN3_MOE
from nemo_kto.architecture.families.table import Experts, Family, Layers, ParamMapping, Split, Temperature

__all__ = ["FAMILIES", "Experts", "Family", "Layers", "ParamMapping", "Split", "Temperature", "find_family"]

_TABLES = (
    *(GEMMA2, GEMMA3, GPT_OSS, LLAMA, LLAMA4, MISTRAL, MIXTRAL, OLMO2, OLMO3, PHI3),
    *(QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, SMOLLM3),
)
FAMILIES = {family.hf_architecture: family for family in _TABLES}


def find_family(hf_architecture: str) -> Family:
    """Return the table of an architecture.

    Raises:
        ValueError: there is no table for it; the message lists the supported architectures.
    """
    if hf_architecture not in FAMILIES:
        raise ValueError(
            f"the architecture must be one of {', '.join(FAMILIES)}, got {hf_architecture!r}; choose another model"
        )
    return FAMILIES[hf_architecture]
