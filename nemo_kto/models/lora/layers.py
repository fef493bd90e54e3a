"""Linear layers of megatron-core with low-rank adapters: what ``models.lora`` builds from.

Of a column-parallel layer every tensor-parallel rank holds all of A and its rows of B, of a row-parallel layer its columns
of A and all of B: only the rank-wide product A x travels between ranks. DoRA's magnitudes lie as the rows of B do. Of a
row-parallel layer they need the squares of each row summed over the ranks, once for all micro-batches of a pass.

The adapters are one mixin for layers of any make: megatron-core's own are here, Transformer Engine's in
``models.lora.te_layers``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
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

from nemo_kto.architecture.lora import LORA_A, LORA_B, LORA_MAGNITUDE
from nemo_kto.device import device
from nemo_kto.models.layers.embedding import RowEmbedding
from nemo_kto.models.lora.dora import Change, RowNorms, row_norms

Metadata = dict[str, torch.distributed.ProcessGroup]  # what megatron-core passes on to every layer
Offsets = tuple[tuple[int, int, int], ...]  # dimension, number and count of the shards that a module is one of
Output = tuple[Tensor, Tensor | None]  # and the bias, where the caller adds it


class Adapter:
    """What all adapted layers share. Their base classes hold the frozen weight."""

    weight: nn.Parameter
    bias: Tensor | None  # Transformer Engine has an empty one for none
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_magnitude: nn.Parameter | None  # of DoRA, less its start ||W||: [out of this rank]
    part_of_row: Tensor  # [out of this rank]
    has_magnitude: Tensor  # with DoRA, of each row: [out of this rank]
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
    adapter_is_constant: bool  # weights stay as they are, so that what follows from them may be kept
    adapter_change: Change | None  # which is this

    def full_b(self) -> Tensor:
        """B against the stacked A: [out of this rank, parts * rank], zero where a row and a part do not belong together."""
        if self.adapter_parts == 1:
            return self.lora_b
        belongs = F.one_hot(self.part_of_row, self.adapter_parts).to(self.lora_b.dtype)
        return (belongs.unsqueeze(2) * self.lora_b.unsqueeze(1)).flatten(1)

    def merge(self) -> None:
        """Make the adapter part of the weight; fp32 arithmetic, rounded once."""
        full_b, lora_a = self.full_b().float(), self.lora_a.float()
        change = self._change()
        merged = self.weight.float().add_(full_b @ lora_a, alpha=self.adapter_scale)
        self.weight.copy_(merged if change is None else merged.addcmul_(merged, change.unsqueeze(1)))
        self.adapter_is_merged = True

    def magnitudes(self) -> Tensor:
        """DoRA's m of each row, zero where it has none: [out of this rank], fp32. Collective over tensor-parallel ranks."""
        assert self.lora_magnitude is not None
        return (self._norms().base + self.lora_magnitude.detach().float()) * self.has_magnitude

    def take_magnitudes(self, values: Tensor) -> None:
        """What :meth:`magnitudes` gives becomes ``values``. Collective over tensor-parallel ranks."""
        assert self.lora_magnitude is not None
        self.lora_magnitude.data.copy_((values - self._norms().base) * self.has_magnitude)

    def _norms(self) -> RowNorms:
        columns_over = None if self.is_column else self.adapter_group
        return row_norms(self.weight, self.full_b(), self.lora_a, self.adapter_scale, columns_over=columns_over)

    def _change(self) -> Tensor | None:
        """m / ||W + s B A|| - 1 of each row, [out of this rank], in fp32; None without magnitudes."""
        if self.lora_magnitude is None:
            return None
        change = self.adapter_change
        if change is None:
            change = Change.of(self._norms(), self.has_magnitude)
        if self.adapter_is_constant:
            self.adapter_change = change
        return change.at(self.lora_magnitude)

    def _adds(self) -> bool:
        return self.adapter_is_on and not self.adapter_is_merged

    def _dropped(self, input_: Tensor, *, is_replicated: bool) -> Tensor:
        """dropout(x) while training, else x."""
        if not (self.adapter_dropout and self.training):
            return input_
        with self._dropout_generator(is_replicated=is_replicated):
            return F.dropout(input_, self.adapter_dropout)

    def _times_a(self, input_: Tensor) -> Tensor:
        """x A^T, scaled: [..., in] -> [..., parts * rank]."""
        return F.linear(input_, self.lora_a) * self.adapter_scale

    def _joined(self, output: Output, added: Tensor, again: Tensor | None) -> Output:
        """The output of the layer with what the adapter adds, and with DoRA what the magnitudes change of the two.

        Args:
            output: W x and the bias, or W x + bias and None.
            added: s B A dropout(x).
            again: W dropout(x), of which the magnitudes change so much, as PEFT has it; None where it is W x.
        """
        product, bias = output
        total, change = product + added, self._change()
        if change is None:
            return total, bias
        changed = total if again is None else again + added
        if again is None and bias is None and self.bias is not None and self.bias.numel():
            changed = total - self.bias
        return torch.addcmul(total, changed, change.to(total.dtype)), bias

    def _dropout_generator(self, *, is_replicated: bool) -> AbstractContextManager[None]:
        """Ranks that hold the same activations must drop the same, ranks that hold parts of them must not.

        With sequence parallelism the transformer block has already switched to the generator that differs.
        """
        if self.adapter_is_expert:
            return get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name())
        if is_replicated or self.sequence_parallel:
            return contextlib.nullcontext()
        return get_cuda_rng_tracker().fork()

    def add_to_columns(self, output: Output, input_: Tensor) -> Output:
        """The output of a column-parallel layer with its adapter.

        ``input_`` is [sequence (a part of it if sequence parallel), batch, in].
        """
        if not self._adds():
            return output
        dropped = self._dropped(input_, is_replicated=True)
        added = F.linear(self._to_columns(self._times_a(dropped)), self.full_b())
        is_again = self.lora_magnitude is not None and dropped is not input_
        return self._joined(output, added, F.linear(self._to_columns(dropped), self.weight) if is_again else None)

    def _to_columns(self, hidden: Tensor) -> Tensor:
        """To the ranks that share out the rows of what it is multiplied with."""
        if self.adapter_is_expert:  # whole experts, whose tokens are already here
            return hidden
        if self.sequence_parallel:
            return cast(Tensor, gather_from_sequence_parallel_region(hidden, group=self.adapter_group))
        # so that the gradient of the product, to which each rank adds what its rows say, is the sum
        return cast(Tensor, copy_to_tensor_model_parallel_region(hidden, group=self.adapter_group))

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
        return self.add_to_columns((output, bias), normed)

    def add_to_rows(self, output: Output, input_: Tensor) -> Output:
        """The output of a row-parallel layer with its adapter; ``input_`` is [sequence, batch, in of the rank]."""
        if not self._adds():
            return output
        dropped = self._dropped(input_, is_replicated=False)
        added = F.linear(self._from_rows(self._times_a(dropped)), self.full_b())
        is_again = self.lora_magnitude is not None and dropped is not input_
        return self._joined(output, added, self._from_rows(F.linear(dropped, self.weight)) if is_again else None)

    def _from_rows(self, product: Tensor) -> Tensor:
        """Summed over the ranks that share out the columns of what was multiplied."""
        if self.adapter_is_expert:
            return product
        if self.sequence_parallel:
            return cast(Tensor, reduce_scatter_to_sequence_parallel_region(product, group=self.adapter_group))
        return cast(Tensor, reduce_from_tensor_model_parallel_region(product, group=self.adapter_group))

    def sharded(self, state: ShardedStateDict, prefix: str, offsets: Offsets, metadata: Metadata | None) -> ShardedStateDict:
        """The sharded state of the layer, with what the ranks share out of the adapter cut as the weight is.

        Of a gated layer, gate and up projection are each by themselves.
        """
        cut = dict.fromkeys((LORA_B, LORA_MAGNITUDE), 0) if self.is_column else {LORA_A: 1}
        forms = make_sharded_tensors_for_checkpoint(
            {name: getattr(self, name) for name in cut if getattr(self, name) is not None},
            prefix,
            cut,
            offsets,
            tp_group=self.adapter_group,
            dp_cp_group=metadata["dp_cp_group"] if metadata else None,
        )
        if self.is_column and self.weight.partition_stride == 2:  # type: ignore[attr-defined]  # the mark of a gated layer
            forms = {name: apply_swiglu_sharded_factory(form, offsets) for name, form in forms.items()}
        return {**state, **forms}


class LoRAColumnParallelLinear(Adapter, ColumnParallelLinear):
    """A frozen column-parallel layer with adapters: A replicated, B cut by rows."""

    is_column = True

    def forward(self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Output:
        """As megatron-core's; ``input_`` is [sequence (a part of it if sequence parallel), batch, in]."""
        return self.add_to_columns(super().forward(input_, weight, runtime_gather_output), input_)

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
        return self.add_to_rows(super().forward(input_), input_)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: Metadata | None = None
    ) -> ShardedStateDict:
        """As megatron-core's, with the adapter."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return self.sharded(state, prefix, sharded_offsets, metadata)


class LoRAEmbedding(Adapter, RowEmbedding):
    """A frozen embedding with an adapter, W + s B A: of B, [vocabulary, rank], each rank has the rows that it has of W."""

    is_column = True

    def forward(self, input_: Tensor) -> Tensor:
        """Tokens [b, s] to [b, s, H], or to this rank's part of [s, b, H] under sequence parallelism."""
        output: Tensor = super().forward(input_)
        if not self._adds():
            return output
        rows_bs, is_here_bs = self.rows_here(input_)
        hidden_bsr = F.embedding(rows_bs, self.lora_b).masked_fill(~is_here_bs.unsqueeze(-1), 0.0)
        return output + self.over_ranks(hidden_bsr) @ self.lora_a * (self.adapter_scale * self.scale)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: Metadata | None = None
    ) -> ShardedStateDict:
        """As megatron-core's, which knows of the weight only, with the adapter."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        whole = make_sharded_tensors_for_checkpoint(
            {LORA_A: self.lora_a},
            prefix,
            {},
            sharded_offsets,
            tp_group=self.adapter_group,
            dp_cp_group=metadata["dp_cp_group"] if metadata else None,
        )
        return self.sharded({**state, **whole}, prefix, sharded_offsets, metadata)


# A class of layers, and that of the same layers with adapters.
ADAPTED_CLASSES: dict[type, type[Adapter]] = {
    ColumnParallelLinear: LoRAColumnParallelLinear,
    RowParallelLinear: LoRARowParallelLinear,
    RowEmbedding: LoRAEmbedding,
}


def adapt_linear(
    linear: Any,
    *,
    rank: int,
    scale: float,
    dropout: float = 0.0,
    parts: int = 1,
    part_of_row: Tensor | None = None,
    magnitudes: Sequence[bool] = (),
) -> None:
    """Turn a linear layer into one with adapters, in place: its class changes, its names stay.

    A and B are zero, and magnitudes where they start; whoever calls this draws A. The other parameters are not frozen here.

    Args:
        linear: of a class in :data:`ADAPTED_CLASSES`; megatron-core's own may be of an expert.
        rank: of the adapter.
        scale: on the adapter's output.
        dropout: probability with which an input of A is dropped in training.
        parts: layers that the weight holds.
        part_of_row: which of them each row of the weight of this rank belongs to, [out of this rank]; None for the first.
        magnitudes: of each part, whether its rows have DoRA's magnitudes.

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
    if isinstance(linear, RowEmbedding):
        linear.sequence_parallel = linear.reduce_scatter_embeddings
    # without values it only carries adapters to the weights of another model
    if linear.adapter_is_expert and linear.adapter_group.size() > 1 and not linear.weight.is_meta:
        raise ValueError(
            f"adapters on experts need expert_tensor_parallel_size 1, got {linear.adapter_group.size()}; share out the "
            "experts, not their matrices"
        )
    linear.__class__ = adapted
    weight = linear.weight
    if part_of_row is None:
        part_of_row = torch.zeros(weight.size(0), dtype=torch.long)
    shapes: dict[str, tuple[int, ...]] = {LORA_A: (parts * rank, weight.size(1)), LORA_B: (weight.size(0), rank)}
    linear.register_parameter(LORA_MAGNITUDE, None)
    if any(magnitudes):
        shapes[LORA_MAGNITUDE] = (weight.size(0),)
        has_magnitude = torch.tensor(magnitudes)[part_of_row]
        linear.register_buffer("has_magnitude", has_magnitude.to(device.current_device()), persistent=False)
    for name, shape in shapes.items():
        _register(linear, name, shape)
    linear.register_buffer("part_of_row", part_of_row.to(device.current_device()), persistent=False)
    linear.adapter_scale, linear.adapter_dropout, linear.adapter_parts = scale, dropout, parts
    linear.adapter_is_on, linear.adapter_is_merged = True, False
    linear.adapter_is_constant, linear.adapter_change = False, None


def _register(linear: Any, name: str, shape: tuple[int, ...]) -> None:
    """Give an adapted layer a parameter of zeros, marked as its gradient is to be treated."""
    weight = linear.weight
    parameter: Any = nn.Parameter(torch.zeros(shape, dtype=weight.dtype, device=device.current_device()))
    parameter.allreduce = getattr(weight, "allreduce", True)  # False: gradients of experts have a group of their own
    if linear.adapter_is_expert or (name != LORA_A) == linear.is_column:
        # Only this rank's: in the norm of the gradient it counts on every rank. What all hold counts on the first.
        parameter.tensor_model_parallel = True
        parameter.partition_dim, parameter.partition_stride = weight.partition_dim, weight.partition_stride
    else:
        parameter.sequence_parallel = linear.sequence_parallel  # its gradient is a sum over parts of the sequence
    linear.register_parameter(name, parameter)
