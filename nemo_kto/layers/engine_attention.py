"""Core attention of Transformer Engine's layers, with torch's attention for packs whose sequences share prompts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nemo_kto.layers.attention import PackedSequences, TorchAttention


def with_shared_prompts(core_attention: type) -> type:
    """Return a subclass of Transformer Engine's core attention that also computes packs whose sequences share prompts.

    Queries and keys are rotated before, as for ``core_attention``, which computes all other batches unchanged. The subclass
    has the same parameters, so that checkpoints do not depend on it.
    """

    class SharedPromptAttention(core_attention):  # type: ignore[misc, valid-type]
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.with_prompts = TorchAttention(**settings)

        def forward(
            self, *inputs: Tensor | None, packed_seq_params: PackedSequences | None = None, **options: Any
        ) -> Tensor:
            shares = packed_seq_params is not None and packed_seq_params.prompts is not None
            attention = self.with_prompts if shares else super().forward
            context: Tensor = attention(*inputs, packed_seq_params=packed_seq_params, **options)
            return context

    return SharedPromptAttention
