"""Adapters on Transformer Engine's linear layers; import only if Transformer Engine is installed."""

from __future__ import annotations

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear
from torch import Tensor

from nemo_kto.models.lora.layers import Adapter, Metadata, Offsets, Output


class LoRALayerNormColumnParallelLinear(Adapter, TELayerNormColumnParallelLinear):
    """Frozen column-parallel layer fused with the norm before it, with adapters."""

    is_column = True

    def forward(self, x: Tensor) -> Output:
        """Apply the layer with its adapter; ``x`` is [sequence (a part if sequence parallel), batch, in], not yet normed."""
        return self.add_to_normed_columns(super().forward, x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: Metadata | None = None
    ) -> ShardedStateDict:
        """Return the sharded state of the layer, including the adapter."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return self.sharded(state, prefix, sharded_offsets, metadata)


class LoRAEngineRowParallelLinear(Adapter, TERowParallelLinear):
    """Frozen row-parallel layer with an adapter."""

    is_column = False

    def forward(self, x: Tensor) -> Output:
        """Apply the layer with its adapter; ``x`` is [sequence, batch, in of this rank]."""
        return self.add_to_rows(super().forward(x), x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: Metadata | None = None
    ) -> ShardedStateDict:
        """Return the sharded state of the layer, including the adapter."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return self.sharded(state, prefix, sharded_offsets, metadata)


ENGINE_CLASSES: dict[type, type[Adapter]] = {
    TELayerNormColumnParallelLinear: LoRALayerNormColumnParallelLinear,
    TERowParallelLinear: LoRAEngineRowParallelLinear,
}
