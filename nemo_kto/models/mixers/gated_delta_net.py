"""Modules of the gated delta net."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.mixers import GatedDeltaNet
from nemo_kto.device import device
from nemo_kto.models.layers.attention import PackedSequences
from nemo_kto.models.layers.delta_rule import causal_convolution, gated_delta_rule
from nemo_kto.models.layers.packing import Prompts
from nemo_kto.models.mixers.heads import all_heads, all_tokens, own_heads


def gated_delta_net(layer: ModuleSpec, mixer: GatedDeltaNet, architecture: Architecture, **_: object) -> None:
    """Put a gated delta net in the place of a layer's attention."""
    layer.submodules.self_attention = ModuleSpec(module=DeltaNet, params={"mixer": mixer})


class DeltaNet(MegatronModule):
    """Gated delta net, with the call signature of megatron-core's attention.

    A rank has some of the key heads with their value heads. The rows of its input projection are, for each key head: query,
    key, values, gates of the outputs, strengths, decays. All between the two projections is computed again in the backward
    pass, so that only the projections are kept.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        mixer: GatedDeltaNet,
        **_: object,  # those of attention
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self.mixer = layer_number, mixer
        ranks = config.tensor_model_parallel_size
        key_heads = mixer.padded_heads(ranks)
        sizes, self.key_heads = mixer.sizes, key_heads // ranks
        width = sizes["delta_qkvz_group"] + sizes["delta_ba_group"]
        linear: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False}
        self.linear_in = ColumnParallelLinear(config.hidden_size, key_heads * width, gather_output=False, **linear)
        self.linear_out = RowParallelLinear(
            key_heads * sizes["delta_z_group"],
            config.hidden_size,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )

        def parameter(*shape: int, value: float = 0.0) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.full(shape, value, dtype=config.params_dtype, device=device.current_device()))

        self.convolution = parameter(self.key_heads * sizes["delta_qkv_group"], 1, mixer.kernel)
        self.decay_log, self.step_bias = (parameter(self.key_heads * mixer.values_per_key) for _ in range(2))
        self.norm = parameter(mixer.value_dim, value=1.0)
        for sharded in (self.convolution, self.decay_log, self.step_bias):
            set_tensor_model_parallel_attributes(sharded, True, 0, 1)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences | None = None,
        **_: object,  # those of attention
    ) -> tuple[Tensor, None]:
        """Mix [sequence, batch, hidden], of packed sequences with batch 1. No token takes in values of later ones."""
        projected_sbX, _bias = self.linear_in(hidden_states)
        sequence, batch = projected_sbX.shape[:2]
        if packed_seq_params is None:
            lengths, prompts = (sequence * self.config.context_parallel_size,) * batch, None
        else:
            lengths, prompts = packed_seq_params.lengths, packed_seq_params.prompts
        projected_tX = projected_sbX.transpose(0, 1).flatten(0, 1)
        mixed_tX = checkpoint(
            self._mix,
            all_tokens(projected_tX, lengths),
            lengths,
            prompts,
            use_reentrant=False,
            preserve_rng_state=False,
            determinism_check="none",
        )
        # a copy, because matrix products of views round in other ways
        mixed_sbX = all_heads(mixed_tX, lengths).unflatten(0, (batch, sequence)).transpose(0, 1).contiguous()
        return self.linear_out(mixed_sbX)[0], None

    def _mix(self, projected_tX: Tensor, lengths: tuple[int, ...], prompts: Prompts) -> Tensor:
        """Return the gated and normalised outputs of all tokens, [t, heads of this rank * size of a value].

        Of the heads that these ranks share, a context-parallel rank has a part.
        """
        mixer, sizes, dtype = self.mixer, self.mixer.sizes, projected_tX.dtype
        heads = sizes["delta_heads_group"]
        parts = [sizes["delta_qkv_group"], sizes["delta_z_group"], heads, heads]
        convolution, decay_log, step_bias = map(own_heads, (self.convolution, self.decay_log, self.step_bias))
        key_heads = self.key_heads // self.config.context_parallel_size
        qkv, gate, strength_tgr, step_tgr = projected_tX.unflatten(-1, (key_heads, -1)).split(parts, -1)
        convolved_tc = causal_convolution(qkv.flatten(1), convolution.squeeze(1), lengths=lengths, prompts=prompts)
        query_tgK, key_tgK, value = (
            F.silu(convolved_tc)
            .unflatten(-1, (key_heads, -1))
            .split([mixer.key_dim, mixer.key_dim, sizes["delta_z_group"]], -1)
        )
        rate_gr, bias_gr = (each.float().view(key_heads, heads) for each in (decay_log.float().exp(), step_bias))
        output_tgrV = gated_delta_rule(
            query_tgK,
            key_tgK,
            value.unflatten(-1, (heads, -1)),
            -rate_gr * F.softplus(step_tgr.float() + bias_gr),
            strength_tgr.sigmoid(),
            lengths=lengths,
            prompts=prompts,
        )
        # the gradient of the norm's weight is summed over the ranks, which have different heads
        weight_V = copy_to_tensor_model_parallel_region(self.norm)
        output_tgrV = output_tgrV.to(dtype).float()  # the rounding of transformers
        normed = F.rms_norm(output_tgrV, output_tgrV.shape[-1:], eps=self.config.layernorm_epsilon).to(dtype)
        gated = (weight_V * normed) * F.silu(gate.unflatten(-1, (heads, -1)).float())
        return gated.to(dtype).flatten(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return the sharded state; all but the norm is sharded by heads."""
        state: ShardedStateDict = {}
        for name, module in (("linear_in", self.linear_in), ("linear_out", self.linear_out)):
            state |= module.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        own = {name: getattr(self, name) for name in ("convolution", "decay_log", "step_bias", "norm")}
        return state | make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(("convolution", "decay_log", "step_bias"), 0),
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )
