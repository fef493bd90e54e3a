"""What a table of a model family is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Windows = tuple[int | None, ...]


class Layers(Enum):
    """Which layers have a parameter."""

    ALL = "every layer, or it lies outside of the layers"
    DENSE = "layers with one MLP"
    SPARSE = "layers with experts"


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts: the MLPs among which a router chooses for each token (Shazeer et al. 2017, arXiv 1701.06538).

    Attributes:
        number: experts of a layer.
        per_token: of them, those that see a token.
        ffn_hidden_size: width of an expert's gate and up projection.
        normalized: the weights of a token's experts add up to 1; else they are their shares of all experts.
        layers: whether each layer has experts; the others have one MLP.
        shared_ffn_hidden_size: width of the gate and up projection of a shared expert, which sees every token; 0 for none.
        shared_gate: a gate, the sigmoid of one number of each token, weighs what the shared expert adds.
        weighs_input: a token's weight is the sigmoid of its expert's logit, not a softmax over experts, and multiplies what
            the expert gets, not what it puts out. Of one expert a token only.
    """

    number: int
    per_token: int
    ffn_hidden_size: int
    normalized: bool
    layers: tuple[bool, ...]
    shared_ffn_hidden_size: int = 0
    shared_gate: bool = True
    weighs_input: bool = False


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """Queries of layers without rope grow with the position p, from 0, so that the softmax over many keys stays as sharp
    (Nakanishi 2025, arXiv 2501.19399): they are multiplied by 1 + scale * log(1 + floor((p + 1) / floor)).

    Attributes:
        floor: positions below it, counted from 1, change nothing.
        scale: how fast they grow.
    """

    floor: int
    scale: float


class Split(Enum):
    """How a parameter of ours is put together from the weights of the file and cut over tensor-parallel ranks."""

    REPLICATED = "every rank holds all of it"
    VOCABULARY = "rows are tokens; cut by rows, padded with zero rows"
    QKV = "for each key-value head: its query heads, its key, its value; cut by rows, padded with zero heads"
    HEADS = "columns are the query heads, padded with zero heads; cut by columns"
    HEAD_NUMBERS = "a number for each query head, padded with zeros; cut by heads"
    GATED = "on each rank: its rows of the gate, then its rows of the up projection"
    INTERLEAVED = "as gated; in the file each row of the gate stands before the row of the up projection it belongs to"
    ROW_PARALLEL = "the weight of a row-parallel layer: cut along its input, by columns"
    STACKED = "one weight under the other; every rank holds all of it"


@dataclass(frozen=True, kw_only=True)
class ParamMapping:
    """One parameter of ours and the weights it holds.

    Attributes:
        mcore_name: name in megatron-core's local layers, ``{layer}`` for the number of the layer in the whole model, and
            ``{expert}`` for that of the expert in its layer.
        hf_names: name and shape of each weight in the file; the sizes are names of ``Architecture.sizes``, or numbers.
            One name where the split has several weights: they lie one under the other in one tensor of the file.
            No ``{expert}`` in the name of an expert's weight: it is of this shape in a tensor of all experts.
        split: how the first comes from the second.
        required_flag: a flag of ``Architecture`` without which the parameter does not exist; empty for always.
        layers: which layers have it.
        transposed: the file has the weight the other way round than these shapes say.
    """

    mcore_name: str
    hf_names: Mapping[str, tuple[str | int, ...]]
    split: Split
    required_flag: str = ""
    layers: Layers = Layers.ALL
    transposed: bool = False

    @property
    def of_expert(self) -> bool:
        """True for a parameter of an expert, which is cut over the expert-tensor-parallel ranks."""
        return "{expert}" in self.mcore_name

    @property
    def joins_experts(self) -> bool:
        """True where the file has the experts of a layer in one tensor, one after the other along its first dimension."""
        return self.of_expert and not any("{expert}" in name for name in self.hf_names)


def no_window(config: PretrainedConfig) -> Windows:
    """Every layer sees all tokens before."""
    return (None,) * config.num_hidden_layers


def window_everywhere(config: PretrainedConfig) -> Windows:
    """Every layer sees the last ``sliding_window`` tokens, all if it is null."""
    return (config.sliding_window,) * config.num_hidden_layers


def window_by_layer_type(config: PretrainedConfig) -> Windows:
    """``layer_types`` says which layers see only the last ``sliding_window`` tokens.

    Raises:
        ValueError: a layer type other than full_attention and sliding_attention, or a window of no token.
    """
    known = {"full_attention": None, "sliding_attention": config.sliding_window}
    unknown = sorted(set(config.layer_types) - set(known))
    if unknown:
        raise ValueError(f"layer_types must be of {', '.join(known)}, got {', '.join(unknown)}; choose another model")
    if "sliding_attention" in config.layer_types and config.sliding_window == 0:
        raise ValueError("sliding_window must be at least 1 where layer_types has sliding_attention, got 0; correct one")
    return tuple(known[kind] for kind in config.layer_types)


def chunks_by_layer_type(config: PretrainedConfig) -> Windows:
    """``layer_types`` says in which layers a token sees only its chunk of ``attention_chunk_size`` tokens.

    Raises:
        ValueError: a layer type other than full_attention and chunked_attention, or no size of a chunk.
    """
    known = {"full_attention": None, "chunked_attention": config.attention_chunk_size}
    if unknown := sorted(set(config.layer_types) - set(known)):
        raise ValueError(f"layer_types must be of {', '.join(known)}, got {', '.join(unknown)}; choose another model")
    if "chunked_attention" in config.layer_types and config.attention_chunk_size is None:
        raise ValueError("attention_chunk_size must be given where layer_types has chunked_attention, got null; add it")
    return tuple(known[kind] for kind in config.layer_types)


def every_layer_rotates(config: PretrainedConfig) -> tuple[bool, ...]:
    """Every layer has rotary embeddings."""
    return (True,) * config.num_hidden_layers


def no_rope_layers(config: PretrainedConfig) -> tuple[bool, ...]:
    """``no_rope_layers`` has, in spite of its name, a 1 for each layer that has rotary embeddings."""
    return tuple(bool(entry) for entry in config.no_rope_layers[: config.num_hidden_layers])


def no_temperature(config: PretrainedConfig) -> Temperature | None:
    """Queries stay as they are in every layer."""
    return None


@dataclass(frozen=True, kw_only=True)
class Family:
    """Everything the project knows about a model family.

    Attributes:
        name: what we call it; ``model_type`` in the configuration file too.
        hf_architecture: entry of ``architectures`` in the configuration file.
        mappings: the weights.
        flags: flag of ``Architecture`` (qkv_bias, qk_norm, post_norm, ...) -> the configuration's attribute that decides it,
            or the constant it is.
        numbers: number of ``Architecture`` -> the configuration's attribute that it is.
        defaults: values of those attributes that the configurations of older transformers lack.
        activation: the configuration's attribute that names the MLP's activation, and what it must name.
        windows: tokens each layer sees, itself included; None for all.
        chunked: a window does not slide: it is the chunk of the sequence that a token lies in.
        rotates: whether each layer has rotary embeddings.
        interleaved_rotary: the channels of a head that are rotated together are neighbours, not half a head apart.
        temperature: how queries of layers without rotary embeddings grow; None where they do not.
        partial_rotary: ``partial_rotary_factor`` may rotate only the first channels of each head.
        local_rope: layers with a window have a rope of their own.
        own_head_dim: the size of a head has a default of its own, and is not that of the hidden state over the heads.
        mxfp4: its files may have the matrices of experts in MXFP4, which are dequantized when they are read.
        dense_width: the configuration's attribute that is the width of an MLP, of layers without experts.
        experts: the mixture of experts that a configuration describes; None for a family without.
    """

    name: str
    hf_architecture: str
    mappings: tuple[ParamMapping, ...]
    flags: Mapping[str, str | bool] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, float] = field(default_factory=dict)
    activation: tuple[str, str] = ("hidden_act", "silu")
    windows: Callable[[PretrainedConfig], Windows] = no_window
    chunked: bool = False
    rotates: Callable[[PretrainedConfig], tuple[bool, ...]] = every_layer_rotates
    interleaved_rotary: bool = False
    temperature: Callable[[PretrainedConfig], Temperature | None] = no_temperature
    partial_rotary: bool = False
    local_rope: bool = False
    own_head_dim: bool = False
    mxfp4: bool = False
    dense_width: str = "intermediate_size"
    experts: Callable[[PretrainedConfig], Experts] | None = None
