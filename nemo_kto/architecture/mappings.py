"""Mappings of weights that several families share, with the names of Llama's files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from nemo_kto.mixers.param_mapping import HF, MCORE, Layers, ParamMapping, Shape, Split, replicated
from nemo_kto.mixers.softmax_attention import WEIGHTS

Mappings = tuple[ParamMapping, ...]

_MLP = HF + "mlp."
EXPERT = "mlp.experts.local_experts.{expert}."


def _gate_and_up(kind: str, *sizes: str) -> dict[str, Shape]:
    return {f"{_MLP}{part}_proj.{kind}": ("ffn", *sizes) for part in ("gate", "up")}


def _embedding(mcore_name: str, hf_name: str, flag: str = "") -> ParamMapping:
    shapes: dict[str, Shape] = {hf_name: ("vocabulary", "hidden")}
    return ParamMapping(mcore_name=mcore_name, hf_names=shapes, split=Split.VOCABULARY, required_flag=flag)


def _mlp(name: str, hf_names: dict[str, Shape], split: Split, flag: str = "") -> ParamMapping:
    return ParamMapping(mcore_name=f"{MCORE}mlp.{name}", hf_names=hf_names, split=split, required_flag=flag)


DENSE: Mappings = (
    _embedding("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    replicated("input_layernorm.weight", "input_layernorm.weight", "hidden"),
    *WEIGHTS,
    replicated("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "hidden"),
    _mlp("linear_fc1.weight", _gate_and_up("weight", "hidden"), Split.GATED),
    _mlp("linear_fc1.bias", _gate_and_up("bias"), Split.GATED, "mlp_bias"),
    _mlp("linear_fc2.weight", {_MLP + "down_proj.weight": ("hidden", "ffn")}, Split.ROW_PARALLEL),
    _mlp("linear_fc2.bias", {_MLP + "down_proj.bias": ("hidden",)}, Split.REPLICATED, "mlp_bias"),
    ParamMapping(
        mcore_name="decoder.final_layernorm.weight", hf_names={"model.norm.weight": ("hidden",)}, split=Split.REPLICATED
    ),
    _embedding("output_layer.weight", "lm_head.weight", "untied"),
)
# of ``renamed``: gate and up projection in one tensor
GATE_UP: dict[str, dict[str, Shape]] = {"mlp.linear_fc1.weight": {"mlp.gate_up_proj.weight": ("gate_and_up", "hidden")}}
POST_NORMS: Mappings = (
    replicated("post_attention_layernorm.weight", "post_attention_layernorm.weight", "hidden"),
    replicated("post_mlp_layernorm.weight", "post_feedforward_layernorm.weight", "hidden"),
)
# Fields of ``Family`` for models with image input: where names of their text models begin, and weights to copy.
LLAVA: Mapping[str, Any] = {
    "prefixes": {
        "model.": ("language_model.model.", "model.language_model."),
        "lm_head.": ("language_model.lm_head.", "lm_head."),
    },
    "module_prefix": "model.language_model.",
    "untrained": {"vision tower": r"(model\.)?vision_(tower|model)\.", "projector": r"(model\.)?multi_modal_projector\."},
}
INTERNVL: Mapping[str, Any] = {"name": "internvl", "hf_architecture": "InternVLForConditionalGeneration", **LLAVA}
QWEN_VL: Mapping[str, Any] = {
    "prefixes": {"model.": ("model.language_model.", "model.")},
    "module_prefix": "model.language_model.",
    "untrained": {"vision tower": r"(model\.)?visual\."},
}
# of ``Family.untrained``: layers for the prediction of several tokens, numbered after the others or with names of their own
MTP_LAYERS = {"MTP layers": r"{model}(layers\.{layers}|mtp_\w+)\.|mtp\."}


def renamed(mappings: Iterable[ParamMapping], hf_names: Mapping[str, Mapping[str, Shape]]) -> Mappings:
    """Return the mappings with other weights of the file for parameters of a layer: name in it -> ``hf_names``."""
    others = {MCORE + name: {HF + theirs: shape for theirs, shape in names.items()} for name, names in hf_names.items()}
    return tuple(replace(each, hf_names=others.get(each.mcore_name, each.hf_names)) for each in mappings)


def with_final_norm(mappings: Iterable[ParamMapping], hf_name: str) -> Mappings:
    """Return the mappings with another name of the last norm in the file."""
    last = "decoder.final_layernorm.weight"
    return tuple(replace(each, hf_names={hf_name: ("hidden",)}) if each.mcore_name == last else each for each in mappings)


def without(mappings: Iterable[ParamMapping], *names: str) -> Mappings:
    """Return the mappings except those of parameters whose name in the layer begins with one of ``names``."""
    return tuple(each for each in mappings if not each.mcore_name.removeprefix(MCORE).startswith(names))


def with_experts(family: Mappings, experts: Mappings) -> Mappings:
    """Return the mappings of a dense family, with experts in the sparse layers; the MLP stays in the dense layers."""
    layers = {False: Layers.ALL, True: Layers.DENSE}
    return (*(replace(each, layers=layers[each.mcore_name.startswith(MCORE + "mlp.")]) for each in family), *experts)


def sparse(mcore_name: str, hf_names: dict[str, Shape], split: Split, *, transposed: bool = False) -> ParamMapping:
    """Return the mapping of a parameter of the layers with experts; the names are those below the layer."""
    return ParamMapping(
        mcore_name=MCORE + mcore_name,
        hf_names={HF + name: shape for name, shape in hf_names.items()},
        split=split,
        layers=Layers.SPARSE,
        transposed=transposed,
    )


def correction_bias(name: str, *sizes: str | int) -> ParamMapping:
    """Return the mapping of the correction bias of a router, by its name below the layer."""
    return replace(sparse("mlp.router.correction_bias", {name: sizes}, Split.REPLICATED), frozen=True)


def separate_experts(block: str, *, gate: str, up: str, down: str) -> Mappings:
    """Return the mappings of a router and experts whose matrices are separate tensors of the file.

    ``block`` is the name of the mixture-of-experts block in the file, such as ``mlp``; the others are those of projections.
    """
    expert, wide = block + ".experts.{expert}.", ("expert_ffn", "hidden")
    return (
        sparse("mlp.router.weight", {f"{block}.gate.weight": ("experts", "hidden")}, Split.REPLICATED),
        sparse(EXPERT + "linear_fc1.weight", {f"{expert}{part}.weight": wide for part in (gate, up)}, Split.GATED),
        sparse(EXPERT + "linear_fc2.weight", {f"{expert}{down}.weight": ("hidden", "expert_ffn")}, Split.ROW_PARALLEL),
    )


def joined_experts(block: str, split: Split, *, biases: bool = False) -> Mappings:
    """Return the mappings of a router and experts for files that join a layer's experts in one tensor [experts, in, out].

    ``block`` is as for :func:`separate_experts`; ``split`` is the arrangement of gate and up projection in their tensor.
    """
    gate_and_up, down = ("expert_gate_and_up", "hidden"), ("hidden", "expert_ffn")  # of one expert, [out, in]
    experts = block + ".experts."
    weights = (
        sparse("mlp.router.weight", {f"{block}.router.weight": ("experts", "hidden")}, Split.REPLICATED),
        sparse(EXPERT + "linear_fc1.weight", {experts + "gate_up_proj": gate_and_up}, split, transposed=True),
        sparse(EXPERT + "linear_fc2.weight", {experts + "down_proj": down}, Split.ROW_PARALLEL, transposed=True),
    )
    if not biases:
        return weights
    return (
        *weights,
        sparse("mlp.router.logit_bias", {f"{block}.router.bias": ("experts",)}, Split.REPLICATED),
        sparse(EXPERT + "linear_fc1.bias", {experts + "gate_up_proj_bias": gate_and_up[:1]}, split),
        sparse(EXPERT + "linear_fc2.bias", {experts + "down_proj_bias": down[:1]}, Split.REPLICATED),
    )


# experts that are joined as [experts, out, in], with the router of separate ones
JOINED: Mappings = tuple(replace(each, transposed=False) for each in joined_experts("mlp", Split.GATED)[1:])


def shared_expert(block: str) -> Mappings:
    """Return the mappings of a layer's shared expert, or of several that are stored as one, by its name in the file."""
    shared, wide = f"{block}.", ("shared_ffn", "hidden")
    fc1, fc2 = "mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight"
    return (
        sparse(fc1, {f"{shared}{part}_proj.weight": wide for part in ("gate", "up")}, Split.GATED),
        sparse(fc2, {shared + "down_proj.weight": ("hidden", "shared_ffn")}, Split.ROW_PARALLEL),
    )
