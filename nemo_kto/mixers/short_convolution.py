"""Gated short convolution of LFM2 (Liquid AI 2025, arXiv 2511.23404, section 2).

For each channel with input x and gates B and C, projected from the hidden state, and weights w of the last W tokens:

    y_t = C_t sum_{j < W} w_{W - 1 - j} (B x)_{t - j}

Shape suffixes: t tokens of a pack, g groups of channels, K channels of a group, c channels of all groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nemo_kto.layers.chunked_scan import causal_convolution
from nemo_kto.layers.packing import Prompts
from nemo_kto.mixers.mixer import FP32, LinearLayer, ModelSizes, Saving, SequenceMixer, round_up
from nemo_kto.mixers.param_mapping import HF, MCORE, ParamMapping, Shape, Split

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from torch import Tensor

    from nemo_kto.layers.mixer_module import RecurrentModule


@dataclass(frozen=True, kw_only=True)
class ShortConvolution(SequenceMixer):
    """Causal convolution of each channel over a few tokens, with a gate on its input and one on its output.

    Channels are independent; they are divided among ranks in groups.
    """

    kind: ClassVar[str] = "short convolution"
    lora_inputs: ClassVar[tuple[str, ...]] = ("in_proj",)
    lora_outputs: ClassVar[tuple[str, ...]] = ("out_proj",)
    padded_with_heads: ClassVar[tuple[str, ...]] = tuple(
        f"self_attention.{name}"
        for name in (
            *("linear_in.weight", "linear_in.lora_b", "linear_in.lora_magnitude"),
            *("linear_out.weight", "linear_out.lora_a", "convolution"),
        )
    )

    channels: int
    groups: int
    kernel: int  # tokens that the convolution combines

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "conv_in": 3 * self.channels,
            "conv_channels": self.channels,
            "conv_groups": self.groups,
            "conv_group": self.channels // self.groups,
            "conv_kernel": self.kernel,
        }

    def unsupported_by_te(self, architecture: ModelSizes) -> Mapping[str, bool]:
        return {"short convolutions": True}

    def products(self, architecture: ModelSizes) -> tuple[int, int]:
        hidden = architecture.hidden_size
        return (3 * hidden + self.kernel) * self.channels, self.channels * hidden

    def context_values(self, architecture: ModelSizes, ranks: int) -> float:
        """Return the values of the groups of other ranks: inputs with both gates, and outputs."""
        return 4 * self._channels_of_rank(architecture) * (ranks - 1) / ranks

    def divided_heads(self, architecture: ModelSizes) -> int:
        return round_up(self.groups, architecture.tensor_parallel) // architecture.tensor_parallel

    def saved_bytes(self, saving: Saving, *, core: bool) -> float:
        return self.bytes_of_projections(saving)

    def backward_bytes(self, saving: Saving) -> float:
        """Return the bytes per token of what is recomputed: eight values of a channel in fp32, with gradients."""
        return FP32 * self._channels_of_rank(saving.architecture) * 8

    def linear_layers(self, saving: Saving) -> tuple[LinearLayer, ...]:
        channels = self._channels_of_rank(saving.architecture)
        return (
            LinearLayer(("in_proj",), saving.hidden, 3 * channels, 3 * channels),
            LinearLayer(("out_proj",), channels, saving.architecture.hidden_size, saving.hidden),
        )

    def specify(self, layer: ModuleSpec, architecture: ModelSizes, *, use_te: bool, share_prompts: bool) -> None:
        self.specify_recurrent(layer)

    def build(self, module: RecurrentModule) -> None:
        """Add the projections and the convolution.

        The rows of the input projection are, for each group: gates of the inputs, gates of the outputs, inputs.
        """
        width = self.channels // self.groups
        groups = round_up(self.groups, module.config.tensor_model_parallel_size)
        module.add_projections(groups=groups, rows=3 * width, columns=width)
        module.add_parameter("convolution", module.groups * width, 1, self.kernel)

    def mix(self, module: RecurrentModule, projected_tX: Tensor, lengths: tuple[int, ...], prompts: Prompts) -> Tensor:
        """Return the gated outputs of all tokens, [t, channels of this rank]."""
        (convolution,) = module.own("convolution")
        width = self.channels // self.groups
        gate_tgK, output_gate_tgK, input_tgK = projected_tX.unflatten(-1, (-1, 3 * width)).split(width, -1)
        gated_tc = (gate_tgK * input_tgK).flatten(1)
        mixed_tc = causal_convolution(gated_tc, convolution.squeeze(1), lengths=lengths, prompts=prompts)
        return output_gate_tgK.flatten(1) * mixed_tc

    def _channels_of_rank(self, architecture: ModelSizes) -> int:
        return self.divided_heads(architecture) * self.channels // self.groups


def _weight(name: str, hf_name: str, shape: Shape, split: Split, *, parts: int = 1) -> ParamMapping:
    return ParamMapping(
        mcore_name=f"{MCORE}self_attention.{name}",
        hf_names={f"{HF}conv.{hf_name}": shape},
        split=split,
        mixer=ShortConvolution.kind,
        groups="conv_groups",
        parts=((0, "conv_group"),) * parts,
    )


SHORT_CONVOLUTION_WEIGHTS = (
    _weight("linear_in.weight", "in_proj.weight", ("conv_in", "hidden"), Split.GROUPS, parts=3),
    _weight("convolution", "conv.weight", ("conv_channels", 1, "conv_kernel"), Split.GROUPS),
    _weight("linear_out.weight", "out_proj.weight", ("hidden", "conv_channels"), Split.GROUP_COLUMNS),
)
