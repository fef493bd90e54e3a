"""Adapters on Transformer Engine's linear layers; for import only where it is installed."""

from __future__ import annotations

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear
from torch import Tensor

from nemo_kto.models.lora.layers import Adapter, Metadata, Offsets, Output


class LoRALayerNormColumnParallelLinear(Adapter, TELayerNormColumnParallelLinear):
    """A frozen column-parallel layer with the norm before it and adapters."""

    is_column = True

    def forward(self, x: Tensor) -> Output:
        """As megatron-core's; ``x`` is [sequence (a part of it if sequence parallel), batch, in], not normed."""
        return self.add_to_normed_columns(super().forward, x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: Metadata | None = None
    ) -> ShardedStateDict:
        """As megatron-core's, with the adapter."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return self.sharded(state, prefix, sharded_offsets, metadata)


class LoRAEngineRowParallelLinear(Adapter, TERowParallelLinear):
    """A frozen row-parallel layer with an adapter."""

    is_column = False

    def forward(self, x: Tensor) -> Output:
        """As megatron-core's; ``x`` is [sequence, batch, in of this rank]."""
        return self.add_to_rows(super().forward(x), x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: Metadata | None = None
    ) -> ShardedStateDict:
        """As megatron-core's, with the adapter."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return self.sharded(state, prefix, sharded_offsets, metadata)


ENGINE_CLASSES: dict[type, type[Adapter]] = {
    TELayerNormColumnParallelLinear: LoRALayerNormColumnParallelLinear,
    TERowParallelLinear: LoRAEngineRowParallelLinear,
}
