"""Sizes and features of a model that its sequence mixers read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from nemo_kto.layers.layer_settings import Rope, Temperature
from nemo_kto.mixers.param_mapping import ParamMapping

Windows = tuple[int | None, ...]


class FamilyTraits(Protocol):
    """Properties of all models of a family."""

    @property
    def mappings(self) -> tuple[ParamMapping, ...]:
        """Mappings of the parameters."""

    @property
    def chunked(self) -> bool:
        """Whether a window does not slide, but is the chunk of the sequence that contains the token."""

    @property
    def interleaved_rotary(self) -> bool:
        """Whether RoPE rotates neighbouring channels of a head together, not channels half a head apart."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes(ABC):
    """The part of an ``Architecture`` that sequence mixers read.

    Heads that tensor parallelism must divide but does not are padded. A padded head has zero weights at its input and its
    output, so it adds zero to the output, receives zero gradients and stays zero.
    """

    family: FamilyTraits
    tensor_parallel: int
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    rope: Rope
    windows: Windows  # number of tokens each layer attends to, including the current one; None for all
    rotates: tuple[bool, ...]  # whether each layer has RoPE
    local_rope: Rope | None = None  # RoPE of the sliding-window layers; None if it is the same as that of the other layers
    rotated_norm: bool = False  # in layers with a rotation, queries and keys are normalised after it, without weights
    temperature: Temperature | None = None  # of attention; None for no scaling
    output_gate: bool = False  # outputs of attention are multiplied by sigmoids of gates, which are projected with queries
    output_bias: bool = False  # bias of the attention's output projection
    mlp_bias: bool = False
    sinks: bool = False  # each head has an additional learned score in its softmax, to which no value belongs
    qk_norm: bool = False  # queries and keys are normalised, each head separately unless ``all_heads_norm`` is set
    all_heads_norm: bool = False  # the norm of ``qk_norm`` is taken over all heads of a token together
    qk_norm_after_rope: bool = False  # the norm of ``qk_norm`` follows the rotation
    zero_centered_norm: bool = False  # norms scale by 1 + weight
    attention_softcap: float | None = None  # scores become c tanh(score / c) with this c; None for no cap

    @property
    @abstractmethod
    def unsupported_by_te(self) -> tuple[str, ...]:
        """Features of the model that Transformer Engine's layers lack; with any of them, the torch layers are used."""

    @property
    def attends_in_blocks(self) -> bool:
        """Whether its attention is that of layers/block_attention.py."""
        return self.attention_softcap is not None or self.sinks

    @property
    def padded_query_groups(self) -> int:
        """Padded number of key-value heads: unchanged if the ranks can share them, else the next multiple of the ranks.

        With fewer key-value heads than ranks, megatron-core lets several ranks share one if each gets whole query heads.
        """
        shared = self.tensor_parallel % self.num_query_groups == 0 and self.num_attention_heads % self.tensor_parallel == 0
        return self.num_query_groups if shared else round_up(self.num_query_groups, self.tensor_parallel)

    @property
    def padded_attention_heads(self) -> int:
        """Padded number of query heads."""
        return self.num_attention_heads // self.num_query_groups * self.padded_query_groups


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is at least ``value``."""
    return -(-value // multiple) * multiple
