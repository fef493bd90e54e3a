"""Interface of a sequence mixer, apart from its modules, which need torch and are built in models/mixers/."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    from nemo_kto.architecture.architecture import Architecture
    from nemo_kto.mixers.saving import Saving


class AttentionWindow(NamedTuple):
    """The tokens that a token attends to in a layer: itself and earlier ones."""

    size: int | None  # maximum number of these tokens; None for no limit
    chunked: bool = False  # the window is the chunk of ``size`` tokens that contains the token; if False, it slides

    def pairs(self, length: int) -> int:
        """Return the number of pairs of a token and a token it attends to, in a sequence of ``length`` tokens.

        Examples:
            >>> AttentionWindow(None).pairs(5), AttentionWindow(2).pairs(5), AttentionWindow(2, chunked=True).pairs(5)
            (15, 9, 7)
        """
        if self.size is None:
            return _triangle(length)
        if self.chunked:
            return length // self.size * _triangle(self.size) + _triangle(length % self.size)
        return _triangle(length) - _triangle(max(0, length - self.size))


def _triangle(number: int) -> int:
    return number * (number + 1) // 2


class LinearLayer(NamedTuple):
    """A linear layer on a rank, which can hold several matrices of the file, one under the other."""

    modules: tuple[str, ...]  # names of these matrices in LoRA's settings
    inputs: float  # input values per token that the layer keeps for its backward pass
    rows: float  # rows of its weight
    outputs: float  # output values per token


class SequenceMixer(ABC):
    """The part of a layer in which a token takes in values of earlier tokens.

    An object has the settings of one kind of mixer that the :class:`Architecture` lacks; equal objects compute the same.
    """

    # Matrices that adapters can change, by their names in LoRA's settings: those before the mixing, and after it.
    lora_inputs: ClassVar[tuple[str, ...]]
    lora_outputs: ClassVar[tuple[str, ...]]
    # Names of the layers' parameters that are padded with zero heads.
    padded_with_heads: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def kind(self) -> str:
        """Name, for ``ParamMapping.mixer``."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of its weights that the architecture lacks, by their names in the table."""
        return {}

    @abstractmethod
    def unsupported_by_te(self, architecture: Architecture) -> Mapping[str, bool]:
        """Return features that Transformer Engine's layers lack, with whether the model has them."""

    @abstractmethod
    def products(self, architecture: Architecture) -> tuple[int, int]:
        """Return the number of weights by which a token is multiplied: before the last linear layer, and in it."""

    @abstractmethod
    def pair_flops(self, architecture: Architecture, layer: int) -> tuple[AttentionWindow, int]:
        """Return the forward FLOPs for a pair of a token and a token it attends to, in a layer counted from 0."""

    @abstractmethod
    def context_values(self, architecture: Architecture, ranks: int) -> float:
        """Return the values per token that a rank sends to the others of its context-parallel group in a forward pass."""

    def head_dim_of(self, architecture: Architecture) -> int:
        """Return the size of its heads in softmax attention; 0 without it."""
        return 0

    def divided_heads(self, architecture: Architecture) -> int:
        """Return the heads of a rank that context-parallel ranks divide among them; 0 if they divide tokens only."""
        return 0

    @abstractmethod
    def saved_bytes(self, saving: Saving, *, core: bool) -> float:
        """Return the bytes per token that it saves; without ``core``, except inside the module that may be recomputed."""

    @abstractmethod
    def table_bytes(self, saving: Saving) -> int:
        """Return the bytes per position of tables that all its layers share, such as those of RoPE."""

    @abstractmethod
    def backward_bytes(self, saving: Saving) -> float:
        """Return the bytes per token of temporaries that exist at the same time in its backward pass."""

    @abstractmethod
    def linear_layers(self, saving: Saving) -> tuple[LinearLayer, ...]:
        """Return its linear layers that adapters can change."""


@dataclass(frozen=True, kw_only=True)
class NoMixer(SequenceMixer):
    """Absence of a sequence mixer in a layer that consists of an MLP or experts."""

    kind: ClassVar[str] = "no mixer"
    lora_inputs: ClassVar[tuple[str, ...]] = ()
    lora_outputs: ClassVar[tuple[str, ...]] = ()

    def unsupported_by_te(self, architecture: Architecture) -> Mapping[str, bool]:
        return {}

    def products(self, architecture: Architecture) -> tuple[int, int]:
        return 0, 0

    def pair_flops(self, architecture: Architecture, layer: int) -> tuple[AttentionWindow, int]:
        return AttentionWindow(None), 0

    def context_values(self, architecture: Architecture, ranks: int) -> float:
        return 0

    def saved_bytes(self, saving: Saving, *, core: bool) -> float:
        return 0

    def table_bytes(self, saving: Saving) -> int:
        return 0

    def backward_bytes(self, saving: Saving) -> float:
        return 0

    def linear_layers(self, saving: Saving) -> tuple[LinearLayer, ...]:
        return ()


NO_MIXER = NoMixer()
