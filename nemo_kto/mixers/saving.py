"""Settings of a rank that determine which activations its layers save for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_kto.architecture.architecture import Architecture
    from nemo_kto.architecture.lora import LoRASettings

FP32 = 4  # bytes
# Sizes of heads with which torch and Transformer Engine attend to packs in one kernel: multiples of it, and the largest.
HEAD_MULTIPLE, MAX_HEAD_DIM = 8, 256


def padded_head_dim(head_dim: int) -> int:
    """Return the size to which zeros pad the heads of packed sequences for torch's kernel."""
    return -(-head_dim // HEAD_MULTIPLE) * HEAD_MULTIPLE


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Settings of a rank that determine which activations are saved; counts per token are for each token of the rank."""

    architecture: Architecture  # also determines the tensor-parallel size
    element_bytes: int  # bytes per value of the model: 4 in fp32, 2 in bf16
    sequence_parallel: bool = False  # norms and the operations around them are sharded over the tensor-parallel ranks
    context_parallel: int = 1
    expert_parallel: int = 1
    adapters: LoRASettings | None = None  # None if all weights are trained
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
        return padded_head_dim(head_dim) if in_kernel else head_dim

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
