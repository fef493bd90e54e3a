"""Mamba-2: a short convolution and a selective state space model (Dao & Gu 2024, arXiv 2405.21060)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nemo_kto.mixers.gated_delta_net import CHUNK
from nemo_kto.mixers.mixer import AttentionWindow, LinearLayer, SequenceMixer
from nemo_kto.mixers.param_mapping import HF, MCORE, ParamMapping, Shape, Split
from nemo_kto.mixers.saving import FP32, Saving

if TYPE_CHECKING:
    from nemo_kto.architecture.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class Mamba2(SequenceMixer):
    """Selective state space model of convolved inputs, with a gate and a norm over each group of its output.

    The heads of a group have the same vectors into and out of the state; tensor parallelism does not divide it.
    """

    kind: ClassVar[str] = "Mamba-2"
    lora_inputs: ClassVar[tuple[str, ...]] = ("in_proj",)
    lora_outputs: ClassVar[tuple[str, ...]] = ("out_proj",)
    padded_with_heads: ClassVar[tuple[str, ...]] = tuple(
        f"self_attention.{name}"
        for name in (
            *("linear_in.weight", "linear_in.lora_b", "linear_in.lora_magnitude"),
            *("linear_out.weight", "linear_out.lora_a", "convolution", "convolution_bias"),
            *("decay_log", "step_bias", "skip", "norm"),
        )
    )

    heads: int
    groups: int
    head_dim: int
    state_dim: int
    kernel: int  # tokens that the convolution combines
    step_limits: tuple[float, ...]  # smallest and largest step

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ValueError(
                "the number of Mamba-2 heads (mamba_num_heads or mamba_n_heads) must be divisible by that of groups "
                f"(n_groups or mamba_n_groups), got {self.heads} and {self.groups}; correct one"
            )
        if len(limits := self.step_limits) != 2 or not limits[0] < limits[1]:
            raise ValueError(f"time_step_limit must be the smallest and the largest step, got {[*limits]}; correct it")

    @property
    def sizes(self) -> dict[str, int]:
        heads = self.heads // self.groups
        inner, state = heads * self.head_dim, self.state_dim
        group = {"inner": inner, "convolved": inner + 2 * state, "in": 2 * inner + 2 * state + heads, "heads": heads}
        whole = {f"mamba_{name}": size * self.groups for name, size in group.items()}
        of_group = {f"mamba_{name}_group": size for name, size in group.items()}
        return {
            **whole,
            **of_group,
            "mamba_groups": self.groups,
            "mamba_state": state,
            "mamba_kernel": self.kernel,
        }

    def unsupported_by_te(self, architecture: Architecture) -> Mapping[str, bool]:
        return {"Mamba-2": True}

    def products(self, architecture: Architecture) -> tuple[int, int]:
        """Return the weights; the state of each head counts as two: to update and to read it."""
        hidden, sizes = architecture.hidden_size, self.sizes
        inputs = hidden * sizes["mamba_in"] + sizes["mamba_convolved"] * self.kernel
        return inputs + 2 * sizes["mamba_inner"] * self.state_dim, hidden * sizes["mamba_inner"]

    def pair_flops(self, architecture: Architecture, layer: int) -> tuple[AttentionWindow, int]:
        return AttentionWindow(None), 0

    def context_values(self, architecture: Architecture, ranks: int) -> float:
        """Return the values of the groups of other ranks: inputs, and outputs."""
        of_group = self.sizes["mamba_in_group"] + self.sizes["mamba_inner_group"]
        return self.divided_heads(architecture) * of_group * (ranks - 1) / ranks

    def divided_heads(self, architecture: Architecture) -> int:
        return self.padded_groups(architecture.tensor_parallel) // architecture.tensor_parallel

    def saved_bytes(self, saving: Saving, *, core: bool) -> float:
        """Return the bytes of the projections, from which the backward pass computes all else, and of both inputs."""
        inputs, outputs = self.linear_layers(saving)
        saved = saving.hidden * saving.keeps_input("in_proj") + inputs.outputs
        return saving.element_bytes * (saved + outputs.inputs * saving.keeps_input("out_proj"))

    def table_bytes(self, saving: Saving) -> int:
        return 0

    def backward_bytes(self, saving: Saving) -> float:
        """Return the bytes per token of what is recomputed, all in fp32 and with gradients.

        These are two passes of the convolved values and gates, and for each head three matrices of a chunk's tokens by its
        tokens, five of inputs, and the state at the end of each chunk. For full chunks the peak is a quarter less.
        """
        groups, sizes = self.divided_heads(saving.architecture), self.sizes
        of_head = 3 * CHUNK + 5 * self.head_dim + self.head_dim * self.state_dim / CHUNK
        return 2 * FP32 * groups * (2 * sizes["mamba_in_group"] + sizes["mamba_heads_group"] * of_head)

    def linear_layers(self, saving: Saving) -> tuple[LinearLayer, ...]:
        groups, sizes = self.divided_heads(saving.architecture), self.sizes
        rows, inner = groups * sizes["mamba_in_group"], groups * sizes["mamba_inner_group"]
        return (
            LinearLayer(("in_proj",), saving.hidden, rows, rows),
            LinearLayer(("out_proj",), inner, saving.architecture.hidden_size, saving.hidden),
        )

    def padded_groups(self, tensor_parallel: int) -> int:
        """Return the number of groups with padding: the next multiple of the tensor-parallel ranks."""
        return -(-self.groups // tensor_parallel) * tensor_parallel


def mamba2_weights(block: str) -> tuple[ParamMapping, ...]:
    """Return the mappings of the weights in layers with Mamba-2; ``block`` is the name of the mixer in the file."""

    def weight(name: str, hf_name: str, shape: Shape, *parts: str, split: Split = Split.GROUPS) -> ParamMapping:
        return ParamMapping(
            mcore_name=f"{MCORE}self_attention.{name}",
            hf_names={f"{HF}{block}.{hf_name}": shape},
            split=split,
            mixer=Mamba2.kind,
            groups="mamba_groups",
            parts=tuple((0, part) for part in parts),
        )

    inner, heads, state = "mamba_inner_group", "mamba_heads_group", "mamba_state"
    convolved = (inner, state, state)
    return (
        weight("linear_in.weight", "in_proj.weight", ("mamba_in", "hidden"), inner, *convolved, heads),
        weight("convolution", "conv1d.weight", ("mamba_convolved", 1, "mamba_kernel"), *convolved),
        weight("convolution_bias", "conv1d.bias", ("mamba_convolved",), *convolved),
        weight("decay_log", "A_log", ("mamba_heads",), heads),
        weight("step_bias", "dt_bias", ("mamba_heads",), heads),
        weight("skip", "D", ("mamba_heads",), heads),
        weight("norm", "norm.weight", ("mamba_inner",), inner),
        weight("linear_out.weight", "out_proj.weight", ("hidden", "mamba_inner"), inner, split=Split.GROUP_COLUMNS),
    )
