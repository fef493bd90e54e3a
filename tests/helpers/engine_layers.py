"""Stand-in for Transformer Engine's layers on the CPU: megatron-core's own, and a core attention called as its."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.layers.norm import TorchNorm
from nemo_kto.models import gpt


class EngineAttention(MegatronModule):
    """Causal attention of each sequence of a pack to itself, with queries and keys that are already rotated."""

    def __init__(
        self,
        *,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None,
        softmax_scale: float | None,
        pg_collection: Any,
    ) -> None:
        super().__init__(config)
        self.scale, self.window = softmax_scale, None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.window = config.window_size[0] + 1

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: AttnMaskType,
        attention_bias: Tensor | None,
        packed_seq_params: Any,
    ) -> Tensor:
        assert (attn_mask_type, attention_bias) == (AttnMaskType.causal, None)
        if packed_seq_params is None:
            return self.attend(query, key, value)
        starts = packed_seq_params.cu_seqlens_q
        assert torch.equal(starts, packed_seq_params.cu_seqlens_kv)
        assert packed_seq_params.cu_seqlens_q_padded is packed_seq_params.cu_seqlens_kv_padded is None
        parts = zip(*(heads.unsqueeze(1).split(starts.diff().tolist()) for heads in (query, key, value)), strict=True)
        return torch.cat([self.attend(*part) for part in parts]).squeeze(1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[sequence, batch, heads, head size] -> [sequence, batch, heads * head size]"""
        position_s = torch.arange(len(query), device=query.device)
        distance_ss = position_s[:, None] - position_s
        is_visible_ss = (distance_ss >= 0) & (distance_ss < (self.window or len(query)))
        query, key, value = (heads.permute(1, 2, 0, 3) for heads in (query, key, value))
        context = F.scaled_dot_product_attention(query, key, value, is_visible_ss, scale=self.scale, enable_gqa=True)
        return context.permute(2, 0, 1, 3).flatten(2)


@contextlib.contextmanager
def engine_layers(architecture: Architecture) -> Iterator[None]:
    """Build models with these layers in place of Transformer Engine's; without experts, which those group."""

    def layer_spec(*, num_experts: None, moe_grouped_gemm: bool, qk_layernorm: bool) -> Any:
        layer = get_gpt_layer_local_spec(qk_layernorm=qk_layernorm, normalization="RMSNorm")
        gpt._use_torch_modules(layer, architecture)
        layer.submodules.self_attention.submodules.core_attention = EngineAttention
        return layer

    with (
        mock.patch.object(gpt, "uses_transformer_engine", return_value=True),
        mock.patch.object(gpt, "get_gpt_layer_with_transformer_engine_spec", layer_spec),
        mock.patch.object(transformer_engine, "TENorm", TorchNorm),
    ):
        yield
