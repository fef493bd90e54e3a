"""Mappings of weights that several families share, with the names of Llama's files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from nemo_kto.architecture.families.table import Layers, ParamMapping, Split

Mappings = tuple[ParamMapping, ...]
Shape = tuple[str | int, ...]

MCORE, HF = "decoder.layers.{layer}.", "model.layers.{layer}."  # prefixes of the names in a layer
_ATTENTION, _MLP = HF + "self_attn.", HF + "mlp."
_EXPERT = "mlp.experts.local_experts.{expert}."


def _qkv(kind: str, *sizes: str) -> dict[str, Shape]:
    widths = {"q": "query", "k": "key_value", "v": "key_value"}
    return {f"{_ATTENTION}{part}_proj.{kind}": (width, *sizes) for part, width in widths.items()}


def _gate_and_up(kind: str, *sizes: str) -> dict[str, Shape]:
    return {f"{_MLP}{part}_proj.{kind}": ("ffn", *sizes) for part in ("gate", "up")}


# mcore_name, hf_names, split, required_flag
_DENSE: tuple[tuple[str, dict[str, Shape], Split, str], ...] = (
    ("embedding.word_embeddings.weight", {"model.embed_tokens.weight": ("vocabulary", "hidden")}, Split.VOCABULARY, ""),
    (MCORE + "input_layernorm.weight", {HF + "input_layernorm.weight": ("hidden",)}, Split.REPLICATED, ""),
    (MCORE + "self_attention.linear_qkv.weight", _qkv("weight", "hidden"), Split.QKV, ""),
    (MCORE + "self_attention.linear_qkv.bias", _qkv("bias"), Split.QKV, "qkv_bias"),
    (MCORE + "self_attention.linear_proj.weight", {_ATTENTION + "o_proj.weight": ("hidden", "query")}, Split.HEADS, ""),
    (MCORE + "self_attention.linear_proj.bias", {_ATTENTION + "o_proj.bias": ("hidden",)}, Split.REPLICATED, "output_bias"),
    (MCORE + "pre_mlp_layernorm.weight", {HF + "post_attention_layernorm.weight": ("hidden",)}, Split.REPLICATED, ""),
    (MCORE + "mlp.linear_fc1.weight", _gate_and_up("weight", "hidden"), Split.GATED, ""),
    (MCORE + "mlp.linear_fc1.bias", _gate_and_up("bias"), Split.GATED, "mlp_bias"),
    (MCORE + "mlp.linear_fc2.weight", {_MLP + "down_proj.weight": ("hidden", "ffn")}, Split.ROW_PARALLEL, ""),
    (MCORE + "mlp.linear_fc2.bias", {_MLP + "down_proj.bias": ("hidden",)}, Split.REPLICATED, "mlp_bias"),
    ("decoder.final_layernorm.weight", {"model.norm.weight": ("hidden",)}, Split.REPLICATED, ""),
    ("output_layer.weight", {"lm_head.weight": ("vocabulary", "hidden")}, Split.VOCABULARY, "untied"),
)
DENSE: Mappings = tuple(
    ParamMapping(mcore_name=mcore_name, hf_names=hf_names, split=split, required_flag=flag)
    for mcore_name, hf_names, split, flag in _DENSE
)


def _replicated(mcore_name: str, hf_name: str, *shape: str) -> ParamMapping:
    return ParamMapping(mcore_name=MCORE + mcore_name, hf_names={HF + hf_name: shape}, split=Split.REPLICATED)


def qk_norms(query: str, key: str) -> Mappings:
    """Return the norms of queries and keys with these widths: ``head``, or all heads together."""
    return (
        _replicated("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", query),
        _replicated("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", key),
    )


POST_NORMS: Mappings = (
    _replicated("post_attention_layernorm.weight", "post_attention_layernorm.weight", "hidden"),
    _replicated("post_mlp_layernorm.weight", "post_feedforward_layernorm.weight", "hidden"),
)


def renamed(mappings: Iterable[ParamMapping], hf_names: Mapping[str, Mapping[str, Shape]]) -> Mappings:
    """Return the mappings with other weights of the file for parameters of a layer: name in it -> ``hf_names``."""
    others = {MCORE + name: {HF + theirs: shape for theirs, shape in names.items()} for name, names in hf_names.items()}
    return tuple(replace(each, hf_names=others.get(each.mcore_name, each.hf_names)) for each in mappings)


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


def separate_experts(block: str, *, gate: str, up: str, down: str) -> Mappings:
    """Return the mappings of a router and experts whose matrices are separate tensors of the file.

    ``block`` is the name of the mixture-of-experts block in the file, such as ``mlp``; the others are those of projections.
    """
    expert, wide = block + ".experts.{expert}.", ("expert_ffn", "hidden")
    return (
        sparse("mlp.router.weight", {f"{block}.gate.weight": ("experts", "hidden")}, Split.REPLICATED),
        sparse(_EXPERT + "linear_fc1.weight", {f"{expert}{part}.weight": wide for part in (gate, up)}, Split.GATED),
        sparse(_EXPERT + "linear_fc2.weight", {f"{expert}{down}.weight": ("hidden", "expert_ffn")}, Split.ROW_PARALLEL),
    )


def joined_experts(block: str, split: Split, *, biases: bool = False) -> Mappings:
    """Return the mappings of a router and experts for files that join a layer's experts in one tensor [experts, in, out].

    ``block`` is as for :func:`separate_experts`; ``split`` is the arrangement of gate and up projection in their tensor.
    """
    gate_and_up, down = ("expert_gate_and_up", "hidden"), ("hidden", "expert_ffn")  # of one expert, [out, in]
    experts = block + ".experts."
    weights = (
        sparse("mlp.router.weight", {f"{block}.router.weight": ("experts", "hidden")}, Split.REPLICATED),
        sparse(_EXPERT + "linear_fc1.weight", {experts + "gate_up_proj": gate_and_up}, split, transposed=True),
        sparse(_EXPERT + "linear_fc2.weight", {experts + "down_proj": down}, Split.ROW_PARALLEL, transposed=True),
    )
    if not biases:
        return weights
    return (
        *weights,
        sparse("mlp.router.logit_bias", {f"{block}.router.bias": ("experts",)}, Split.REPLICATED),
        sparse(_EXPERT + "linear_fc1.bias", {experts + "gate_up_proj_bias": gate_and_up[:1]}, split),
        sparse(_EXPERT + "linear_fc2.bias", {experts + "down_proj_bias": down[:1]}, Split.REPLICATED),
    )


def shared_expert(block: str) -> Mappings:
    """Return the mappings of a layer's shared expert."""
    shared, wide = block + ".shared_expert.", ("shared_ffn", "hidden")
    fc1, fc2 = "mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight"
    return (
        sparse(fc1, {f"{shared}{part}_proj.weight": wide for part in ("gate", "up")}, Split.GATED),
        sparse(fc2, {shared + "down_proj.weight": ("hidden", "shared_ffn")}, Split.ROW_PARALLEL),
    )
