"""Which parameters are adapted, and what the matrices of their adapters hold; without megatron-core, for plans."""

from __future__ import annotations

from dataclasses import replace

from nemo_kto.models.architecture import Architecture
from nemo_kto.models.families import Family, ParamMapping, Split
from nemo_kto.models.lora_settings import OTHER_NAMES, LoRASettings
from nemo_kto.models.segments import split_dimension

LORA_A, LORA_B = "lora_a", "lora_b"


def adaptable(family: Family) -> list[ParamMapping]:
    """The parameters that can be adapted: matrices of layers, those of experts too, but no router."""
    return [mapping for mapping in family.mappings if ".linear_" in mapping.mcore_name]


def adapted_mappings(architecture: Architecture, settings: LoRASettings) -> list[ParamMapping]:
    """The parameters of the family whose weights are adapted, in whole or in part."""
    return [
        mapping
        for mapping in adaptable(architecture.family)
        if any(hf_module(name) in settings.modules for name in mapping.hf_names)
    ]


def adapts_experts(architecture: Architecture, settings: LoRASettings | None) -> bool:
    """Whether an expert has adapters."""
    if settings is None or not any(mapping.of_expert for mapping in adapted_mappings(architecture, settings)):
        return False
    numbers = {number for number, sparse in enumerate(architecture.sparse_layers, start=1) if sparse}
    return bool(numbers if settings.layers is None else numbers.intersection(settings.layers))


def adapter_mappings(mapping: ParamMapping, rank: int) -> tuple[ParamMapping, ParamMapping]:
    """The mappings of ``lora_a`` and ``lora_b`` of an adapted weight, under PEFT's names."""
    is_column = split_dimension(mapping) == 0
    inner = "base_model.model.{}.{}.weight"
    prefix = mapping.mcore_name.removesuffix("weight")
    names = {name: name.removesuffix(".weight") for name in mapping.hf_names}
    return (
        replace(
            mapping,
            mcore_name=prefix + LORA_A,
            hf_names={inner.format(name, "lora_A"): (rank, mapping.hf_names[weight][1]) for weight, name in names.items()},
            split=Split.STACKED if is_column else mapping.split,
        ),
        replace(
            mapping,
            mcore_name=prefix + LORA_B,
            hf_names={inner.format(name, "lora_B"): (mapping.hf_names[weight][0], rank) for weight, name in names.items()},
            split=mapping.split if is_column else Split.REPLICATED,
        ),
    )


def hf_module(name: str) -> str:
    """``q_proj`` of ``model.layers.{layer}.self_attn.q_proj.weight`` and of the same under PEFT's name, with ``lora_A``.

    One of :data:`~nemo_kto.models.lora_settings.HUGGING_FACE_TARGETS`, whatever the family calls it; or of others, or empty
    where the name is not that of a matrix.
    """
    parts = name.removesuffix(".weight").removesuffix(".lora_A").removesuffix(".lora_B").split(".")
    return OTHER_NAMES.get(parts[-1], parts[-1]) if name.endswith(".weight") else ""
