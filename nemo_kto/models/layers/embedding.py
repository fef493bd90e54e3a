"""Token embedding whose backward pass writes only the gradient rows of the tokens that occur."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from nemo_kto.distributed.gradients import added_to_main_grad, main_grad_of


class SparseGradEmbedding(VocabParallelEmbedding):
    """megatron-core's embedding, without its dense gradient of the whole table for each micro-batch."""

    scale = 1.0  # factor on the embedding vectors

    def forward(self, input_: Tensor) -> Tensor:
        """Map tokens [b, s] to [b, s, H], or with sequence parallelism to this rank's part of [s, b, H]."""
        hidden_bsh: Tensor = _Lookup.apply(self.weight, *self.local_indices(input_))  # type: ignore[no-untyped-call]
        return self.reduce_lookups(hidden_bsh * self.scale if self.scale != 1.0 else hidden_bsh)

    def local_indices(self, tokens_bs: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's index in this rank's part of the table, [b, s], and whether it is there; 0 if it is not."""
        index_bs = tokens_bs - self.vocab_start_index
        is_local_bs = (index_bs >= 0) & (index_bs < self.num_embeddings_per_partition)
        return torch.where(is_local_bs, index_bs, 0), is_local_bs

    def reduce_lookups(self, hidden_bsh: Tensor) -> Tensor:
        """Sum lookups over the ranks, [b, s, h] with zeros for tokens of other ranks, into the layout of :meth:`forward`."""
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(hidden_bsh.transpose(0, 1).contiguous(), group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(hidden_bsh, group=self.tp_group)


def scale_of(hidden_size: int, dtype: torch.dtype) -> float:
    """Return sqrt(hidden size), rounded to ``dtype`` as in transformers: sqrt(3072) = 55.4256 becomes 55.5 in bf16."""
    return float(torch.tensor(hidden_size**0.5, dtype=torch.float32, device="cpu").to(dtype))


class _Lookup(torch.autograd.Function):
    """Look up a table, with zeros for tokens of other ranks; selecting the local tokens would wait for the device."""

    @staticmethod
    def forward(ctx: Any, weight_VH: Tensor, index_bs: Tensor, is_local_bs: Tensor) -> Tensor:
        ctx.save_for_backward(weight_VH, index_bs, is_local_bs)
        ctx.main_grad_VH = main_grad_of(weight_VH)
        return weight_VH[index_bs].masked_fill_(~is_local_bs.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        weight_VH, index_bs, is_local_bs = ctx.saved_tensors
        index_T, grad_TH = index_bs.flatten(), grads[0].masked_fill(~is_local_bs.unsqueeze(-1), 0.0).flatten(0, 1)
        if ctx.main_grad_VH is not None:
            ctx.main_grad_VH.index_add_(0, index_T, grad_TH.to(ctx.main_grad_VH.dtype))
            return added_to_main_grad(weight_VH), None, None
        return torch.zeros_like(weight_VH).index_add_(0, index_T, grad_TH), None, None
