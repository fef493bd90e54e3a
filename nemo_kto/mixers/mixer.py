"""Interface of a sequence mixer: sizes of the model that it reads, FLOPs, saved activations, and its modules in a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from nemo_kto.layers.layer_settings import Rope, Temperature
from nemo_kto.layers.packing import HEAD_MULTIPLE, MAX_HEAD_DIM
from nemo_kto.mixers.param_mapping import ParamMapping

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

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
    value_norm: bool = False  # values are normalised, each head separately and without weights
    qk_norm_after_rope: bool = False  # the norm of ``qk_norm`` follows the rotation
    head_norms: bool = False  # the norm of ``qk_norm`` is a layer norm of each head, with weights of its own
    qkv_limit: float | None = None  # queries, keys and values, after norms, are clamped to at most this; None: not clamped
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


FP32 = 4  # bytes


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


class AdapterSettings(Protocol):
    """The part of ``LoRASettings`` that determines which activations are saved."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Hugging Face names of the adapted modules."""

    @property
    def dropout(self) -> float:
        """Probability with which an input of an adapter is dropped in training."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Settings of a rank that determine which activations are saved; counts per token are for each token of the rank."""

    architecture: ModelSizes  # also determines the tensor-parallel size
    element_bytes: int  # bytes per value of the model: 4 in fp32, 2 in bf16
    sequence_parallel: bool = False  # norms and the operations around them are sharded over the tensor-parallel ranks
    context_parallel: int = 1
    expert_parallel: int = 1
    adapters: AdapterSettings | None = None  # None if all weights are trained
    # On a GPU norms are one kernel, and queries and keys are rotated before the core attention. On the CPU the core
    # attention rotates them, and norms in bf16 are several operations that save their input and their normalised input,
    # both in fp32.
    on_gpu: bool = False
    packed: bool = False  # on the CPU attention processes packed sequences one by one and concatenates the outputs
    repeats_keys: bool = False  # torch's kernel for packed sequences gets keys and values repeated for each query head

    @property
    def hidden(self) -> float:
        """Values per token of the hidden state."""
        return self.architecture.hidden_size / (self.architecture.tensor_parallel if self.sequence_parallel else 1)

    @property
    def norms_in_few_passes(self) -> bool:
        """Whether norms use the CPU function of layers/norm.py."""
        return not self.on_gpu and self.element_bytes == FP32

    def core_head_dim(self, head_dim: int) -> int:
        """Return the size of heads in the core attention, which pads those of packed sequences on GPUs."""
        in_kernel = self.on_gpu and self.packed and self.element_bytes < FP32 and head_dim <= MAX_HEAD_DIM
        return round_up(head_dim, HEAD_MULTIPLE) if in_kernel else head_dim

    def norm(self, width: float, *, trained: bool) -> float:
        """Return the bytes per token that a norm of so many values saves."""
        if self.on_gpu or self.norms_in_few_passes:
            is_widened = self.architecture.zero_centered_norm  # to fp32 before the norm, which saves its input
            return (FP32 if is_widened else self.element_bytes) * width + 4 * width / self.architecture.hidden_size
        return (8 if trained else 4) * width + 4 * width / self.architecture.hidden_size

    def adapts(self, *modules: str) -> bool:
        """Return whether one of these matrices has an adapter."""
        return self.adapters is not None and not set(modules).isdisjoint(self.adapters.modules)

    def keeps_input(self, *modules: str) -> bool:
        """Return whether a layer saves its input for the gradient of its weight or of an adapter without dropout."""
        return self.adapters is None or (self.adapts(*modules) and not self.adapters.dropout)


class SequenceMixer(ABC):
    """The part of a layer in which a token takes in values of earlier tokens.

    Its fields are the settings that :class:`ModelSizes` lacks; equal objects compute the same.
    """

    # Matrices that adapters can change, by their names in LoRA's settings: those before the mixing, and after it.
    lora_inputs: ClassVar[tuple[str, ...]]
    lora_outputs: ClassVar[tuple[str, ...]]
    deterministic: ClassVar[bool] = True  # its results on GPUs can be reproduced bitwise
    # Names of the layers' parameters that are padded with zero heads.
    padded_with_heads: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def kind(self) -> str:
        """Name."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names for ``ParamMapping.mixer``: its layers have the parameters of mappings with one of them."""
        return (self.kind,)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of its weights that the architecture lacks, by their names in the table."""
        return {}

    @abstractmethod
    def specify(self, layer: ModuleSpec, architecture: ModelSizes, *, use_te: bool, share_prompts: bool) -> None:
        """Put its modules into the spec of one of megatron-core's layers; ``use_te``: of Transformer Engine's.

        With ``share_prompts`` they support packed sequences that share prompts, which modules without Transformer Engine
        always do.
        """

    @abstractmethod
    def unsupported_by_te(self, architecture: ModelSizes) -> Mapping[str, bool]:
        """Return features that Transformer Engine's layers lack, with whether the model has them."""

    @abstractmethod
    def products(self, architecture: ModelSizes) -> tuple[int, int]:
        """Return the number of weights by which a token is multiplied: before the last linear layer, and in it."""

    def pair_flops(self, architecture: ModelSizes, layer: int) -> tuple[AttentionWindow, int]:
        """Return the forward FLOPs for a pair of a token and a token it attends to, in a layer counted from 0."""
        return AttentionWindow(None), 0

    @abstractmethod
    def context_values(self, architecture: ModelSizes, ranks: int) -> float:
        """Return the values per token that a rank sends to the others of its context-parallel group in a forward pass."""

    def head_dim_of(self, architecture: ModelSizes) -> int:
        """Return the size of its heads in softmax attention; 0 without it."""
        return 0

    def divided_heads(self, architecture: ModelSizes) -> int:
        """Return the heads of a rank that context-parallel ranks divide among them; 0 if they divide tokens only."""
        return 0

    @abstractmethod
    def saved_bytes(self, saving: Saving, *, core: bool) -> float:
        """Return the bytes per token that it saves; without ``core``, except inside the module that may be recomputed."""

    def table_bytes(self, saving: Saving) -> int:
        """Return the bytes per position of tables that all its layers share, such as those of RoPE."""
        return 0

    @abstractmethod
    def backward_bytes(self, saving: Saving) -> float:
        """Return the bytes per token of temporaries that exist at the same time in its backward pass."""

    @abstractmethod
    def linear_layers(self, saving: Saving) -> tuple[LinearLayer, ...]:
        """Return its linear layers that adapters can change."""

    # Of mixers that keep a state between an input and an output projection:

    def specify_recurrent(self, layer: ModuleSpec) -> None:
        """Put their module into the spec of a layer."""
        from megatron.core.transformer.spec_utils import ModuleSpec

        from nemo_kto.layers.mixer_module import RecurrentModule

        layer.submodules.self_attention = ModuleSpec(module=RecurrentModule, params={"mixer": self})

    def bytes_of_projections(self, saving: Saving) -> float:
        """Return the bytes per token of the first projection, from which all else is recomputed, and of both inputs."""
        inputs, outputs = self.linear_layers(saving)
        saved = saving.hidden * saving.keeps_input(*inputs.modules) + inputs.outputs
        return saving.element_bytes * (saved + outputs.inputs * saving.keeps_input(*outputs.modules))


@dataclass(frozen=True, kw_only=True)
class NoMixer(SequenceMixer):
    """Absence of a sequence mixer in a layer that consists of an MLP or experts."""

    kind: ClassVar[str] = "no mixer"
    lora_inputs: ClassVar[tuple[str, ...]] = ()
    lora_outputs: ClassVar[tuple[str, ...]] = ()

    def specify(self, layer: ModuleSpec, architecture: ModelSizes, *, use_te: bool, share_prompts: bool) -> None:
        """Leave out a layer's attention with its norm and its residual connection."""
        from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

        parts = layer.submodules
        parts.input_layernorm = parts.self_attention = IdentityOp
        parts.self_attn_bda = IdentityFuncOp

    def unsupported_by_te(self, architecture: ModelSizes) -> Mapping[str, bool]:
        return {}

    def products(self, architecture: ModelSizes) -> tuple[int, int]:
        return 0, 0

    def context_values(self, architecture: ModelSizes, ranks: int) -> float:
        return 0

    def saved_bytes(self, saving: Saving, *, core: bool) -> float:
        return 0

    def backward_bytes(self, saving: Saving) -> float:
        return 0

    def linear_layers(self, saving: Saving) -> tuple[LinearLayer, ...]:
        return ()


NO_MIXER = NoMixer()
