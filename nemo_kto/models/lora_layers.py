"""Linear layers of megatron-core with low-rank adapters: what ``models.lora`` builds from.

Of a column-parallel layer every tensor-parallel rank holds all of A and its rows of B, of a row-parallel layer its columns
of A and all of B: only the rank-wide product A x travels between ranks.

The adapters are one mixin for layers of any make: megatron-core's own are here, Transformer Engine's in
``models.lora_engine``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from nemo_kto.models.lora_mappings import LORA_A, LORA_B
from nemo_kto.parallel import device

Metadata = dict[str, torch.distributed.ProcessGroup]  # what megatron-core passes on to every layer
Offsets = tuple[tuple[int, int, int], ...]  # dimension, number and count of the shards that a module is one of
Output = tuple[Tensor, Tensor | None]  # and the bias, where the caller adds it


class Adapter:
    """What all adapted layers share. Their base classes hold the frozen weight."""

    weight: nn.Parameter
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    part_of_row: Tensor  # [out of this rank]
    sequence_parallel: bool
    training: bool
    adapter_group: torch.distributed.ProcessGroup  # of the tensor-parallel ranks
    adapter_is_expert: bool
    is_column: bool  # column-parallel, or row-parallel
    return_layernorm_output: bool  # of layers with a norm inside
    adapter_scale: float
    adapter_dropout: float
    adapter_parts: int
    adapter_is_on: bool
    adapter_is_merged: bool

    def full_b(self) -> Tensor:
        """B against the stacked A: [out of this rank, parts * rank], zero where a row and a part do not belong together."""
        if self.adapter_parts == 1:
            return self.lora_b
        belongs = F.one_hot(self.part_of_row, self.adapter_parts).to(self.lora_b.dtype)
        return (belongs.unsqueeze(2) * self.lora_b.unsqueeze(1)).flatten(1)

    def merge(self) -> None:
        """Add the adapter to the weight."""
        self.add_to(self.weight)
        self.adapter_is_merged = True

    def add_to(self, weight: Tensor) -> None:
        """Add what the adapter adds to a weight like this layer's; fp32 arithmetic, rounded once."""
        full_b, lora_a = (factor.to(weight.device, torch.float32) for factor in (self.full_b(), self.lora_a))
        weight.copy_(weight.float().add_(full_b @ lora_a, alpha=self.adapter_scale))

    def _adds(self) -> bool:
        return self.adapter_is_on and not self.adapter_is_merged

    def _times_a(self, input_: Tensor, *, is_replicated: bool) -> Tensor:
        """dropout(x) A^T, scaled: [..., in] -> [..., parts * rank]."""
        if self.adapter_dropout and self.training:
            with self._dropout_generator(is_replicated=is_replicated):
                input_ = F.dropout(input_, self.adapter_dropout)
        return F.linear(input_, self.lora_a) * self.adapter_scale

    def _dropout_generator(self, *, is_replicated: bool) -> AbstractContextManager[None]:
        """Ranks that hold the same activations must drop the same, ranks that hold parts of them must not.

        With sequence parallelism the transformer block has already switched to the generator that differs.
        """
        if self.adapter_is_expert:
            return get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name())
        if is_replicated or self.sequence_parallel:
            return contextlib.nullcontext()
        return get_cuda_rng_tracker().fork()

    def add_to_columns(self, output: Tensor, input_: Tensor) -> Tensor:
        """The output of a column-parallel layer with what the adapter adds to it.

        ``input_`` is [sequence (a part of it if sequence parallel), batch, in].
        """
        if not self._adds():
            return output
        hidden = self._times_a(input_, is_replicated=True)
        if self.adapter_is_expert:  # whole experts, whose tokens are already here
            pass
        elif self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.adapter_group)
        else:  # so that the gradient of the product, to which each rank adds what its rows of B say, is the sum
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.adapter_group)
        return output + F.linear(hidden, self.full_b())

    def add_to_normed_columns(self, forward: Callable[[Tensor], Any], input_: Tensor) -> Output:
        """The same of a layer that normalises its input itself, as Transformer Engine's LayerNormLinear does.

        What is multiplied by A must be normed, and the layer gives it away where ``return_layernorm_output`` is set. Under
        sequence parallelism that is this rank's part, before the layer gathers the parts for its own product: the adapter
        then gathers A x, which is narrower, as it does beside any other layer. The layer adds the gradient of what it has
        given away once its own is complete (summed over the ranks, or scattered to them), so that the adapter's must be
        complete as well: it is, because the gradient of A x is summed before it reaches A.

        Args:
            forward: of the layer without adapters; gives (output, bias, normed), or ((output, normed), None).
            input_: [sequence (a part of it if sequence parallel), batch, in], not normed.
        """
        self.return_layernorm_output = self._adds()
        result = forward(input_)
        if not self._adds():
            return cast(Output, result)
        output, bias, normed = result if len(result) == 3 else (result[0][0], result[1], result[0][1])
        return self.add_to_columns(output, normed), bias

    def add_to_rows(self, output: Tensor, input_: Tensor) -> Tensor:
        """The output of a row-parallel layer with what the adapter adds; ``input_`` is [sequence, batch, in of the rank]."""
        if not self._adds():
            return output
        hidden = self._times_a(input_, is_replicated=False)
        if self.adapter_is_expert:
            pass
        elif self.sequence_parallel:
            hidden = reduce_scatter_to_sequence_parallel_region(hidden, group=self.adapter_group)
        else:
            hidden = reduce_from_tensor_model_parallel_region(hidden, group=self.adapter_group)
        return output + F.linear(hidden, self.full_b())

    def sharded(self, state: ShardedStateDict, prefix: str, offsets: Offsets, metadata: Metadata | None) -> ShardedStateDict:
        """The sharded state of the layer, with what the ranks share out of the adapter cut as the weight is.

        Of a gated layer, gate and up projection are each by themselves.
        """
        name, dimension = (LORA_B, 0) if self.is_column else (LORA_A, 1)
        form = make_sharded_tensors_for_checkpoint(
            {name: getattr(self, name)},
            prefix,
            {name: dimension},
            offsets,
            tp_group=self.adapter_group,
            dp_cp_group=metadata["dp_cp_group"] if metadata else None,
        )[f"{prefix}{name}"]
        if self.is_column and self.weight.partition_stride == 2:  # type: ignore[attr-defined]  # the mark of a gated layer
            form = apply_swiglu_sharded_factory(form, offsets)
        return {**state, f"{prefix}{name}": form}


class LoRAColumnParallelLinear(Adapter, ColumnParallelLinear):
    """A frozen column-parallel layer with adapters: A replicated, B cut by rows."""

    is_column = True

    def forward(self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Output:
        """As megatron-core's; ``input_`` is [sequence (a part of it if sequence parallel), batch, in]."""
        output, bias = super().forward(input_, weight, runtime_gather_output)
        return self.add_to_columns(output, input_), bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: Metadata | None = None
    ) -> ShardedStateDict:
        """As megatron-core's, with the adapter."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return self.sharded(state, prefix, sharded_offsets, metadata)


class LoRARowParallelLinear(Adapter, RowParallelLinear):
    """A frozen row-parallel layer with an adapter: A cut by columns, B replicated."""

    is_column = False

    def forward(self, input_: Tensor) -> Output:
        """As megatron-core's; ``input_`` is [sequence, batch, in of this rank]."""
        output, bias = super().forward(input_)
        return self.add_to_rows(output, input_), bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: Metadata | None = None
    ) -> ShardedStateDict:
        """As megatron-core's, with the adapter."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return self.sharded(state, prefix, sharded_offsets, metadata)


# A class of layers, and that of the same layers with adapters.
ADAPTED_CLASSES: dict[type, type[Adapter]] = {
    ColumnParallelLinear: LoRAColumnParallelLinear,
    RowParallelLinear: LoRARowParallelLinear,
}


def adapt_linear(
    linear: Any, *, rank: int, scale: float, dropout: float = 0.0, parts: int = 1, part_of_row: Tensor | None = None
) -> None:
    """Turn a linear layer into one with adapters, in place: its class changes, its names stay.

    A and B are zero; whoever calls this draws A. The other parameters are not frozen here.

    Args:
        linear: of a class in :data:`ADAPTED_CLASSES`; megatron-core's own may be of an expert.
        rank: of the adapter.
        scale: on the adapter's output.
        dropout: probability with which an input of A is dropped in training.
        parts: layers that the weight holds.
        part_of_row: which of them each row of the weight of this rank belongs to, [out of this rank]; None for the first.

    Raises:
        TypeError: the layer is of another class.
        ValueError: it is an expert whose matrices are shared out over ranks.
    """
    adapted = next((adapted for base, adapted in ADAPTED_CLASSES.items() if isinstance(linear, base)), None)
    if adapted is None or isinstance(linear, Adapter):
        known = ", ".join(base.__name__ for base in ADAPTED_CLASSES)
        raise TypeError(f"a layer to adapt must be one of {known}, and not be adapted yet, got {type(linear).__name__}")
    # Transformer Engine's own attribute may be None
    linear.adapter_group = linear._tp_group if hasattr(linear, "_tp_group") else linear.tp_group
    linear.adapter_is_expert = getattr(linear, "is_expert", False)
    # without values it only carries adapters to the weights of another model
    if linear.adapter_is_expert and linear.adapter_group.size() > 1 and not linear.weight.is_meta:
        raise ValueError(
            f"adapters on experts need expert_tensor_parallel_size 1, got {linear.adapter_group.size()}; share out the "
            "experts, not their matrices"
        )
    linear.__class__ = adapted
    weight, is_column = linear.weight, adapted.is_column
    shapes = {LORA_A: (parts * rank, weight.size(1)), LORA_B: (weight.size(0), rank)}
    for name, shape in shapes.items():
        parameter: Any = nn.Parameter(torch.zeros(shape, dtype=weight.dtype, device=device.current_device()))
        parameter.allreduce = getattr(weight, "allreduce", True)  # False: gradients of experts have a group of their own
        if linear.adapter_is_expert or (name == LORA_B) == is_column:
            # Only this rank's: in the norm of the gradient it counts on every rank. What all hold counts on the first.
            parameter.tensor_model_parallel = True
            parameter.partition_dim, parameter.partition_stride = weight.partition_dim, weight.partition_stride
        else:
            parameter.sequence_parallel = linear.sequence_parallel  # its gradient is a sum over parts of the sequence
        linear.register_parameter(name, parameter)
    if part_of_row is None:
        part_of_row = torch.zeros(weight.size(0), dtype=torch.long)
    linear.register_buffer("part_of_row", part_of_row.to(device.current_device()), persistent=False)
    linear.adapter_scale, linear.adapter_dropout, linear.adapter_parts = scale, dropout, parts
    linear.adapter_is_on, linear.adapter_is_merged = True, False
