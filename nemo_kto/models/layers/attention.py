"""Core attention on torch's scaled_dot_product_attention, for megatron-core's layers without Transformer Engine.

It rotates queries and keys itself, so that the layers need no rotary embedding of megatron-core's.

megatron-core's own torch attention keeps every score of every head, [batch, heads, sequence, sequence]; torch's fused
kernels (on GPU and on CPU) never hold more than a block of them.
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
    """softmax(scale * q k^T) v: causal, grouped heads, sliding window, or an arbitrary mask; soft caps and sinks.

    Args (those of megatron-core's core attention):
        config: the transformer's configuration; ``window_size`` = (tokens seen to the left, 0) limits the attention of the
            layers that ``window_attn_skip_freq`` names.
        layer_number: from 1, over all pipeline stages.
        attn_mask_type: causal or arbitrary.
        attention_type: self attention; there is no other in this project.
        attention_dropout: probability; ``config.attention_dropout`` where None.
        softmax_scale: factor on the scores; 1 / sqrt(head size) where None.
        cp_comm_type: how context-parallel ranks talk in Transformer Engine; here each gathers the keys and values of all.
        pg_collection: process groups, of which the context-parallel one is used where ranks share a sequence.
        softcap: the scores become softcap * tanh(score / softcap); None where they stay as they are.
        sinks: each head has a score more in its softmax, which no value belongs to: the parameter ``softmax_offset``, as in
            megatron-core's own attention, [heads of this rank].
        chunked: the window of a token is the chunk of its sequence that it lies in, and does not slide.
        rotary: the rotation of queries and keys, in all layers but those that ``config.no_rope_freq`` marks; None where they
            come rotated.
        local_rotary: that of layers with a window, where it is another.
        rotated_norm: what has been rotated is normalised, each head by its root mean square.
        temperature: what queries of layers without a rotation are multiplied by; None for nothing.

    Raises:
        ValueError: the configuration asks for something that this attention would silently leave out.
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
            tokens = config.window_size[0] + 1  # megatron-core leaves the token itself out of the count
            self.window, self.chunk = (None, tokens) if chunked else (tokens, None)
            rotary = local_rotary or rotary
        self.rotary = None if config.no_rope_freq and config.no_rope_freq[layer_number - 1] else rotary
        self.norm_epsilon = config.layernorm_epsilon if rotated_norm else None
        self.temperature = temperature

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """The sinks, which the tensor-parallel ranks share out by heads; nothing where there are none."""
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
        """Attend.

        Args:
            query: [sequence, batch, heads of this rank, head size]; [tokens, heads of this rank, head size] of a row of
                sequences. Context-parallel ranks have a share of the sequence, as ``models/layers/spans.py`` says.
            key: [sequence, batch, key-value heads of this rank, head size]; of a row without the batch.
            value: as ``key``.
            attention_mask: [batch or 1, 1, sequence, sequence], True where a token must not be seen; read if the mask type
                is arbitrary, and then in place of the causal order. Every row must leave at least one token to see.
            attn_mask_type: overrides the type given at construction.
            attention_bias: must be None.
            packed_seq_params: a row of sequences, which do not see each other (``PackedSequences``); None where a batch has
                one in each row. Its lengths are those of the whole sequences.

        Returns:
            [sequence, batch, heads * head size]; of a row [tokens, heads * head size].

        Raises:
            ValueError: a bias on the scores, a mask type other than causal and arbitrary, a mask on a row of sequences or
                on a share of one, or a length that cannot be shared out.
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
        """In one kernel; [tokens, heads, head size] in, [tokens, heads * head size] out."""
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
        """[sequence, batch, ...] in and out; ``lengths`` are those of a row of sequences."""
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
        """Queries and keys [sequence, batch, heads, head size] with what the places of their tokens make of them; arguments
        of :meth:`RotaryTable.rotate`."""
        if self.rotary is not None:
            query, key = (self.rotary.rotate(each, lengths, rank=rank, size=size) for each in (query, key))
            if self.norm_epsilon is not None:
                query, key = (unit_norm(each, self.norm_epsilon) for each in (query, key))
        elif self.temperature is not None:
            query = self.temperature.scale(query, lengths, rank=rank, size=size)
        return query, key

    def _attend_span(self, query: Tensor, key: Tensor, value: Tensor, masked: Tensor | None) -> Tensor:
        """One after the other: a kernel for rows of unlike length would compute with their padding."""
        if self.window is not None:  # what the first query does not see, no later one does
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
        """The function that attends, and the window that its mask must say: blocks know of windows in the causal order."""
        if not self.in_blocks:
            return F.scaled_dot_product_attention, self.window
        in_blocks = functools.partial(block_attention, cap=self.softcap, sinks_h=self.softmax_offset)
        return (in_blocks, self.window) if is_masked else (functools.partial(in_blocks, window=self.window), None)

    def _seen(
        self, queries: int, keys: int, masked: Tensor | None, window: int | None, device: torch.device
    ) -> Tensor | None:
        """True where a query (row) sees a key (column): the last query sees all keys, the one before one less.

        None for the plain causal order, and torch's description of it where there are more keys: fused kernels then need no
        tensor.
        """
        seen = None if masked is None else ~masked
        if window is None or keys <= window:
            return seen if queries == keys else causal_lower_right(queries, keys)
        place = torch.arange(keys, device=device)
        distance = place[keys - queries :, None] - place[None, :]
        near = (distance >= 0) & (distance < window)
        return near if seen is None else near & seen

    def _dropout_generator(self, dropout: float) -> contextlib.AbstractContextManager[None]:
        """The ranks of a tensor-parallel group hold different heads and must not drop the same scores.

        With sequence parallelism the transformer block has already switched to the generator that differs between them.
        """
        if dropout == 0.0 or self.config.sequence_parallel:
            return contextlib.nullcontext()
        return get_cuda_rng_tracker().fork()


def _sinks(config: TransformerConfig) -> torch.nn.Parameter:
    """Of this rank's heads."""
    heads, here = config.num_attention_heads // config.tensor_model_parallel_size, device.current_device()
    sinks = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=here))
    set_tensor_model_parallel_attributes(sinks, True, 0, 1)
    return sinks
