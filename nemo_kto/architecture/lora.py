"""LoRA settings, and the names of adapted matrices in Hugging Face models and in megatron-core's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.families import FAMILIES, Family
from nemo_kto.architecture.segments import source_shapes, split_dimension
from nemo_kto.mixers import GatedDeltaNet, LatentAttention, Mamba2, ShortConvolution, SoftmaxAttention
from nemo_kto.mixers.param_mapping import MCORE, Layers, ParamMapping, Shape, Split

# Names of linear layers in Hugging Face models, which PEFT uses; NEMO_TARGETS has NeMo's names for groups of them.
_ATTENTION, _MLP = (*SoftmaxAttention.lora_inputs, *SoftmaxAttention.lora_outputs), ("gate_proj", "up_proj", "down_proj")
GATE_UP = "gate_up_proj"  # gate and up projection of families that have both in one layer
# layers of sequence mixers before and after the mixing, except those that have the names of softmax attention
_OTHER_INPUTS, _OTHER_OUTPUTS = (
    tuple(dict.fromkeys(name for name in names if name not in _ATTENTION))
    for names in (
        (*GatedDeltaNet.lora_inputs, *LatentAttention.lora_inputs, *Mamba2.lora_inputs, *ShortConvolution.lora_inputs),
        (*GatedDeltaNet.lora_outputs, *LatentAttention.lora_outputs, *Mamba2.lora_outputs, *ShortConvolution.lora_outputs),
    )
)
OTHER_MIXERS = (*_OTHER_INPUTS, *_OTHER_OUTPUTS)
HUGGING_FACE_TARGETS = (*_ATTENTION, *_MLP, GATE_UP, *OTHER_MIXERS)
EMBEDDING = "embed_tokens"
MAX_ALPHA = 1_000_000  # far above usual values, and far below the fp32 maximum
NEMO_TARGETS: dict[str, tuple[str, ...]] = {
    "attention_qkv": SoftmaxAttention.lora_inputs,
    "attention_dense": SoftmaxAttention.lora_outputs,
    "mlp_fc1": ("gate_proj", "up_proj"),
    "mlp_fc2": ("down_proj",),
    "attention": _ATTENTION,
    "mlp": _MLP,
    "all": (*_ATTENTION, *_MLP),
    "all-linear": (*_ATTENTION, *_MLP),  # PEFT's name
}
ALL_LINEAR = ("all", "all-linear")  # without the layers that a family fuses
TARGET_MODULES = (*NEMO_TARGETS, *HUGGING_FACE_TARGETS, EMBEDDING)


@dataclass(frozen=True, kw_only=True)
class LoRASettings:
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685, section 4.1): y = W x + scale * B A x.

    Raises ValueError if a value is out of range or a name is unknown; the message lists what is allowed.
    """

    rank: int  # rows of A and columns of B
    alpha: float  # the adapter's output is scaled by alpha / rank, or alpha / sqrt(rank) with ``rslora``
    dropout: float = 0.0  # probability with which an input of A is dropped in training
    target_modules: tuple[str, ...] = ("attention_qkv",)  # from :data:`TARGET_MODULES`
    layers: tuple[int, ...] | None = None  # numbers of the adapted layers, counted from 1; None for all
    rslora: bool = False  # rank-stabilised scale (Kalajdzievski 2023, arXiv 2312.03732)
    dora: bool = False  # each row of the sum of weight and adapter has a trained magnitude (``models.lora.lora_layers``)
    experts: bool = True  # the modules of an MLP include those of routed experts

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"the rank of an adapter must be at least 1, got {self.rank}")
        if not 0 < self.alpha <= MAX_ALPHA:
            raise ValueError(f"alpha of an adapter must be above 0 and at most {MAX_ALPHA}, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"the dropout of an adapter must be in [0, 1), got {self.dropout}")
        unknown = [name for name in self.target_modules if name not in TARGET_MODULES]
        if unknown or not self.target_modules:
            known, got = ", ".join(TARGET_MODULES), ", ".join(unknown) or "none"
            raise ValueError(f"target_modules must be one or more of {known}; got {got}")
        if self.layers is not None and (not self.layers or min(self.layers) < 1):
            raise ValueError(f"layers must be one or more numbers from 1, or None for all; got {list(self.layers)}")

    @property
    def scale(self) -> float:
        """Factor on the adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def kind(self) -> str:
        """Name of the method."""
        return "DoRA" if self.dora else "LoRA"

    @property
    def scale_text(self) -> str:
        """Formula of the scale, for messages."""
        return f"alpha {self.alpha:g}" + (" / sqrt(rank)" if self.rslora else "")

    @property
    def modules(self) -> tuple[str, ...]:
        """Hugging Face names of the adapted modules, in the order of :data:`HUGGING_FACE_TARGETS`, the embedding last."""
        wanted = {module for name in self.target_modules for module in NEMO_TARGETS.get(name, (name,))}
        return tuple(module for module in (*HUGGING_FACE_TARGETS, EMBEDDING) if module in wanted)


LORA_A, LORA_B, LORA_MAGNITUDE = "lora_a", "lora_b", "lora_magnitude"
MAGNITUDE = "lora_magnitude_vector"  # name in PEFT's files
EMBEDDING_A, EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"


def adaptable(family: Family) -> list[ParamMapping]:
    """Return the adaptable parameters: the matrices of layers, including experts but not routers, and the embedding.

    Joined experts are excluded: transformers has them in one parameter with its own name, so peft does not adapt them under
    the names used here. So are experts without a gate, for which peft has no such names, and those in ``Family.unadapted``.
    """
    return [
        mapping
        for mapping in family.mappings
        if (
            (".linear_" in mapping.mcore_name and not mapping.joins_experts and (family.gated_mlp or not mapping.of_expert))
            or mapping.mcore_name.startswith("embedding.")
        )
        and not mapping.mcore_name.startswith(tuple(MCORE + start for start in family.unadapted))
    ]


def linear_modules(family: Family, *, has_dense_layers: bool = True) -> tuple[str, ...]:
    """Return the linear layers that a model has as separate modules, by their usual names."""
    mappings = [mapping for mapping in adaptable(family) if has_dense_layers or mapping.layers is not Layers.DENSE]
    separate = {hf_module(name) for mapping in mappings for name in mapping.hf_names}
    return tuple(module for module in HUGGING_FACE_TARGETS if module in separate)


def modules_of(target: str, family: Family) -> set[str]:
    """Return the linear layers that a family must have for a target module; a group of NeMo's spans sequence mixers."""
    if target not in NEMO_TARGETS:
        return {target}
    modules = linear_modules(family)
    absent = {*SoftmaxAttention.lora_inputs} if "kv_b_proj" in modules else set[str]()
    absent |= {"gate_proj"} if not family.gated_mlp else {*NEMO_TARGETS["mlp_fc1"]} if GATE_UP in modules else set()
    return {*NEMO_TARGETS[target]} - absent


def with_other_layers(targets: Sequence[str], family: Family) -> tuple[str, ...]:
    """Return the target modules with the layers of the family that Llama lacks, except those that peft refuses.

    A group of NeMo's that contains the input or output projections of attention also stands for those of other sequence
    mixers, and one that contains the gate projection for a fused gate and up projection.
    """
    modules = {module for target in targets for module in NEMO_TARGETS.get(target, ())}
    others = (*_OTHER_INPUTS * ("q_proj" in modules), *_OTHER_OUTPUTS * ("o_proj" in modules))
    others = (*[GATE_UP] * ("gate_proj" in modules), *others)
    usable = {*linear_modules(family)} - {*family.refused_by_peft}
    return (*targets, *(module for module in others if module in usable and module not in targets))


def names_experts(targets: Sequence[str]) -> bool:
    """Return whether target modules include those of routed experts: if they name the MLP, and not only all linear layers.

    Each expert has adapters of its own, which turn one grouped product of all experts into several small products of each.
    """
    named = {module for target in targets if target not in ALL_LINEAR for module in NEMO_TARGETS.get(target, (target,))}
    return not named.isdisjoint(_MLP)


def without_experts(architecture: Architecture, settings: LoRASettings) -> str:
    """Return an addition to a list of adapted modules that says which experts have no adapters; empty if there are none."""
    if not adapts_experts(architecture, replace(settings, experts=True)) or settings.experts:
        return ""
    return ", not on routed experts (model.peft.lora_tuning.target_modules=[all-linear,mlp] adapts them too)"


def few_adapted(architecture: Architecture, settings: LoRASettings) -> str | None:
    """Return a warning if adapters are on less than a quarter of the linear layers of the selected layers, else None.

    The experts of a layer count as one. Two of the seven linear layers of a Llama are more than a quarter.
    """
    layers = range(architecture.num_layers) if settings.layers is None else [number - 1 for number in settings.layers]
    targets, others = adaptable(architecture.family), set[str]()
    counts, values = {True: 0, False: 0}, {True: 0, False: 0}  # linear layers, and their parameters: with adapters, without
    for mapping in architecture.family.mappings:
        places = [*architecture.instances(mapping, layers)] if ".linear_" in mapping.mcore_name else []
        for name, shape in zip(mapping.hf_names, source_shapes(mapping, architecture), strict=True):
            if not places or len(shape) < 2:
                continue
            module = hf_module(name) if mapping in targets else ""
            is_adapted = module in settings.modules and (settings.experts or not mapping.of_expert)
            counts[is_adapted] += len({place["layer"] for place in places})
            values[is_adapted] += len(places) * math.prod(shape)
            others |= {module} - {"", *settings.modules}
    if not others or 4 * counts[True] >= sum(counts.values()):
        return None
    few = f"{counts[True]:,} of {sum(counts.values()):,} linear layers, with {values[True] / sum(values.values()):.2%}"
    remedy = f"{', '.join(module for module in HUGGING_FACE_TARGETS if module in others)} can be adapted too"
    return f"adapters are on {few} of their parameters; {remedy}: model.peft.lora_tuning.target_modules=[all-linear]"


def refused_by_peft(family: Family, settings: LoRASettings) -> str | None:
    """Return a sentence if peft loads no adapters of some adapted modules, else None; nemo-kto itself loads them."""
    modules = ", ".join(module for module in settings.modules if module in family.refused_by_peft)
    return f"peft refuses adapters on {modules} of {family.name}" if modules else None


def has_adaptable_experts(family: Family) -> bool:
    """Return whether the experts of a mixture-of-experts model can have adapters."""
    return any(mapping.of_expert for mapping in adaptable(family))


def adapted_mappings(architecture: Architecture, settings: LoRASettings) -> list[ParamMapping]:
    """Return the family's parameters whose weights are adapted, in whole or in part."""
    return [
        mapping
        for mapping in adaptable(architecture.family)
        if any(hf_module(name) in settings.modules for name in mapping.hf_names)
        and (settings.experts or not mapping.of_expert)
    ]


def adapted_modules(architecture: Architecture, settings: LoRASettings) -> tuple[str, ...]:
    """Return the modules in the settings that the model has."""
    layers = range(architecture.num_layers)
    found = {
        hf_module(name)
        for mapping in adapted_mappings(architecture, settings)
        for name in mapping.hf_names
        if [*architecture.instances(mapping, layers, experts=1)]
    }
    return tuple(module for module in settings.modules if module in found)


def embedding_problem(settings: LoRASettings, *, tied: bool) -> str | None:
    """Return why the embedding cannot be adapted; None if it can be, or is not in the settings."""
    if EMBEDDING not in settings.modules:
        return None
    if tied:
        return f"must leave out {EMBEDDING} if it is tied to the output layer, which peft would not adapt with it"
    if settings.layers is not None:
        return f"must leave out {EMBEDDING} if only some layers are adapted"
    return f"must leave out {EMBEDDING} with DoRA" if settings.dora else None


def adapts_experts(architecture: Architecture, settings: LoRASettings | None) -> bool:
    """Return whether any expert has adapters."""
    if settings is None or not any(mapping.of_expert for mapping in adapted_mappings(architecture, settings)):
        return False
    numbers = {number for number, sparse in enumerate(architecture.sparse_layers, start=1) if sparse}
    return bool(numbers if settings.layers is None else numbers.intersection(settings.layers))


def adapter_mappings(mapping: ParamMapping, settings: LoRASettings) -> tuple[ParamMapping, ...]:
    """Return the mappings of ``lora_a`` and ``lora_b`` of an adapted weight, and of DoRA's magnitudes, in PEFT's names.

    PEFT treats an embedding as W^T, so that its A is our transposed B, and its B our transposed A.
    """
    is_column, of_embedding = split_dimension(mapping) == 0, mapping.split is Split.VOCABULARY
    split_of_rows = mapping.split if is_column else Split.REPLICATED
    name_of_a, name_of_b = (EMBEDDING_B, EMBEDDING_A) if of_embedding else ("lora_A.weight", "lora_B.weight")

    def part(name: str, hf_name: str, split: Split, shape_of: Callable[[Shape], Shape]) -> ParamMapping:
        modules = {module.removesuffix(".weight"): shape for module, shape in mapping.hf_names.items()}
        return replace(
            mapping,
            mcore_name=mapping.mcore_name.removesuffix("weight") + name,
            hf_names={f"base_model.model.{module}.{hf_name}": shape_of(shape) for module, shape in modules.items()},
            split=split,
            transposed=of_embedding,
        )

    matrices = (
        part(LORA_A, name_of_a, Split.STACKED if is_column else mapping.split, lambda shape: (settings.rank, shape[1])),
        part(LORA_B, name_of_b, split_of_rows, lambda shape: (shape[0], settings.rank)),
    )
    if not settings.dora:
        return matrices
    return (*matrices, part(LORA_MAGNITUDE, MAGNITUDE, split_of_rows, lambda shape: shape[:1]))


_USUAL_NAMES = {own: usual for family in FAMILIES.values() for own, usual in family.module_names.items()}


def hf_module(name: str) -> str:
    """Return the module in a weight's name: ``q_proj`` for ``model.layers.{layer}.self_attn.q_proj.weight``.

    PEFT's names are accepted too. The result is one of :data:`~nemo_kto.architecture.lora.HUGGING_FACE_TARGETS`, also where
    the family has another name for it, or the name of another module; it is empty if the name is not that of a matrix.
    """
    ends = [f".{end}" for end in (MAGNITUDE, EMBEDDING_A, EMBEDDING_B)]
    if not name.endswith((".weight", *ends)):
        return ""
    for suffix in (".weight", ".lora_A", ".lora_B", *ends):
        name = name.removesuffix(suffix)
    module = name.split(".")[-1]
    return _USUAL_NAMES.get(".".join(name.split(".")[-2:]), _USUAL_NAMES.get(module, module))
