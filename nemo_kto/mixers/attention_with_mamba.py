"""Softmax attention beside Mamba-2: both mix the same input, and their scaled outputs are added (arXiv 2507.22448)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nemo_kto.mixers.mamba2 import Mamba2
from nemo_kto.mixers.mixer import AttentionWindow, LinearLayer, ModelSizes, Saving, SequenceMixer
from nemo_kto.mixers.softmax_attention import SOFTMAX_ATTENTION

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

RECURRENCE = "self_attention.recurrence"  # name of the module of Mamba-2 in a layer


@dataclass(frozen=True, kw_only=True)
class AttentionWithMamba(SequenceMixer):
    """a * attention(x) + b * Mamba-2(x)."""

    kind: ClassVar[str] = "attention beside Mamba-2"
    lora_inputs: ClassVar[tuple[str, ...]] = (*SOFTMAX_ATTENTION.lora_inputs, *Mamba2.lora_inputs)
    lora_outputs: ClassVar[tuple[str, ...]] = (*SOFTMAX_ATTENTION.lora_outputs, *Mamba2.lora_outputs)
    deterministic: ClassVar[bool] = Mamba2.deterministic
    padded_with_heads: ClassVar[tuple[str, ...]] = (
        *SOFTMAX_ATTENTION.padded_with_heads,
        *(name.replace("self_attention", RECURRENCE) for name in Mamba2.padded_with_heads),
    )

    mamba: Mamba2
    factors: tuple[float, float]  # a and b

    @property
    def kinds(self) -> tuple[str, ...]:
        return (SOFTMAX_ATTENTION.kind, *self.mamba.kinds)

    @property
    def sizes(self) -> dict[str, int]:
        return self.mamba.sizes

    def specify(self, layer: ModuleSpec, architecture: ModelSizes, *, use_te: bool, share_prompts: bool) -> None:
        from nemo_kto.layers.mixer_module import AttentionBesideRecurrence

        SOFTMAX_ATTENTION.specify(layer, architecture, use_te=use_te, share_prompts=share_prompts)
        attention = layer.submodules.self_attention
        attention.module = AttentionBesideRecurrence
        attention.params = {**attention.params, "mixer": self.mamba, "factors": self.factors}

    def unsupported_by_te(self, architecture: ModelSizes) -> Mapping[str, bool]:
        return self.mamba.unsupported_by_te(architecture)

    def products(self, architecture: ModelSizes) -> tuple[int, int]:
        (first, last), (more, also_last) = (part.products(architecture) for part in self._parts)
        return first + more, last + also_last

    def pair_flops(self, architecture: ModelSizes, layer: int) -> tuple[AttentionWindow, int]:
        return SOFTMAX_ATTENTION.pair_flops(architecture, layer)

    def head_dim_of(self, architecture: ModelSizes) -> int:
        return SOFTMAX_ATTENTION.head_dim_of(architecture)

    def context_values(self, architecture: ModelSizes, ranks: int) -> float:
        return sum(part.context_values(architecture, ranks) for part in self._parts)

    def divided_heads(self, architecture: ModelSizes) -> int:
        return self.mamba.divided_heads(architecture)

    def saved_bytes(self, saving: Saving, *, core: bool) -> float:
        """Return those of both parts, whose input is the same tensor."""
        modules = [part.lora_inputs for part in self._parts]
        shared = saving.element_bytes * saving.hidden * all(saving.keeps_input(*names) for names in modules)
        return sum(part.saved_bytes(saving, core=core) for part in self._parts) - shared

    def table_bytes(self, saving: Saving) -> int:
        return SOFTMAX_ATTENTION.table_bytes(saving)

    def backward_bytes(self, saving: Saving) -> float:
        return max(part.backward_bytes(saving) for part in self._parts)

    def linear_layers(self, saving: Saving) -> tuple[LinearLayer, ...]:
        return tuple(layer for part in self._parts for layer in part.linear_layers(saving))

    @property
    def _parts(self) -> tuple[SequenceMixer, SequenceMixer]:
        return SOFTMAX_ATTENTION, self.mamba
