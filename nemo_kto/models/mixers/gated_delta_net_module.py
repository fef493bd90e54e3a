"""Modules of the gated delta net."""

from __future__ import annotations

import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.layers.chunked_scan import causal_convolution
from nemo_kto.layers.mixer_module import RecurrentMixer
from nemo_kto.layers.packing import Prompts
from nemo_kto.mixers import GatedDeltaNet
from nemo_kto.models.mixers.delta_kernel import fastest_delta_rule


def gated_delta_net(layer: ModuleSpec, mixer: GatedDeltaNet, architecture: Architecture, **_: object) -> None:
    """Put a gated delta net in the place of a layer's attention."""
    layer.submodules.self_attention = ModuleSpec(module=DeltaNet, params={"mixer": mixer})


class DeltaNet(RecurrentMixer):
    """Gated delta net.

    A group is a key head with its value heads. The rows of its input projection are: query, key, values, gates of the
    outputs, strengths, decays.
    """

    norm: Tensor

    def __init__(
        self,
        *,
        config: TransformerConfig,
        layer_number: int,
        mixer: GatedDeltaNet,
        **_: object,  # those of attention
    ) -> None:
        sizes, heads = mixer.sizes, mixer.padded_heads(config.tensor_model_parallel_size)
        rows, columns = sizes["delta_qkvz_group"] + sizes["delta_ba_group"], sizes["delta_z_group"]
        super().__init__(config=config, layer_number=layer_number, groups=heads, rows=rows, columns=columns)
        self.mixer = mixer
        sizes_of_heads = {"key_dim": mixer.key_dim, "value_dim": mixer.value_dim, "values_per_key": mixer.values_per_key}
        self.delta_rule = fastest_delta_rule(config.params_dtype, **sizes_of_heads)
        self.add_parameter("convolution", self.groups * sizes["delta_qkv_group"], 1, mixer.kernel)
        for name in ("decay_log", "step_bias"):
            self.add_parameter(name, self.groups * mixer.values_per_key)
        self.add_parameter("norm", mixer.value_dim, value=1.0, sharded=False)

    def mix(self, projected_tX: Tensor, lengths: tuple[int, ...], prompts: Prompts) -> Tensor:
        """Return the gated and normalised outputs of all tokens, [t, heads of this rank * size of a value]."""
        mixer, sizes, dtype = self.mixer, self.mixer.sizes, projected_tX.dtype
        heads = sizes["delta_heads_group"]
        parts = [sizes["delta_qkv_group"], sizes["delta_z_group"], heads, heads]
        convolution, decay_log, step_bias = self.own("convolution", "decay_log", "step_bias")
        qkv, gate, strength_tgr, step_tgr = projected_tX.unflatten(-1, (-1, sum(parts))).split(parts, -1)
        convolved_tc = causal_convolution(qkv.flatten(1), convolution.squeeze(1), lengths=lengths, prompts=prompts)
        query_tgK, key_tgK, value = (
            F.silu(convolved_tc)
            .unflatten(-1, (-1, parts[0]))
            .split([mixer.key_dim, mixer.key_dim, sizes["delta_z_group"]], -1)
        )
        rate_gr, bias_gr = (each.float().view(-1, heads) for each in (decay_log.float().exp(), step_bias))
        output_tgrV = self.delta_rule(
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
