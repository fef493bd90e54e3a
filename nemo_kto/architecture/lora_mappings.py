"""Which parameters are adapted, and what the matrices of their adapters hold; without megatron-core, for plans."""

from __future__ import annotations

from dataclasses import replace

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.families import Family, ParamMapping, Split
from nemo_kto.architecture.lora_settings import EMBEDDING, OTHER_NAMES, LoRASettings
from nemo_kto.architecture.segments import split_dimension

LORA_A, LORA_B, LORA_MAGNITUDE = "lora_a", "lora_b", "lora_magnitude"
MAGNITUDE = "lora_magnitude_vector"  # in PEFT's files
EMBEDDING_A, EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"


def adaptable(family: Family) -> list[ParamMapping]:
    """The parameters that can be adapted: matrices of layers, those of experts too, but no router; and the embedding.

    Of experts that transformers has in one parameter under a name of its own, peft adapts none with these names.
    """
    return [
        mapping
        for mapping in family.mappings
        if (".linear_" in mapping.mcore_name and not mapping.joins_experts) or mapping.mcore_name.startswith("embedding.")
    ]


def has_adaptable_experts(family: Family) -> bool:
    """Whether the experts of a mixture can have adapters."""
    return any(mapping.of_expert for mapping in adaptable(family))


def adapted_mappings(architecture: Architecture, settings: LoRASettings) -> list[ParamMapping]:
    """The parameters of the family whose weights are adapted, in whole or in part."""
    return [
        mapping
        for mapping in adaptable(architecture.family)
        if any(hf_module(name) in settings.modules for name in mapping.hf_names)
    ]


def embedding_problem(settings: LoRASettings, *, tied: bool) -> str | None:
    """Why the embedding, which may be ``tied`` to the output layer, cannot be adapted; None where it can, or shall not."""
    if EMBEDDING not in settings.modules:
        return None
    if tied:
        return f"must leave out {EMBEDDING} where it is the output layer too, which peft would not adapt with it"
    if settings.layers is not None:
        return f"must leave out {EMBEDDING} where only some layers are adapted: it lies in none"
    return f"must leave out {EMBEDDING} with DoRA" if settings.dora else None


def adapts_experts(architecture: Architecture, settings: LoRASettings | None) -> bool:
    """Whether an expert has adapters."""
    if settings is None or not any(mapping.of_expert for mapping in adapted_mappings(architecture, settings)):
        return False
    numbers = {number for number, sparse in enumerate(architecture.sparse_layers, start=1) if sparse}
    return bool(numbers if settings.layers is None else numbers.intersection(settings.layers))


def adapter_mappings(mapping: ParamMapping, settings: LoRASettings) -> tuple[ParamMapping, ...]:
    """The mappings of ``lora_a`` and ``lora_b`` of an adapted weight, with DoRA also of its magnitudes, in PEFT's names.

    To PEFT an embedding is W^T, so that its A is our B transposed, and its B our A.
    """
    is_column, rank = split_dimension(mapping) == 0, settings.rank
    inner = "base_model.model.{}.{}"
    prefix = mapping.mcore_name.removesuffix("weight")
    shapes = {name.removesuffix(".weight"): shape for name, shape in mapping.hf_names.items()}
    split_of_rows = mapping.split if is_column else Split.REPLICATED
    of_embedding = mapping.split is Split.VOCABULARY
    name_of_a, name_of_b = (EMBEDDING_B, EMBEDDING_A) if of_embedding else ("lora_A.weight", "lora_B.weight")
    matrices = (
        replace(
            mapping,
            mcore_name=prefix + LORA_A,
            hf_names={inner.format(name, name_of_a): (rank, shape[1]) for name, shape in shapes.items()},
            split=Split.STACKED if is_column else mapping.split,
            transposed=of_embedding,
        ),
        replace(
            mapping,
            mcore_name=prefix + LORA_B,
            hf_names={inner.format(name, name_of_b): (shape[0], rank) for name, shape in shapes.items()},
            split=split_of_rows,
            transposed=of_embedding,
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

    One of :data:`~nemo_kto.architecture.lora_settings.HUGGING_FACE_TARGETS`, whatever the family calls it; or of others, or empty
    where the name is not that of a matrix.
    """
    ends = [f".{end}" for end in (MAGNITUDE, EMBEDDING_A, EMBEDDING_B)]
    if not name.endswith((".weight", *ends)):
        return ""
    for suffix in (".weight", ".lora_A", ".lora_B", *ends):
        name = name.removesuffix(suffix)
    module = name.split(".")[-1]
    return OTHER_NAMES.get(module, module)
