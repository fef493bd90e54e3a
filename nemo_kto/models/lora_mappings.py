"""Which parameters are adapted, and what the matrices of their adapters hold; without megatron-core, for plans."""

from __future__ import annotations

from dataclasses import replace

from nemo_kto.models.architecture import Architecture
from nemo_kto.models.families import Family, ParamMapping, Split
from nemo_kto.models.lora_settings import OTHER_NAMES, LoRASettings
from nemo_kto.models.segments import split_dimension

LORA_A, LORA_B, LORA_MAGNITUDE = "lora_a", "lora_b", "lora_magnitude"
MAGNITUDE = "lora_magnitude_vector"  # in PEFT's files


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


def adapter_mappings(mapping: ParamMapping, settings: LoRASettings) -> tuple[ParamMapping, ...]:
    """The mappings of ``lora_a`` and ``lora_b`` of an adapted weight, with DoRA also of its magnitudes, in PEFT's names."""
    is_column, rank = split_dimension(mapping) == 0, settings.rank
    inner = "base_model.model.{}.{}"
    prefix = mapping.mcore_name.removesuffix("weight")
    shapes = {name.removesuffix(".weight"): shape for name, shape in mapping.hf_names.items()}
    split_of_rows = mapping.split if is_column else Split.REPLICATED
    matrices = (
        replace(
            mapping,
            mcore_name=prefix + LORA_A,
            hf_names={inner.format(name, "lora_A.weight"): (rank, shape[1]) for name, shape in shapes.items()},
            split=Split.STACKED if is_column else mapping.split,
        ),
        replace(
            mapping,
            mcore_name=prefix + LORA_B,
            hf_names={inner.format(name, "lora_B.weight"): (shape[0], rank) for name, shape in shapes.items()},
            split=split_of_rows,
        ),
    )
    if not settings.dora:
        return matrices
    magnitude = replace(
        mapping,
        mcore_name=prefix + LORA_MAGNITUDE,
        hf_names={inner.format(name, MAGNITUDE): shape[:1] for name, shape in shapes.items()},
        split=split_of_rows,
    )
    return (*matrices, magnitude)


def hf_module(name: str) -> str:
    """``q_proj`` of ``model.layers.{layer}.self_attn.q_proj.weight`` and of the same under PEFT's names.

    One of :data:`~nemo_kto.models.lora_settings.HUGGING_FACE_TARGETS`, whatever the family calls it; or of others, or empty
    where the name is not that of a matrix.
    """
    if not name.endswith((".weight", f".{MAGNITUDE}")):
        return ""
    for suffix in (".weight", ".lora_A", ".lora_B", f".{MAGNITUDE}"):
        name = name.removesuffix(suffix)
    module = name.split(".")[-1]
    return OTHER_NAMES.get(module, module)
