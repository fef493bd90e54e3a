"""Mappings between the parameters of megatron-core's layers and the weights of Hugging Face files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

Shape = tuple[str | int, ...]

MCORE, HF = "decoder.layers.{layer}.", "model.layers.{layer}."  # prefixes of the names in a layer


class Layers(Enum):
    """Which layers have a parameter."""

    ALL = "every layer, or it lies outside of the layers"
    DENSE = "layers with one MLP"
    SPARSE = "layers with experts"
    MIXING = "layers with a sequence mixer"
    FEED_FORWARD = "layers with an MLP or experts"


class Split(Enum):
    """Ways to assemble a parameter from the file's weights and to shard it over tensor-parallel ranks."""

    REPLICATED = "every rank holds all of it"
    VOCABULARY = "rows are tokens; cut by rows, padded with zero rows"
    QKV = "for each key-value head: its query heads, its key, its value; cut by rows, padded with zero heads"
    HEADS = "columns are the query heads, padded with zero heads; cut by columns"
    GROUPS = "for each group of heads: its parts, see ``ParamMapping.parts``; cut by rows, padded with zero groups"
    GROUP_COLUMNS = "the same with columns in the place of rows"
    HEAD_NUMBERS = "a number for each query head, padded with zeros; cut by heads"
    GATED = "on each rank: its rows of the gate, then its rows of the up projection"
    INTERLEAVED = "as gated; in the file each row of the gate stands before the row of the up projection it belongs to"
    COLUMN_PARALLEL = "the weight of a column-parallel layer: cut along its output, by rows"
    ROW_PARALLEL = "the weight of a row-parallel layer: cut along its input, by columns"
    STACKED = "one weight under the other; every rank holds all of it"


@dataclass(frozen=True, kw_only=True)
class ParamMapping:
    """Mapping between a megatron-core parameter and the Hugging Face weights it holds."""

    # Name in megatron-core's local layers, with ``{layer}`` for the number of the layer in the whole model and ``{expert}``
    # for the number of the expert in its layer.
    mcore_name: str
    # Name and shape of each weight in the file; sizes are names from ``Architecture.sizes`` or integers. A single name for a
    # split of several weights means that the file has them concatenated along the rows of one tensor. A name without
    # ``{expert}`` for a weight of an expert means that the file has the weights of all experts in one tensor.
    hf_names: Mapping[str, tuple[str | int, ...]]
    split: Split  # how the parameter is assembled from the weights and sharded
    required_flag: str = ""  # flag of ``Architecture`` without which the parameter does not exist; empty if it always exists
    layers: Layers = Layers.ALL  # layers that have the parameter
    transposed: bool = False  # the file stores the transpose of the weight with this shape
    mixer: str = ""  # one of ``SequenceMixer.kinds`` in the layers that have the parameter; empty: any
    # With groups of heads: the size that is their number; and the parts of a group, each with the number of its weight and
    # the size that is its length. A weight of the file has its first part of all groups, then its second, and so on.
    groups: str = ""
    parts: tuple[tuple[int, str], ...] = ()
    # The parameter is never trained, is always in fp32, and is exported in the dtype of its file.
    frozen: bool = False

    @property
    def of_expert(self) -> bool:
        """Whether this is a parameter of an expert, which is sharded over the expert-tensor-parallel ranks."""
        return "{expert}" in self.mcore_name

    @property
    def joins_experts(self) -> bool:
        """Whether the file has the experts of a layer in one tensor, stacked along its first dimension."""
        return self.of_expert and not any("{expert}" in name for name in self.hf_names)


def replicated(mcore_name: str, hf_name: str, *shape: str | int) -> ParamMapping:
    """Return the mapping of a weight in each layer that every rank holds; the names are those below the layer."""
    return ParamMapping(mcore_name=MCORE + mcore_name, hf_names={HF + hf_name: shape}, split=Split.REPLICATED)
