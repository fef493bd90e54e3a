"""Core attention on torch's scaled_dot_product_attention, for megatron-core's layers without Transformer Engine.

It applies RoPE to queries and keys itself, so the layers do not need megatron-core's rotary embedding.

megatron-core's own torch attention materialises the scores of all heads, [batch, heads, sequence, sequence]; torch's fused
kernels (on GPU and on CPU) never hold more than one block of them.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import get_cuda_rng_tracker, set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from nemo_kto.device import device
from nemo_kto.device.kernels import varlen_attention
from nemo_kto.distributed.collectives import gather_shares
from nemo_kto.models.layers.block_attention import block_attention
from nemo_kto.models.layers.norm import unit_norm
from nemo_kto.models.layers.packed_sequences import PackedSequences
from nemo_kto.models.layers.rotary import RotaryTable, TemperatureTable
from nemo_kto.models.layers.spans import causal_spans, in_row_order

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


class TorchAttention(MegatronModule):
    """softmax(scale * q k^T) v with a causal, sliding-window or arbitrary mask, grouped heads, soft caps and sinks.

    The arguments up to ``pg_collection`` are those of megatron-core's core attention.

    Args:
        config: the transformer's configuration; ``window_size`` = (number of earlier tokens, 0) limits the attention of the
            layers that ``window_attn_skip_freq`` selects.
        layer_number: from 1, over all pipeline stages.
        attn_mask_type: causal or arbitrary.
        attention_type: self attention, the only type in this project.
        attention_dropout: dropout probability; None for ``config.attention_dropout``.
        softmax_scale: factor on the scores; None for 1 / sqrt(head size).
        cp_comm_type: context-parallel communication of Transformer Engine; not used: every rank gathers all keys and values.
        pg_collection: process groups; the context-parallel one is used if the context-parallel size is above 1.
        softcap: the scores become softcap * tanh(score / softcap); None for no soft cap.
        sinks: add to the softmax of each head one learned score without a value, the parameter ``softmax_offset``, as in
            megatron-core's own attention, [heads of this rank].
        chunked: the window of a token is the chunk of its sequence that contains it, instead of a sliding window.
        rotary: RoPE for queries and keys, in all layers but those that ``config.no_rope_freq`` marks; None if they are
            already rotated.
        local_rotary: RoPE for layers with a window; None to use ``rotary``.
        rotated_norm: normalise queries and keys after RoPE, each head by its root mean square.
        temperature: attention temperature scaling of the queries in layers without RoPE; None to leave them unscaled.

    Raises:
        ValueError: if the configuration requests a feature that this attention would silently ignore.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        chunked: bool = False,
        rotary: RotaryTable | None = None,
        local_rotary: RotaryTable | None = None,
        rotated_norm: bool = False,
        temperature: TemperatureTable | None = None,
    ) -> None:
        super().__init__(config=config)
        if config.apply_query_key_layer_scaling:
            raise ValueError(
                "apply_query_key_layer_scaling must be False; torch's attention keeps its sums in fp32 and needs none"
            )
        if getattr(config, "softmax_type", "vanilla") != "vanilla":
            raise ValueError(f"softmax_type must be 'vanilla' without Transformer Engine, got {config.softmax_type!r}")
        self.attn_mask_type = attn_mask_type
        self.context = None if config.context_parallel_size == 1 or pg_collection is None else pg_collection.cp
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.softcap, self.in_blocks = softcap, softcap is not None or sinks
        self.softmax_offset = _sinks(config) if sinks else None
        self.window: int | None = None
        self.chunk: int | None = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            tokens = config.window_size[0] + 1  # megatron-core does not count the token itself
            self.window, self.chunk = (None, tokens) if chunked else (tokens, None)
            rotary = local_rotary or rotary
        self.rotary = None if config.no_rope_freq and config.no_rope_freq[layer_number - 1] else rotary
        self.norm_epsilon = config.layernorm_epsilon if rotated_norm else None
        self.temperature = temperature

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return the sinks, sharded by heads over the tensor-parallel ranks; empty without sinks."""
        if self.softmax_offset is None:
            return {}
        state: ShardedStateDict = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
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
        """Compute attention.

        Args:
            query: [sequence, batch, heads of this rank, head size]; for packed sequences [tokens, heads of this rank, head
                size]. Context-parallel ranks hold a part of each sequence, as described in ``models/layers/spans.py``.
            key: [sequence, batch, key-value heads of this rank, head size]; for packed sequences without the batch.
            value: same shape as ``key``.
            attention_mask: [batch or 1, 1, sequence, sequence], True where attention is forbidden; used only if the mask
                type is arbitrary, and then it replaces the causal mask. Every query must be able to attend to some key.
            attn_mask_type: overrides the type given at construction.
            attention_bias: must be None.
            packed_seq_params: lengths of packed sequences, which do not attend to each other (``PackedSequences``), before
                context parallelism divides them; None if each sequence has its own place in the batch.

        Returns:
            [sequence, batch, heads * head size]; for packed sequences [tokens, heads * head size].

        Raises:
            ValueError: if there is a bias on the scores, a mask type other than causal and arbitrary, a mask together with
                packed sequences or context parallelism, or a length that the context-parallel size cannot divide.
        """
        if attention_bias is not None:
            raise ValueError("attention_bias must be None: torch's attention takes a mask, not a bias on the scores")
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        if kind not in (AttnMaskType.causal, AttnMaskType.arbitrary):
            raise ValueError(f"attn_mask_type must be causal or arbitrary, got {kind.name}")
        masked = attention_mask if kind == AttnMaskType.arbitrary else None
        if packed_seq_params is None:
            return self._attend(query, key, value, None, masked)
        if kind == AttnMaskType.arbitrary:
            raise ValueError("attn_mask_type must be causal for a row of sequences, got arbitrary")
        in_one = self.context is None and not self.dropout and not self.in_blocks
        in_one &= self.chunk is None or max(packed_seq_params.lengths) <= self.chunk
        if in_one and (kernel := varlen_attention(query.dtype)) is not None:
            return self._attend_row(kernel, query, key, value, packed_seq_params)
        heads = (query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1))
        return self._attend(*heads, packed_seq_params.lengths, None).squeeze(1)

    def _attend_row(
        self, kernel: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, row: PackedSequences
    ) -> Tensor:
        """Attend within packed sequences in one kernel: [tokens, heads, head size] to [tokens, heads * head size]."""
        query, key = (each.squeeze(1) for each in self._placed(query.unsqueeze(1), key.unsqueeze(1), row.lengths))
        context: Tensor = kernel(
            query,
            key,
            value,
            row.cu_seqlens_q,
            row.cu_seqlens_kv,
            row.max_seqlen_q,
            row.max_seqlen_kv,
            scale=self.scale,
            window_size=(-1 if self.window is None else self.window - 1, 0),
            enable_gqa=query.size(1) != key.size(1),
        )
        return context.flatten(1)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...] | None, masked: Tensor | None
    ) -> Tensor:
        """Attend span by span, [sequence, batch, ...] in and out; ``lengths`` is None unless sequences are packed."""
        rank, size = (0, 1) if self.context is None else (self.context.rank(), self.context.size())
        if size > 1 and masked is not None:
            raise ValueError("attention_mask must be None where context-parallel ranks share a sequence, got a mask")
        whole = lengths or (query.size(0) * size,)
        query, key = self._placed(query, key, None if lengths is None and size == 1 else whole, rank=rank, size=size)
        if self.context is not None:
            gathered = gather_shares(torch.cat((key, value), dim=2), group=self.context)
            key, value = in_row_order(gathered, whole, size=size).chunk(2, dim=2)
        contexts = [
            self._attend_span(query[at], key[seen], value[seen], None if masked is None else masked[..., at, seen])
            for at, seen in causal_spans(whole, rank=rank, size=size, window=self.chunk)
        ]
        return torch.cat(contexts) if len(contexts) > 1 else contexts[0]

    def _placed(
        self, query: Tensor, key: Tensor, lengths: tuple[int, ...] | None, *, rank: int = 0, size: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Apply RoPE (and norm), or temperature scaling, to queries and keys [sequence, batch, heads, head size].

        The other arguments are those of :meth:`RotaryTable.rotate`.
        """
        if self.rotary is not None:
            query, key = (self.rotary.rotate(each, lengths, rank=rank, size=size) for each in (query, key))
            if self.norm_epsilon is not None:
                query, key = (unit_norm(each, self.norm_epsilon) for each in (query, key))
        elif self.temperature is not None:
            query = self.temperature.scale(query, lengths, rank=rank, size=size)
        return query, key

    def _attend_span(self, query: Tensor, key: Tensor, value: Tensor, masked: Tensor | None) -> Tensor:
        """Attend within one span; a single kernel for spans of different lengths would also compute with padding."""
        if self.window is not None:  # keys before the window of the first query are not needed
            beyond = max(0, key.size(0) - query.size(0) + 1 - self.window)
            key, value = key[beyond:], value[beyond:]
        attention, window = self._attention(is_masked=masked is not None)
        seen = self._seen(query.size(0), key.size(0), masked, window, query.device)
        dropout = self.dropout if self.training else 0.0
        with self._dropout_generator(dropout):
            context = attention(
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                attn_mask=seen,
                dropout_p=dropout,
                is_causal=seen is None,
                scale=self.scale,
                enable_gqa=query.size(2) != key.size(2),
            )
        return context.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)

    def _attention(self, *, is_masked: bool) -> tuple[Callable[..., Tensor], int | None]:
        """Return the attention function, and the window to put into its mask.

        That window is None if there is none, or if the function applies it itself, as block attention does in causal order.
        """
        if not self.in_blocks:
            return F.scaled_dot_product_attention, self.window
        in_blocks = functools.partial(block_attention, cap=self.softcap, sinks_h=self.softmax_offset)
        return (in_blocks, self.window) if is_masked else (functools.partial(in_blocks, window=self.window), None)

    def _seen(
        self, queries: int, keys: int, masked: Tensor | None, window: int | None, device: torch.device
    ) -> Tensor | None:
        """Return the mask, True where a query (row) may attend to a key (column); the last query may attend to all keys.

        For plain causal attention it is None, or, if there are more keys than queries, torch's ``causal_lower_right``, so
        that fused kernels need no mask tensor.
        """
        seen = None if masked is None else ~masked
        if window is None or keys <= window:
            return seen if queries == keys else causal_lower_right(queries, keys)
        place = torch.arange(keys, device=device)
        distance = place[keys - queries :, None] - place[None, :]
        near = (distance >= 0) & (distance < window)
        return near if seen is None else near & seen

    def _dropout_generator(self, dropout: float) -> contextlib.AbstractContextManager[None]:
        """Select a random generator that differs between tensor-parallel ranks, since their heads need different dropout.

        With sequence parallelism the transformer block has already switched to such a generator.
        """
        if dropout == 0.0 or self.config.sequence_parallel:
            return contextlib.nullcontext()
        return get_cuda_rng_tracker().fork()


def _sinks(config: TransformerConfig) -> torch.nn.Parameter:
    """Return the parameter with the sinks of this rank's heads, initialised to zero."""
    heads, here = config.num_attention_heads // config.tensor_model_parallel_size, device.current_device()
    sinks = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=here))
    set_tensor_model_parallel_attributes(sinks, True, 0, 1)
    return sinks
