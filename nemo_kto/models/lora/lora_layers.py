"""Linear layers of megatron-core with low-rank adapters.

In a column-parallel layer A is replicated over tensor-parallel ranks and B is sharded by rows; in a row-parallel layer A is
sharded by columns and B is replicated. Only the product A x, whose width is the rank of the adapter, is communicated. DoRA's
magnitudes are sharded like the rows of B. For a row-parallel layer they need the squares of each row summed over the ranks,
once for all micro-batches of a pass.

DoRA (Liu et al. 2024, arXiv 2402.09353) trains magnitudes for the rows of adapted weights. With m the magnitudes, [out],
and ||.|| the norm of each row (equation 5):

    y = m / ||W + s B A|| * (W x + s B A x) + bias

The norm in the denominator is treated as a constant in the backward pass (section 4.3). The trained parameter is
m - ||W||, which starts at zero like B: its gradient is that of m, the initial model equals the base model bit for bit, and
bf16 keeps small updates of m, which it would round away in a sum with ||W||.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
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
from nemo_kto.layers.mixer_module import ReplicatedLinear
from nemo_kto.models.gpt import SparseGradEmbedding

Metadata = dict[str, torch.distributed.ProcessGroup]  # process groups that megatron-core passes to every layer
Offsets = tuple[tuple[int, int, int], ...]  # (dimension, index of the shard, number of shards) of a sharded module
Output = tuple[Tensor, Tensor | None]  # output, and the bias if the caller is to add it
_ROWS = 256  # number of rows of a weight for which W + s B A exists at the same time, in fp32


class RowNorms(NamedTuple):
    """Row norms of a layer, [out of this rank] each, in fp32."""

    base: Tensor  # ||W||
    adapted: Tensor  # ||W + s B A||


@torch.no_grad()
def row_norms(
    weight: Tensor,
    full_b: Tensor,
    lora_a: Tensor,
    scale: float,
    *,
    columns_over: torch.distributed.ProcessGroup | None = None,
) -> RowNorms:
    """Compute the row norms of W [out, in] and of W + scale * B A, with B [out, parts * rank] and A [parts * rank, in].

    The sum itself is formed, for some rows at a time: a norm computed from those of W and of B A would lose precision where
    the two nearly cancel. ``columns_over`` are the ranks over which the columns are sharded; None if they are not.
    """
    lora_a = lora_a.float()
    squares: tuple[list[Tensor], list[Tensor]] = ([], [])
    for weight_rows, b_rows in zip(weight.split(_ROWS), full_b.split(_ROWS), strict=True):
        base = weight_rows.float()
        adapted = torch.addmm(base, b_rows.float(), lora_a, alpha=scale)
        for sums, matrix in zip(squares, (base, adapted), strict=True):
            sums.append(matrix.square().sum(1))
    norms = RowNorms(*map(torch.cat, squares))
    for total in norms if columns_over is not None and columns_over.size() > 1 else ():
        # one tensor per call: the order of summation depends on the position in the buffer, and for B = 0 both sums must
        # be bitwise equal
        torch.distributed.all_reduce(total, group=columns_over)
    return RowNorms(*map(torch.sqrt, norms))


class Change(NamedTuple):
    """Relative change of an output by its magnitude, m / ||W + s B A|| - 1, as a function of m - ||W||: [out], fp32.

    It is zero for rows without a magnitude, and for rows of zeros, which have no direction.
    """

    start: Tensor  # change at m = ||W||
    slope: Tensor  # derivative with respect to m

    @classmethod
    def of(cls, norms: RowNorms, has_magnitude: Tensor) -> Change:
        """Build the function from the row norms; ``has_magnitude`` marks the rows with a magnitude, [out] bool."""
        counts = has_magnitude & (norms.adapted > 0)
        divisor = norms.adapted.masked_fill(~counts, 1.0)
        return cls((norms.base / divisor - 1).masked_fill_(~counts, 0.0), counts / divisor)

    def at(self, moved: Tensor) -> Tensor:
        """Return the change at ``moved`` = m - ||W||, [out]."""
        return self.start + moved.float() * self.slope


class _AddLowRank(torch.autograd.Function):
    """Add B A x in place: (W x, A x, B, B for the stacked A, part of each row) -> W x + B A x; W x is overwritten."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, low_rank: Tensor, lora_b: Tensor, full_b: Tensor, part_of_row: Tensor) -> Tensor:
        ctx.save_for_backward(low_rank, full_b, part_of_row)
        ctx.rank = lora_b.size(1)
        # W x is the result of a function of megatron-core or Transformer Engine, which saves its input but not its result.
        # It may be a view, to which autograd would not let us write. Had anything saved it, the version counter, which the
        # detached tensor shares, would make the backward pass fail.
        total = product.detach()
        total.view(-1, total.size(-1)).addmm_(low_rank.flatten(0, -2), full_b.t())
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        low_rank, full_b, part_of_row = ctx.saved_tensors
        grad_to = grads[0].flatten(0, -2)
        b_grad = grad_to.t() @ low_rank.flatten(0, -2)  # of B for the stacked A, [out, parts * rank]
        if b_grad.size(1) > ctx.rank:
            parts = part_of_row.view(-1, 1, 1).expand(-1, 1, ctx.rank)
            b_grad = b_grad.unflatten(1, (-1, ctx.rank)).gather(1, parts).squeeze(1)
        return grads[0], (grad_to @ full_b).view_as(low_rank), b_grad, None, None


def _adds_in_place(product: Tensor) -> bool:
    """Return whether B A x is added to a product in place; not on the CPU, where it saves no time and rounds differently."""
    return product.is_cuda


class Adapter:
    """Mixin for adapted layers of megatron-core or Transformer Engine; the frozen weight belongs to the other base class."""

    weight: nn.Parameter
    bias: Tensor | None  # an empty tensor if a layer of Transformer Engine has none
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_magnitude: nn.Parameter | None  # of DoRA, minus its initial value ||W||: [out of this rank]
    part_of_row: Tensor  # index of the part that each row belongs to: [out of this rank]
    has_magnitude: Tensor  # with DoRA, True for rows with a magnitude: [out of this rank]
    sequence_parallel: bool
    training: bool
    adapter_group: torch.distributed.ProcessGroup  # tensor-parallel group
    adapter_is_expert: bool
    is_column: bool  # False: row-parallel
    is_replicated = False  # every tensor-parallel rank has the whole layer, with the tokens that it processes
    return_layernorm_output: bool  # only layers fused with a norm have it
    adapter_scale: float
    adapter_dropout: float
    adapter_parts: int
    adapter_is_on: bool
    adapter_is_merged: bool
    adapter_is_constant: bool  # weights do not change, so that these values are computed once
    adapter_change: Change | None
    adapter_full_b: Tensor | None

    def full_b(self) -> Tensor:
        """Return B for the stacked A, [out of this rank, parts * rank]; zero where a row does not belong to a part."""
        if self.adapter_parts == 1:
            return self.lora_b
        belongs = F.one_hot(self.part_of_row, self.adapter_parts).to(self.lora_b.dtype)
        return (belongs.unsqueeze(2) * self.lora_b.unsqueeze(1)).flatten(1)

    @torch.no_grad()
    def _constant_full_b(self) -> Tensor:
        """Return :meth:`full_b`, which is not differentiable."""
        full_b = self.full_b() if self.adapter_full_b is None else self.adapter_full_b
        if self.adapter_is_constant:
            self.adapter_full_b = full_b
        return full_b

    def merge(self) -> None:
        """Merge the adapter into the weight."""
        self.merge_into(self.weight)
        self.adapter_is_merged = True

    @torch.no_grad()
    def merge_into(self, weight: Tensor) -> None:
        """Merge the adapter into ``weight``, in fp32 arithmetic with a single rounding; collective over the group.

        ``weight`` is that of the layer, or the unquantized one, whose rows then get the magnitudes that were trained.
        """
        full_b, lora_a = self.full_b().float(), self.lora_a.float()
        change = None
        if self.lora_magnitude is not None:
            norms = RowNorms(self._norms(self.weight).base, self._norms(weight).adapted)
            change = Change.of(norms, self.has_magnitude).at(self.lora_magnitude)
        merged = weight.float().add_(full_b @ lora_a, alpha=self.adapter_scale)
        weight.copy_(merged if change is None else merged.addcmul_(merged, change.unsqueeze(1)))

    def magnitudes(self) -> Tensor:
        """Return DoRA's m of each row, zero for rows without one: [out of this rank], fp32; collective over the group."""
        assert self.lora_magnitude is not None
        return (self._norms(self.weight).base + self.lora_magnitude.detach().float()) * self.has_magnitude

    def set_magnitudes(self, values: Tensor) -> None:
        """Set the magnitudes to ``values``, a result of :meth:`magnitudes`; collective over the tensor-parallel group."""
        assert self.lora_magnitude is not None
        self.lora_magnitude.data.copy_((values - self._norms(self.weight).base) * self.has_magnitude)

    def _norms(self, weight: Tensor) -> RowNorms:
        columns_over = None if self.is_column else self.adapter_group
        return row_norms(weight, self.full_b(), self.lora_a, self.adapter_scale, columns_over=columns_over)

    def _change(self) -> Tensor | None:
        """Return m / ||W + s B A|| - 1 of each row, [out of this rank], in fp32; None without magnitudes."""
        if self.lora_magnitude is None:
            return None
        change = self.adapter_change
        if change is None:
            change = Change.of(self._norms(self.weight), self.has_magnitude)
        if self.adapter_is_constant:
            self.adapter_change = change
        return change.at(self.lora_magnitude)

    def _is_active(self) -> bool:
        return self.adapter_is_on and not self.adapter_is_merged

    def _dropout(self, input_: Tensor) -> Tensor:
        """Apply dropout in training, with the same mask on all ranks only if their activations are replicated."""
        if not (self.adapter_dropout and self.training):
            return input_
        if self.adapter_is_expert:
            generator = get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name())
        # with sequence parallelism the transformer block has switched to the generator that differs between ranks
        elif self.is_column or self.sequence_parallel:
            generator = contextlib.nullcontext()
        else:
            generator = get_cuda_rng_tracker().fork()
        with generator:
            return F.dropout(input_, self.adapter_dropout)

    def _exchange(self, hidden: Tensor) -> Tensor:
        """Communicate the input of a column-parallel product, or the output of a row-parallel one, over the ranks."""
        # adapted experts are not sharded, and this rank already has their tokens
        if self.adapter_is_expert or self.is_replicated:
            return hidden
        if self.is_column:  # the backward pass sums the gradient over the ranks, each of which has the part from its rows
            exchange = copy_to_tensor_model_parallel_region
            if self.sequence_parallel:
                exchange = gather_from_sequence_parallel_region
        else:
            exchange = reduce_from_tensor_model_parallel_region
            if self.sequence_parallel:
                exchange = reduce_scatter_to_sequence_parallel_region
        return cast(Tensor, exchange(hidden, group=self.adapter_group))

    def add_adapter(self, output: Output, input_: Tensor) -> Output:
        """Add s B A dropout(x) to the layer's output, (W x, bias) or (W x + bias, None); with DoRA, apply the magnitudes.

        ``input_``, x, is [sequence (a part if column- and sequence-parallel), batch, in (of this rank if row-parallel)].
        """
        if not self._is_active():
            return output
        dropped = self._dropout(input_)
        low_rank = F.linear(dropped, self.lora_a)  # [..., parts * rank]
        if self.adapter_scale != 1:
            low_rank = low_rank * self.adapter_scale
        low_rank = self._exchange(low_rank)
        product, bias = output
        if self.lora_magnitude is None and _adds_in_place(product):
            arguments = product, low_rank, self.lora_b, self._constant_full_b(), self.part_of_row
            return _AddLowRank.apply(*arguments), bias  # type: ignore[no-untyped-call]
        adapter_output = F.linear(low_rank, self.full_b())
        dropped_product = None  # W dropout(x), to which DoRA applies the magnitudes, as in PEFT; None if it equals W x
        if self.lora_magnitude is not None and dropped is not input_:
            if self.is_column:
                dropped_product = F.linear(self._exchange(dropped), self.weight)
            else:
                dropped_product = self._exchange(F.linear(dropped, self.weight))
        total, change = product + adapter_output, self._change()
        if change is None:
            return total, bias
        changed = total if dropped_product is None else dropped_product + adapter_output
        if dropped_product is None and bias is None and self.bias is not None and self.bias.numel():
            changed = total - self.bias
        return torch.addcmul(total, changed, change.to(total.dtype)), bias

    def add_to_normed_columns(self, forward: Callable[[Tensor], Any], input_: Tensor) -> Output:
        """Run a column-parallel layer that normalises its own input (Transformer Engine's LayerNormLinear), with adapter.

        A must be applied to the normed input, which the layer returns if ``return_layernorm_output`` is set. With sequence
        parallelism this is the rank's part, before the layer gathers the parts for its own product. The layer adds the
        gradient of the returned tensor after reducing its own gradient over the ranks, so the adapter's gradient must
        already be reduced at that point. It is, because the gradient of A x is summed over the ranks before it reaches A.
        ``forward`` returns (output, bias, normed), or ((output, normed), None).
        """
        self.return_layernorm_output = self._is_active()
        result = forward(input_)
        if not self._is_active():
            return cast(Output, result)
        output, bias, normed = result if len(result) == 3 else (result[0][0], result[1], result[0][1])
        return self.add_adapter((output, bias), normed)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: Metadata | None = None
    ) -> ShardedStateDict:
        """Return the sharded state; the adapter is divided like the weight, in a gated layer gate and up separately."""
        state: ShardedStateDict = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        dimensions = dict.fromkeys((LORA_B, LORA_MAGNITUDE), 0) if self.is_column else {LORA_A: 1}
        if self.is_replicated:
            return state
        sharded = self._sharded_tensors(prefix, dimensions, sharded_offsets, metadata)
        if self.is_column and self.weight.partition_stride == 2:  # type: ignore[attr-defined]  # identifies a gated layer
            sharded = {name: apply_swiglu_sharded_factory(tensor, sharded_offsets) for name, tensor in sharded.items()}
        return {**state, **sharded}

    def _sharded_tensors(
        self, prefix: str, dimensions: dict[str, int], offsets: Offsets, metadata: Metadata | None
    ) -> ShardedStateDict:
        """Return the parameters named in ``dimensions``, each sharded along its dimension; -1 for an unsharded one."""
        sharded: ShardedStateDict = make_sharded_tensors_for_checkpoint(
            {name: getattr(self, name) for name in dimensions if getattr(self, name) is not None},
            prefix,
            {name: dimension for name, dimension in dimensions.items() if dimension >= 0},
            offsets,
            tp_group=self.adapter_group,
            dp_cp_group=metadata["dp_cp_group"] if metadata else None,
        )
        return sharded


class LoRAColumnParallelLinear(Adapter, ColumnParallelLinear):
    """Frozen column-parallel layer with adapters: A replicated, B sharded by rows."""

    is_column = True

    def forward(self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Output:
        return self.add_adapter(super().forward(input_, weight, runtime_gather_output), input_)


class LoRARowParallelLinear(Adapter, RowParallelLinear):
    """Frozen row-parallel layer with an adapter: A sharded by columns, B replicated."""

    is_column = False

    def forward(self, input_: Tensor) -> Output:
        return self.add_adapter(super().forward(input_), input_)


class LoRAReplicatedLinear(Adapter, ReplicatedLinear):
    """Frozen layer that every rank has as a whole, with an adapter of the same kind."""

    is_column = is_replicated = True

    def forward(self, input_: Tensor) -> Output:
        return self.add_adapter(super().forward(input_), input_)


class LoRAEmbedding(Adapter, SparseGradEmbedding):
    """Frozen embedding with an adapter, W + s B A; B, [vocabulary, rank], is sharded by rows like W, A is replicated."""

    is_column = True

    def forward(self, input_: Tensor) -> Tensor:
        """Map tokens [b, s] to [b, s, H], or with sequence parallelism to this rank's part of [s, b, H]."""
        output: Tensor = super().forward(input_)
        if not self._is_active():
            return output
        index_bs, is_local_bs = self.local_indices(input_)
        hidden_bsr = F.embedding(index_bs, self.lora_b).masked_fill(~is_local_bs.unsqueeze(-1), 0.0)
        return output + self.reduce_lookups(hidden_bsr) @ self.lora_a * (self.adapter_scale * self.scale)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: Metadata | None = None
    ) -> ShardedStateDict:
        """Return the sharded state of the embedding; megatron-core's own has only the weight, without A."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return {**state, **self._sharded_tensors(prefix, {LORA_A: -1}, sharded_offsets, metadata)}


# Class of a layer -> class of that layer with adapters.
ADAPTED_CLASSES: dict[type, type[Adapter]] = {
    ColumnParallelLinear: LoRAColumnParallelLinear,
    RowParallelLinear: LoRARowParallelLinear,
    ReplicatedLinear: LoRAReplicatedLinear,
    SparseGradEmbedding: LoRAEmbedding,
}

if HAVE_TE:
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear

    class LoRATELayerNormColumnParallelLinear(Adapter, TELayerNormColumnParallelLinear):
        """Transformer Engine's frozen column-parallel layer fused with the norm before it, with adapters."""

        is_column = True

        def forward(self, x: Tensor) -> Output:
            return self.add_to_normed_columns(super().forward, x)

    class LoRATERowParallelLinear(Adapter, TERowParallelLinear):
        """Transformer Engine's frozen row-parallel layer with an adapter."""

        is_column = False

        def forward(self, x: Tensor) -> Output:
            return self.add_adapter(super().forward(x), x)

    ADAPTED_CLASSES |= {
        TELayerNormColumnParallelLinear: LoRATELayerNormColumnParallelLinear,
        TERowParallelLinear: LoRATERowParallelLinear,
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
    """Add adapters to a linear layer in place; its class changes, its parameter names stay the same.

    A and B are initialised to zero, and magnitudes to their initial values; the caller must draw A, and freeze the other
    parameters. The layer is of a class in :data:`ADAPTED_CLASSES`; megatron-core's own may belong to an expert. Its weight
    fuses ``parts`` layers, ``part_of_row`` is the part that each row belongs to, [out of this rank] (None: the first), and
    ``magnitudes`` whether the rows of each part have DoRA's magnitudes.

    Raises:
        TypeError: if the layer is of another class, or already adapted.
        ValueError: if the layer belongs to an expert whose matrices are sharded over ranks.
    """
    adapted = next((adapted for base, adapted in ADAPTED_CLASSES.items() if isinstance(linear, base)), None)
    if adapted is None or isinstance(linear, Adapter):
        known = ", ".join(base.__name__ for base in ADAPTED_CLASSES)
        raise TypeError(f"a layer to adapt must be one of {known} without an adapter, got {type(linear).__name__}")
    # the attribute tp_group of Transformer Engine's layers may be None
    linear.adapter_group = linear._tp_group if hasattr(linear, "_tp_group") else linear.tp_group
    linear.adapter_is_expert = getattr(linear, "is_expert", False)
    if isinstance(linear, SparseGradEmbedding):
        linear.sequence_parallel = linear.reduce_scatter_embeddings
    # a layer without values (meta device) only transfers adapters to the weights of another model
    if linear.adapter_is_expert and linear.adapter_group.size() > 1 and not linear.weight.is_meta:
        raise ValueError(
            f"expert_tensor_parallel_size must be 1 for adapters on experts, got {linear.adapter_group.size()}; use "
            "expert_model_parallel_size, which shards the experts and not their matrices"
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
        parameter: Any = nn.Parameter(torch.zeros(shape, dtype=weight.dtype, device=device.current_device()))
        parameter.allreduce = getattr(weight, "allreduce", True)  # False: gradients of experts use a separate group
        if linear.adapter_is_expert or ((name != LORA_A) == linear.is_column and not linear.is_replicated):
            # Sharded: counts in the gradient norm on every rank. Replicated parameters count on the first rank only.
            parameter.tensor_model_parallel = True
            parameter.partition_dim, parameter.partition_stride = weight.partition_dim, weight.partition_stride
        else:
            parameter.sequence_parallel = linear.sequence_parallel  # its gradient is a sum over parts of the sequence
        linear.register_parameter(name, parameter)
    linear.register_buffer("part_of_row", part_of_row.to(device.current_device()), persistent=False)
    linear.adapter_scale, linear.adapter_dropout, linear.adapter_parts = scale, dropout, parts
    linear.adapter_is_on, linear.adapter_is_merged = True, False
    linear.adapter_is_constant, linear.adapter_change, linear.adapter_full_b = False, None, None
