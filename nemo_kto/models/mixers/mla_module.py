"""Modules of latent attention."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.layers.attention import PackedSequences, TorchAttention
from nemo_kto.layers.linear import ReplicatedLinear
from nemo_kto.layers.norm import TorchNorm
from nemo_kto.layers.rope_tables import RopeTable, TemperatureTable
from nemo_kto.mixers import LatentAttention
from nemo_kto.mixers.saving import HEAD_MULTIPLE

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

_NORM_EPSILON = 1e-6  # of the norms of latents, to which rms_norm_eps does not apply


def latent_attention(
    layer: ModuleSpec,
    mixer: LatentAttention,
    architecture: Architecture,
    *,
    attn_mask_type: AttnMaskType,
    **_: object,
) -> None:
    """Put latent attention in the place of a layer's attention."""
    temperature = architecture.temperature
    params = {
        "mixer": mixer,
        "rope": RopeTable(rope=architecture.rope, interleaved=mixer.interleaved),
        "attn_mask_type": attn_mask_type,
        # the core attention, which scales the queries, has no RoPE
        "temperature": None if temperature is None else TemperatureTable(temperature=replace(temperature, with_rope=False)),
    }
    layer.submodules.self_attention = ModuleSpec(module=MultiLatentAttention, params=params)


class MultiLatentAttention(MegatronModule):
    """Latent attention with the call signature of megatron-core's attention.

    Every rank has the whole projections to latents, and those from latents to its heads. With sequence parallelism a rank
    projects and normalises the latents of its part of the sequence.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        mixer: LatentAttention,
        rope: RopeTable,
        attn_mask_type: AttnMaskType,
        temperature: TemperatureTable | None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: object,  # those of attention
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self.mixer, self.rope = layer_number, mixer, rope
        heads, sizes = mixer.padded_heads(config.tensor_model_parallel_size), mixer.sizes
        linear: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False}
        to_heads = {"gather_output": False, **linear}
        self.linear_q_proj: Any = None
        if mixer.query_rank is None:
            self.linear_q_proj = ColumnParallelLinear(config.hidden_size, heads * mixer.query_dim, **to_heads)
        else:
            self.linear_q_down_proj = ReplicatedLinear(config.hidden_size, mixer.query_rank, config=config)
            self.q_layernorm = TorchNorm(config, mixer.query_rank, eps=_NORM_EPSILON)
            self.linear_q_up_proj = ColumnParallelLinear(mixer.query_rank, heads * mixer.query_dim, **to_heads)
        latent = sizes["key_value_latent_and_rope"]
        self.linear_kv_down_proj = ReplicatedLinear(config.hidden_size, latent, config=config)
        self.kv_layernorm = TorchNorm(config, mixer.key_value_rank, eps=_NORM_EPSILON)
        self.linear_kv_up_proj = ColumnParallelLinear(mixer.key_value_rank, heads * sizes["latent_key_value"], **to_heads)
        self.core_attention = TorchAttention(
            config,
            layer_number,
            attn_mask_type,
            "self",
            softmax_scale=config.softmax_scale,
            pg_collection=pg_collection,
            temperature=temperature,
        )
        self.linear_proj = RowParallelLinear(
            heads * mixer.value_dim, config.hidden_size, input_is_parallel=True, skip_bias_add=True, **linear
        )
        self.recomputes_core = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences | None = None,
        **_: object,  # those of attention
    ) -> tuple[Tensor, None]:
        """Attend over [sequence, batch, hidden], of packed sequences with batch 1."""
        if self.linear_q_proj is not None:
            queries = self.linear_q_proj(hidden_states)[0]
        else:
            queries = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)[0]))[0]
        mixer = self.mixer
        latent, key_rope = self.linear_kv_down_proj(hidden_states)[0].split([mixer.key_value_rank, mixer.rotated_dim], -1)
        keys_values = self.linear_kv_up_proj(self.kv_layernorm(latent))[0]
        # the rotated part of the keys serves the heads of all ranks, so that its gradient is summed over them
        if self.config.sequence_parallel:
            key_rope = gather_from_sequence_parallel_region(key_rope)
        else:
            key_rope = copy_to_tensor_model_parallel_region(key_rope)
        key_rope = self._rotate(key_rope.unsqueeze(2), packed_seq_params)
        query, query_rope = self._split(queries, mixer.plain_dim, mixer.rotated_dim)
        key, value = self._split(keys_values, mixer.plain_dim, mixer.value_dim)
        query = torch.cat((query, self._rotate(query_rope, packed_seq_params)), -1)
        key = torch.cat((key, key_rope.expand(-1, -1, key.size(2), -1)), -1)
        inputs = query, key, value, attention_mask, packed_seq_params
        if self.recomputes_core:
            mixed = checkpoint(
                self._attend, *inputs, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
            )
        else:
            mixed = self._attend(*inputs)
        return self.linear_proj(mixed)[0], None

    def _split(self, heads_sbX: Tensor, *sizes: int) -> tuple[Tensor, ...]:
        """Return the parts of each head, [sequence, batch, heads of this rank, size]."""
        return heads_sbX.unflatten(-1, (-1, sum(sizes))).split([*sizes], -1)

    def _rotate(self, heads_sbhd: Tensor, packed: PackedSequences | None) -> Tensor:
        return self.core_attention.rotate(self.rope, heads_sbhd, packed)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, packed: PackedSequences | None
    ) -> Tensor:
        """Return the values that the heads of this rank attend to, [sequence, batch, heads * size of a value]."""
        size = self.mixer.head_dim
        if self.mixer.plain_dim % HEAD_MULTIPLE:  # kernels on GPUs cannot read values that begin there, after the keys
            value = value.contiguous()
        parts = [each if each.size(-1) == size else F.pad(each, (0, size - each.size(-1))) for each in (query, key, value)]
        if packed is not None:
            parts = [each.squeeze(1) for each in parts]
        mixed = self.core_attention(*parts, mask, packed_seq_params=packed).unflatten(-1, (-1, size))
        mixed = mixed[..., : self.mixer.value_dim].flatten(-2)
        return mixed if packed is None else mixed.unsqueeze(1)
