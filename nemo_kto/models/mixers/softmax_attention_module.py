"""Modules of softmax attention."""

from __future__ import annotations

from megatron.core import parallel_state
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.layers.attention import TorchAttention
from nemo_kto.layers.engine_attention import with_shared_prompts
from nemo_kto.layers.linear import with_bias
from nemo_kto.layers.norm import AllHeadsNorm, TorchNorm
from nemo_kto.layers.rope_tables import RopeTable, TemperatureTable
from nemo_kto.mixers import SoftmaxAttention


class GatedAttention(SelfAttention):  # type: ignore[misc]
    """megatron-core's attention with gates on its output, also where several ranks share a key-value head."""

    def get_query_key_value_tensors(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return megatron-core's tensors, with the gates of this rank's heads instead of all heads of the group."""
        query, key, value, gate_sbhd = super().get_query_key_value_tensors(*args, **kwargs)
        heads, of_group = query.size(2), gate_sbhd.size(2)
        first = parallel_state.get_tensor_model_parallel_rank() % (of_group // heads) * heads if of_group > heads else 0
        return query, key, value, gate_sbhd[:, :, first : first + heads]


def softmax_attention(
    layer: ModuleSpec,
    mixer: SoftmaxAttention,
    architecture: Architecture,
    *,
    use_te: bool,
    share_prompts: bool,
    attn_mask_type: AttnMaskType,
) -> None:
    """Put this project's modules into the attention of a layer, or with ``use_te`` complete Transformer Engine's.

    With ``share_prompts`` it supports packed sequences that share prompts, which attention without Transformer Engine
    always does.
    """
    attention = layer.submodules.self_attention
    attention.params["attn_mask_type"] = attn_mask_type
    parts = attention.submodules
    if architecture.output_bias and not architecture.mlp_bias:
        parts.linear_proj = with_bias(parts.linear_proj)
    if use_te:
        if share_prompts:
            parts.core_attention = with_shared_prompts(parts.core_attention)
        return
    if architecture.output_gate:
        attention.module = GatedAttention
    local_rope, temperature = architecture.local_rope, architecture.temperature
    parts.core_attention = ModuleSpec(
        module=TorchAttention,
        params={
            "softcap": architecture.attention_softcap,
            "sinks": architecture.sinks,
            "chunked": architecture.family.chunked,
            "rope": RopeTable(rope=architecture.rope, interleaved=architecture.family.interleaved_rotary),
            "norm_after_rope": architecture.rotated_norm,
            "qk_norm_after_rope": architecture.qk_norm_after_rope,
            "temperature": None if temperature is None else TemperatureTable(temperature=temperature),
            "local_rope": None if local_rope is None else RopeTable(rope=local_rope),
        },
    )
    if architecture.all_heads_norm:
        parts.q_layernorm, parts.k_layernorm = (
            ModuleSpec(module=AllHeadsNorm, params={"heads": heads, "padded_heads": padded})
            for heads, padded in (
                (architecture.num_attention_heads, architecture.padded_attention_heads),
                (architecture.num_query_groups, architecture.padded_query_groups),
            )
        )
    elif architecture.qk_norm_after_rope:
        parts.q_layernorm = parts.k_layernorm = IdentityOp
    elif architecture.qk_norm:
        parts.q_layernorm = parts.k_layernorm = TorchNorm
