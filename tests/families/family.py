"""Settings of the tests of a model family, and the sizes that their tiny models share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from nemo_kto.architecture.families import FAMILIES
from nemo_kto.architecture.lora import LoRASettings, with_other_layers

Fields = Mapping[str, Any]  # of config.json
SIZES: dict[str, Any] = {
    "vocab_size": 259,  # odd, so that it is padded at TP2
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # large, so that every part of the model shows in the logits
}
SEQUENCE = 24  # tokens of the sequences of the parity tests
NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}  # the defaults are past the vocabulary
NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3}
SHORT = {"original_max_position_embeddings": 9}  # shorter than the sequences
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
TINY_ROUTED: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0,
}  # fmt: skip
# of models with image input: two layers of the text model, and a vision tower of one layer
_TEXT: dict[str, Any] = {**SIZES, **NO_TOKENS, "num_hidden_layers": 2, "head_dim": 8}
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
# of Qwen2-VL and models like it
GRID_VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
}  # fmt: skip
INTERNVL_VISION: dict[str, Any] = {
    **VISION, "image_size": [28, 28], "patch_size": [14, 14], "layer_scale_init_value": 0.1,
}  # fmt: skip
TP2: dict[str, Any] = {"tensor": 2, "sequence_parallel": True}
BY_TOKENS = {"prompts": None, "tokens": 90}
PACKED = {**BY_TOKENS, "packed": True}


def rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


def yarn(theta: float, **more: Any) -> dict[str, Any]:
    return rope(theta, rope_type="yarn", factor=4.0, original_max_position_embeddings=32, **more)


def mrope(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": rope(1e5, mrope_section=[*sections]), **more}


def adapters(*modules: str, rank: int = 2, alpha: float = 4, **more: Any) -> LoRASettings:
    """Adapters of these modules; of the default ones if none is named."""
    if modules:
        more["target_modules"] = modules
    return LoRASettings(rank=rank, alpha=alpha, **more)


def adapters_of_all(architecture: str) -> LoRASettings:
    """Adapters of rank 4 of every module of a family, with those of its sequence mixers."""
    return adapters(*with_other_layers(["all"], FAMILIES[architecture]), rank=4)


@dataclass(frozen=True)
class OwnCode:
    """Names of a published model whose class is code in its folder, and is the same function as one of transformers.

    Attributes:
        model_type: transformers' name of the configuration of its class.
        architecture: name of the published class.
        fields: names in config.json of transformers -> published ones.
        weights: parts of names of weights of transformers -> published ones.
        fused: names of weights of transformers in a layer that are one published tensor, and the name of that.
        split: part of a name of transformers' fused or joined weights -> those of the published ones, with {} for an expert.
    """

    model_type: str
    architecture: str
    fields: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)
    fused: tuple[tuple[str, ...], str] = ((), "")
    split: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """A tiny model that is compared with transformers.

    Attributes:
        model_type: transformers' name of the configuration.
        fields: fields of config.json besides ``SIZES``.
        kind: a dense model, a mixture of experts, one whose weights a test quantizes, or one with image input.
        quick: whether the quick matrix has it.
        lora: adapters that are compared with peft's.
        quick_lora: whether the quick matrix has them.
        adapted_experts: number of adapters of single experts.
        mtp_layers: names of weights of layers for further tokens (MTP), which are copied.
        correction_bias_in: module of a layer with the correction bias of its router.
        own_code: names in its files, for a model type that transformers does not have.
    """

    model_type: str
    fields: dict[str, Any]
    kind: Literal["dense", "mixture", "quantized", "images"] = "dense"
    quick: bool = False
    lora: LoRASettings | None = None
    quick_lora: bool = False
    adapted_experts: int = 0
    mtp_layers: tuple[str, ...] = ()
    correction_bias_in: str = ""
    own_code: OwnCode | None = None

    @classmethod
    def wrapped(cls, model_type: str, text: Fields, vision: Fields, **more: Any) -> Self:
        """A model with image input."""
        fields = {"text_config": {**_TEXT, **text}, "vision_config": dict(vision), **more}
        return cls(model_type, fields, kind="images")

    def config(self) -> Any:
        """transformers' configuration."""
        from transformers import AutoConfig

        kind = self.model_type if self.own_code is None else self.own_code.model_type
        return AutoConfig.for_model(kind, **({} if self.kind == "images" else SIZES) | self.fields)


@dataclass(frozen=True)
class KTOStep:
    """A model whose gradients of a KTO step are compared with autograd over transformers.

    Attributes:
        family: name of the tiny model.
        changes: other fields of its config.json.
        quick: layouts of the quick matrix.
        layouts: layouts of the full matrix; all if empty.
    """

    family: str
    changes: Fields = field(default_factory=dict)
    quick: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()


@dataclass(frozen=True)
class SharedPrompts:
    """A comparison of shared prompts with a prompt for each answer.

    Attributes:
        family: name of the tiny model.
        world_size: number of ranks.
        layout: layout of the ranks, recomputation, and whether layers are called as Transformer Engine's.
        answers: answers of an example.
        limits: limits of a micro-batch.
        with_prompts: whether log-probs of the prompts are compared too.
        lora: whether adapters are trained.
        quick: whether the quick matrix has it.
    """

    family: str
    world_size: int = 1
    layout: Fields = field(default_factory=dict)
    answers: int = 1
    limits: Fields = field(default_factory=dict)
    with_prompts: bool = False
    lora: bool = False
    quick: bool = False


@dataclass(frozen=True)
class Activations:
    """A comparison of the formula for activation memory with the tensors that autograd saves.

    Attributes:
        family: name of the tiny model.
        options: tensor and context parallelism, packing and recomputation.
        dtype: type of the parameters.
        lora: adapters that are trained.
        quick: whether the quick matrix has it.
    """

    family: str
    options: Fields = field(default_factory=dict)
    dtype: str = "float32"
    lora: LoRASettings | None = None
    quick: bool = False


@dataclass(frozen=True, kw_only=True)
class FamilyTests:
    """Models and cases of one file of families; names are unique among all files.

    Attributes:
        tiny: ``model_type`` -> fields of the model of tests/helpers/tiny_models.py, which training jobs use.
        models: models of the parity tests.
        gradients: models of tests/distributed/models/test_gradients.py.
        shared_prompts: cases of tests/distributed/models/test_shared_prompts.py.
        wide: changes of a tiny model whose activations are measured.
        activations: cases of tests/distributed/memory/test_plan_activations.py.
        trajectories: changes of a tiny model that is trained in tests/distributed/models/test_families.py.
    """

    tiny: Mapping[str, Fields] = field(default_factory=dict)
    models: Mapping[str, Model] = field(default_factory=dict)
    gradients: Mapping[str, KTOStep] = field(default_factory=dict)
    shared_prompts: Mapping[str, SharedPrompts] = field(default_factory=dict)
    wide: Mapping[str, Fields] = field(default_factory=dict)
    activations: Sequence[Activations] = ()
    trajectories: Mapping[str, Fields] = field(default_factory=dict)
