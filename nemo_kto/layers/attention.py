"""Core attention on torch's scaled_dot_product_attention, for megatron-core's layers without Transformer Engine.

It applies RoPE to queries and keys itself, so the layers do not need megatron-core's rotary embedding. megatron-core's own
torch attention materialises the scores of all heads, [batch, heads, sequence, sequence]; torch's fused kernels (on GPU and
on CPU) never hold more than one block of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from nemo_kto.device import device
from nemo_kto.device.kernels import agreeing, draw_inputs, varlen_attention
from nemo_kto.distributed.collectives import gather_shares
from nemo_kto.layers.block_attention import block_attention
from nemo_kto.layers.norm import TorchNorm, unit_norm
from nemo_kto.layers.packing import (
    HEAD_MULTIPLE,
    MAX_HEAD_DIM,
    Prompts,
    causal_spans,
    key_indices,
    shared_lengths,
    unshard_tokens,
)
from nemo_kto.layers.rope_tables import RopeTable, TemperatureTable

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """megatron-core's description of packed sequences, with lengths on the host so that no rank waits for the device."""

    lengths: tuple[int, ...]  # number of tokens of each segment, including its padding
    prompts: Prompts = None  # segment that each segment continues; None if no tokens are shared
    key_index_k: Tensor | None = None  # tokens that the segments attend to, if any are shared: ``packing.key_indices``
    masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # those of all layers, see ``_lower_right``
    kept: KeptTokens | None = None  # for a pass over the last tokens of the segments only; None for all their tokens

    @classmethod
    def of(cls, packs: Sequence[tuple[int, ...]], prompts: Sequence[Prompts] | None = None) -> list[PackedSequences]:
        """Build a description for each pack of segments; all device tensors are copied in one transfer per dtype."""
        prompts = [None] * len(packs) if prompts is None else prompts
        before = [shared_lengths(*pack) for pack in zip(packs, prompts, strict=True)]
        keys = [tuple(map(sum, zip(*pack, strict=True))) for pack in zip(packs, before, strict=True)]
        begins = [torch.tensor([0, *accumulate(counts)], dtype=torch.int32) for counts in (*packs, *keys)]
        # megatron-core's RoPE takes a pack with shared prompts for one sequence, see ``HiddenStateGPT._preprocess``
        shared = [None if segments is None else pack for pack, segments in zip(packs, prompts, strict=True)]
        wholes = [None if pack is None else torch.tensor([0, sum(pack)], dtype=torch.int32) for pack in shared]
        indices = [None if pack is None else key_indices(pack, each) for pack, each in zip(shared, prompts, strict=True)]
        uploaded = device.upload([*begins, *indices, *wholes])
        return [
            cls(
                qkv_format="thd",
                cu_seqlens_q=uploaded[number],
                cu_seqlens_kv=uploaded[number + len(packs)],
                cu_seqlens_q_padded=uploaded[number + 3 * len(packs)],
                cu_seqlens_kv_padded=uploaded[number + 3 * len(packs)],
                max_seqlen_q=max(packs[number]),
                max_seqlen_kv=max(keys[number]),
                lengths=packs[number],
                prompts=prompts[number],
                key_index_k=uploaded[number + 2 * len(packs)],
            )
            for number in range(len(packs))
        ]


_no_indices = functools.partial(torch.zeros, 0, dtype=torch.long)


@dataclass(kw_only=True)
class KeptTokens:
    """Queries, keys and values of the last pack in each layer, for a pass over tokens that continue its segments."""

    heads: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)  # id of the layer's attention -> [tokens, ...] each
    # index of each token of the new pack in the last pack followed by the new tokens
    order_t: Tensor = field(default_factory=_no_indices)
    new_n: Tensor = field(default_factory=_no_indices)  # indices of the new tokens in the new pack

    def extend(self, attention: TorchAttention, *new: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of all tokens of the new pack, given those of the new tokens, and keep them."""
        last = self.heads.get(id(attention), tuple(each[:0] for each in new))
        whole = tuple(torch.cat(pair).index_select(0, self.order_t) for pair in zip(last, new, strict=True))
        self.heads[id(attention)] = whole
        return whole


class TorchAttention(MegatronModule):
    """softmax(scale * q k^T) v of each token and earlier ones, with windows, grouped heads, soft caps and sinks.

    The arguments up to ``pg_collection`` are those of megatron-core's core attention; ``config.window_size`` = (number of
    earlier tokens, 0) limits the attention of the layers that ``window_attn_skip_freq`` selects. ``softmax_offset``, the
    parameter of the sinks, is [heads of this rank], as in megatron-core's own attention. Raises ValueError if the
    configuration requests a feature that this attention would silently ignore.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,  # from 1, over all pipeline stages
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,  # None for 1 / sqrt(head size)
        cp_comm_type: str | None = None,  # not used; every context-parallel rank gathers all keys and values
        pg_collection: ProcessGroupCollection | None = None,
        softcap: float | None = None,  # the scores become softcap * tanh(score / softcap)
        sinks: bool = False,  # add to the softmax of each head one learned score without a value
        chunked: bool = False,  # the window of a token is the chunk of its sequence that contains it; False: it slides
        rope: RopeTable | None = None,  # in all layers but those of ``config.no_rope_freq``; None: already rotated
        local_rope: RopeTable | None = None,  # RoPE for layers with a window; None to use ``rope``
        norm_after_rope: bool = False,  # normalise queries and keys after RoPE, each head by its root mean square
        qk_norm_after_rope: bool = False,  # the same with trained weights
        temperature: TemperatureTable | None = None,  # scaling of the queries
        value_norm: bool = False,  # normalise values, each head by its root mean square
        qkv_limit: float | None = None,  # clamp queries, keys and values to [-limit, limit]
    ) -> None:
        super().__init__(config=config)
        required = {"apply_query_key_layer_scaling": False, "attention_dropout": 0.0, "softmax_type": "vanilla"}
        for name, value in required.items():
            if (found := getattr(config, name, value)) != value:
                raise ValueError(f"{name} must be {value!r} without Transformer Engine, got {found!r}")
        self.context = None if config.context_parallel_size == 1 or pg_collection is None else pg_collection.cp
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.softcap, self.in_blocks = softcap, softcap is not None or sinks
        self.softmax_offset: torch.nn.Parameter | None = None
        if sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            zeros = torch.zeros(heads, dtype=config.params_dtype, device=device.current_device())
            self.softmax_offset = torch.nn.Parameter(zeros)
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        self.window: int | None = None
        self.chunk: int | None = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            tokens = config.window_size[0] + 1  # megatron-core does not count the token itself
            self.window, self.chunk = (None, tokens) if chunked else (tokens, None)
            rope = local_rope or rope
        self.rope = None if config.no_rope_freq and config.no_rope_freq[layer_number - 1] else rope
        self.norm_epsilon = config.layernorm_epsilon if norm_after_rope else None
        self.value_norm_epsilon = config.layernorm_epsilon if value_norm else None
        self.q_layernorm: torch.nn.Module | None = None
        self.k_layernorm: torch.nn.Module | None = None
        if qk_norm_after_rope:
            self.q_layernorm, self.k_layernorm = (
                TorchNorm(config, config.kv_channels, eps=config.layernorm_epsilon) for _ in range(2)
            )
        self.qkv_limit = qkv_limit
        self.temperature = temperature
        if temperature is not None and temperature.with_rope != (self.rope is not None):
            self.temperature = None
        in_one_kernel = self.context is None and not self.in_blocks
        self.packed_kernel = packed_attention(config.params_dtype) if in_one_kernel else None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return the sinks, sharded by heads over the tensor-parallel ranks, and norms; empty without both."""
        if self.softmax_offset is None and self.q_layernorm is None:
            return {}
        state: ShardedStateDict = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {} if self.softmax_offset is None else {"softmax_offset": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )
        return state

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """Compute attention: [sequence, batch, heads * head size]; for packed sequences [tokens, heads * head size].

        Args:
            query: [sequence, batch, heads of this rank, head size]; for packed sequences without the batch. Context-parallel
                ranks hold a part of each sequence, as described in ``layers/packing.py``.
            key, value: like ``query``, with the key-value heads of this rank.
            attention_mask: not used; a token attends to itself and earlier ones.
            packed_seq_params: lengths of packed sequences, which do not attend to each other, before context parallelism
                divides them, the prompts that they share, and tokens of an earlier pass, which then precede those of
                ``query``, ``key`` and ``value``; None if each sequence has its own place in the batch.

        Raises:
            ValueError: if there is a bias on the scores, a mask type other than causal, shared prompts together with
                context parallelism, or a length that the context-parallel size cannot divide.
        """
        if attention_bias is not None:
            raise ValueError("attention_bias must be None; torch's attention takes no bias on the scores")
        if attn_mask_type not in (None, AttnMaskType.causal):
            raise ValueError(f"attn_mask_type must be causal, got {attn_mask_type.name}")
        if self.value_norm_epsilon is not None:
            value = unit_norm(value, self.value_norm_epsilon)
        if self.qkv_limit is not None:
            query, key, value = (each.clamp(-self.qkv_limit, self.qkv_limit) for each in (query, key, value))
        if packed_seq_params is None:
            return self._attend(query, key, value, None)
        if packed_seq_params.prompts is not None and self.context is not None:
            raise ValueError("prompts must be None with context parallelism, got packed sequences that share prompts")
        kept = packed_seq_params.kept
        if kept is not None:
            query, key, value = kept.extend(self, query, key, value)
        context = self._attend_to_pack(query, key, value, packed_seq_params)
        return context if kept is None else context.index_select(0, kept.new_n)

    def _attend_to_pack(self, query: Tensor, key: Tensor, value: Tensor, packed_seq_params: PackedSequences) -> Tensor:
        query, key = query.unsqueeze(1), key.unsqueeze(1)
        one_chunk = self.chunk is None or packed_seq_params.max_seqlen_kv <= self.chunk
        if self.packed_kernel is None or not one_chunk or query.size(-1) > MAX_HEAD_DIM:
            return self._attend(query, key, value.unsqueeze(1), packed_seq_params).squeeze(1)
        query, key = self._apply_positions(query, key, packed_seq_params)
        heads = query.squeeze(1), key.squeeze(1), value
        return _attend_pack(self.packed_kernel, *heads, packed_seq_params, scale=self.scale, window=self.window).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences | None) -> Tensor:
        """Attend span by span, [sequence, batch, ...] in and out; ``packed`` is None unless sequences are packed."""
        lengths, prompts = (None, None) if packed is None else (packed.lengths, packed.prompts)
        rank, size = self._context_rank()
        whole = lengths or (query.size(0) * size,)
        query, key = self._apply_positions(query, key, packed)
        key, value = _keys_of_segments(key, value, packed)
        if self.context is not None:
            gathered = gather_shares(torch.cat((key, value), dim=2), group=self.context)
            key, value = unshard_tokens(gathered, whole, size=size).chunk(2, dim=2)
        spans = causal_spans(whole, prompts=prompts, rank=rank, size=size, window=self.chunk)
        queries, keys = ([*slices] for slices in zip(*spans, strict=True))
        parts = zip(_parts(query, queries), _parts(key, keys), _parts(value, keys), strict=True)
        known = {} if packed is None else packed.masks
        contexts = [self._attend_span(*part, known) for part in parts]
        return torch.cat(contexts) if len(contexts) > 1 else contexts[0]

    def rotate(self, rope: RopeTable, heads_sbhd: Tensor, packed: PackedSequences | None) -> Tensor:
        """Rotate queries or keys of this rank, [sequence, batch, heads, head size], by their positions."""
        return rope.rotate(heads_sbhd, **self._positions(heads_sbhd, packed))

    def _context_rank(self) -> tuple[int, int]:
        return (0, 1) if self.context is None else (self.context.rank(), self.context.size())

    def _positions(self, heads_sbhd: Tensor, packed: PackedSequences | None) -> dict[str, Any]:
        """Return the arguments of :meth:`RopeTable.rotate` that determine the positions."""
        (rank, size), prompts = self._context_rank(), None if packed is None else packed.prompts
        lengths = packed.lengths if packed is not None else (len(heads_sbhd) * size,) if size > 1 else None
        return {"lengths": lengths, "prompts": prompts, "rank": rank, "size": size}

    def _apply_positions(self, query: Tensor, key: Tensor, packed: PackedSequences | None) -> tuple[Tensor, Tensor]:
        """Apply RoPE, norms after it and temperature scaling."""
        if self.rope is not None:
            query, key = (self.rotate(self.rope, heads, packed) for heads in (query, key))
            if self.norm_epsilon is not None:
                query, key = (unit_norm(heads, self.norm_epsilon) for heads in (query, key))
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if self.temperature is not None:
            query = self.temperature.scale(query, **self._positions(query, packed))
        return query, key

    def _attend_span(self, query: Tensor, key: Tensor, value: Tensor, known: dict[tuple[int, int], Tensor]) -> Tensor:
        """Attend within one span; a single kernel for spans of different lengths would also compute with padding."""
        if self.window is not None:  # keys before the window of the first query are not needed
            beyond = max(0, key.size(0) - query.size(0) + 1 - self.window)
            key, value = key[beyond:], value[beyond:]
        queries, keys = query.size(0), key.size(0)
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        options: dict[str, Any]
        if self.in_blocks:
            options = {"cap": self.softcap, "sinks_h": self.softmax_offset, "window": self.window}
            context = block_attention(query, key, value, scale=self.scale, **options)
        else:
            mask = None
            if self.window is not None and keys > self.window:
                mask = _window_mask(queries, keys, self.window, query.device)
            elif queries != keys:
                mask = _lower_right(query, keys, known)
            options = {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": query.size(1) != key.size(1)}
            context = F.scaled_dot_product_attention(query, key, value, scale=self.scale, **options)
        return context.permute(2, 0, 1, 3).flatten(2)


@functools.cache
def packed_attention(dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """Return torch's kernel for packed sequences, which takes grouped heads; None if unavailable.

    If the kernel does not compute the same with grouped heads as with keys and values that are repeated for each query head,
    on this device, they are repeated. The host waits for this comparison; layers make it when they are built.
    """
    if (kernel := varlen_attention(dtype)) is None:
        return None

    def attend(
        kernel: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, *, lengths: Sequence[int], prompts: Prompts
    ) -> Tensor:
        packed = PackedSequences.of([tuple(lengths)], [prompts])[0]
        return _attend_pack(kernel, query.flatten(1, 2), key, value, packed, scale=0.125, window=None)

    repeating = RepeatedHeads(kernel)
    grouped, repeated = (functools.partial(attend, form) for form in (kernel, repeating))
    inputs = [each.to(dtype) for each in draw_inputs((2, 64), (64,), (64,))]  # four query heads in two groups
    name, own_name = "torch's attention of packs with grouped heads", "repeated heads"
    chosen = agreeing(grouped, repeated, name=name, own_name=own_name, inputs=inputs)
    return kernel if chosen is grouped else repeating


@dataclass(frozen=True)
class RepeatedHeads:
    """Kernel for packed sequences that gets keys and values repeated for each query head."""

    kernel: Callable[..., Tensor]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *lengths: Any, **options: Any) -> Tensor:
        if (repeats := query.size(1) // key.size(1)) > 1:
            key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
        return self.kernel(query, key, value, *lengths, **options)


def _attend_pack(
    kernel: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedSequences,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """Attend within all sequences of a pack in one kernel, [tokens, heads, size]; zeros pad heads of a size it lacks."""
    size = query.size(-1)
    if (missing := -size % HEAD_MULTIPLE) > 0:
        query, key, value = (F.pad(each, (0, missing)) for each in (query, key, value))
    key, value = _keys_of_segments(key, value, packed)
    mixed = kernel(
        query,
        key,
        value,
        packed.cu_seqlens_q,
        packed.cu_seqlens_kv,
        packed.max_seqlen_q,
        packed.max_seqlen_kv,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
    )
    return mixed[..., :size]


def _parts(values: Tensor, slices: list[slice]) -> Sequence[Tensor]:
    """Return slices of the first dimension; if they partition it, their backward pass is one concatenation."""
    bounds = [0, *(each.stop for each in slices)]
    if [each.start for each in slices] == bounds[:-1] and bounds[-1] == len(values):
        return values.split([each.stop - each.start for each in slices])
    return [values[each] for each in slices]


def _keys_of_segments(key: Tensor, value: Tensor, packed: PackedSequences | None) -> tuple[Tensor, Tensor]:
    """Return keys and values, [tokens, ...], in the order of ``packing.key_indices``: a shared prompt before each answer."""
    if packed is None or packed.key_index_k is None:
        return key, value
    return key.index_select(0, packed.key_index_k), value.index_select(0, packed.key_index_k)


def _lower_right(query_bhsd: Tensor, keys: int, known: dict[tuple[int, int], Tensor]) -> Tensor:
    """Return the bias of causal attention with more keys than queries: [queries, keys], from ``known`` if it is there.

    On the CPU torch would make a tensor of its own bias in every layer, and each layer would save one for its backward pass.
    """
    size = query_bhsd.size(2), keys
    if query_bhsd.is_cuda:
        from torch.nn.attention.bias import causal_lower_right  # loads torch's compiler, which takes a second

        return causal_lower_right(*size)
    if size not in known:
        is_later = torch.ones(size, dtype=torch.bool).triu(keys - size[0] + 1)
        known[size] = torch.zeros(size, dtype=query_bhsd.dtype).masked_fill_(is_later, float("-inf"))
    return known[size]


def _window_mask(queries: int, keys: int, window: int, where: torch.device) -> Tensor:
    """Return the mask of a sliding window, True where a query (row) attends to a key; the last query has the last key."""
    key_index = torch.arange(keys, device=where)
    distance = key_index[keys - queries :, None] - key_index[None, :]
    return (distance >= 0) & (distance < window)


class GatedAttention(SelfAttention):  # type: ignore[misc]
    """megatron-core's attention with gates on its output, also where several ranks share a key-value head."""

    def get_query_key_value_tensors(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return megatron-core's tensors, with the gates of this rank's heads instead of all heads of the group."""
        query, key, value, gate_sbhd = super().get_query_key_value_tensors(*args, **kwargs)
        heads, of_group = query.size(2), gate_sbhd.size(2)
        first = parallel_state.get_tensor_model_parallel_rank() % (of_group // heads) * heads if of_group > heads else 0
        return query, key, value, gate_sbhd[:, :, first : first + heads]


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
