"""Modules of Mamba-2."""

from __future__ import annotations

import torch.nn.functional as F
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.layers.chunked_scan import causal_convolution
from nemo_kto.layers.mixer_module import RecurrentMixer
from nemo_kto.layers.packing import Prompts
from nemo_kto.mixers import Mamba2
from nemo_kto.models.mixers.scan_kernel import fastest_scan


def mamba2(layer: ModuleSpec, mixer: Mamba2, architecture: Architecture, **_: object) -> None:
    """Put Mamba-2 in the place of a layer's attention."""
    layer.submodules.self_attention = ModuleSpec(module=Mamba2Mixer, params={"mixer": mixer})


class Mamba2Mixer(RecurrentMixer):
    """Mamba-2.

    The rows of the input projection are, for each group: gates of the outputs, inputs, the vectors into and out of the
    state, steps.
    """

    def __init__(
        self,
        *,
        config: TransformerConfig,
        layer_number: int,
        mixer: Mamba2,
        **_: object,  # those of attention
    ) -> None:
        sizes, groups = mixer.sizes, mixer.padded_groups(config.tensor_model_parallel_size)
        inner, convolved = sizes["mamba_inner_group"], sizes["mamba_convolved_group"]
        super().__init__(
            config=config, layer_number=layer_number, groups=groups, rows=sizes["mamba_in_group"], columns=inner
        )
        self.mixer = mixer
        self.scan = fastest_scan(
            config.params_dtype,
            heads=sizes["mamba_heads_group"],
            head_dim=mixer.head_dim,
            state_dim=mixer.state_dim,
        )
        self.add_parameter("convolution", self.groups * convolved, 1, mixer.kernel)
        self.add_parameter("convolution_bias", self.groups * convolved)
        for name in ("decay_log", "step_bias", "skip"):
            self.add_parameter(name, self.groups * sizes["mamba_heads_group"])
        self.add_parameter("norm", self.groups * inner, value=1.0)

    def mix(self, projected_tX: Tensor, lengths: tuple[int, ...], prompts: Prompts) -> Tensor:
        """Return the gated and normalised outputs of all tokens, [t, heads of this rank * size of a head]."""
        mixer, sizes = self.mixer, self.mixer.sizes
        inner, heads, state = sizes["mamba_inner_group"], sizes["mamba_heads_group"], mixer.state_dim
        parts = [inner, sizes["mamba_convolved_group"], heads]
        convolution, convolution_bias, norm = self.own("convolution", "convolution_bias", "norm")
        gate_tgI, values, step_tgr = projected_tX.unflatten(-1, (-1, sum(parts))).split(parts, -1)
        convolved_tc = causal_convolution(
            values.flatten(1), convolution.squeeze(1), convolution_bias, lengths=lengths, prompts=prompts
        )
        inputs, into_tgN, out_of_tgN = F.silu(convolved_tc).unflatten(-1, (-1, parts[1])).split([inner, state, state], -1)
        input_tgrP = inputs.unflatten(-1, (heads, -1))
        decay_log, step_bias, skip = (each.view(-1, heads) for each in self.own("decay_log", "step_bias", "skip"))
        output_tgrP = self.scan(
            input_tgrP,
            F.softplus(step_tgr.float() + step_bias.float()).clamp(*mixer.step_limits),
            decay_log.float().exp(),
            into_tgN,
            out_of_tgN,
            lengths=lengths,
            prompts=prompts,
        )
        output_tgI = (output_tgrP + input_tgrP.float() * skip.unsqueeze(-1)).flatten(-2)
        gated_tgI = output_tgI * F.silu(gate_tgI.float())
        normed_tgI = F.rms_norm(gated_tgI, (inner,), eps=self.config.layernorm_epsilon)
        return (normed_tgI.flatten(1) * norm).to(projected_tX.dtype)
