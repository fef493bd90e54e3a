"""Gated delta net: a short convolution and the gated delta rule (Yang et al. 2024, arXiv 2412.06464)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nemo_kto.mixers.mixer import AttentionWindow, LinearLayer, SequenceMixer
from nemo_kto.mixers.param_mapping import HF, MCORE, ParamMapping, Shape, Split
from nemo_kto.mixers.saving import FP32, Saving

if TYPE_CHECKING:
    from nemo_kto.architecture.architecture import Architecture

_HF = HF + "linear_attn."
_INPUTS = ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
CHUNK = 64  # tokens of a chunk in layers/chunked_scan.py


def _weight(name: str, hf_names: dict[str, Shape], split: Split, *parts: tuple[int, str]) -> ParamMapping:
    """Return the mapping of a weight; ``parts`` are those of a key head."""
    names = {_HF + each: shape for each, shape in hf_names.items()}
    mcore = f"{MCORE}self_attention.{name}"
    return ParamMapping(
        mcore_name=mcore, hf_names=names, split=split, mixer=GatedDeltaNet.kind, groups="delta_keys", parts=parts
    )


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(SequenceMixer):
    """Gated delta rule on convolved queries, keys and values, with a gated norm of its output.

    A key head and the value heads that it serves are a group, which tensor parallelism does not divide.
    """

    kind: ClassVar[str] = "gated delta net"
    lora_inputs: ClassVar[tuple[str, ...]] = _INPUTS
    lora_outputs: ClassVar[tuple[str, ...]] = ("out_proj",)
    padded_with_heads: ClassVar[tuple[str, ...]] = tuple(
        f"self_attention.{name}"
        for name in (
            *("linear_in.weight", "linear_in.lora_b", "linear_in.lora_magnitude"),
            *("linear_out.weight", "linear_out.lora_a", "convolution", "decay_log", "step_bias"),
        )
    )

    key_heads: int
    value_heads: int
    key_dim: int  # of a head
    value_dim: int
    kernel: int  # tokens that the convolution combines

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(
                "linear_num_value_heads must be divisible by linear_num_key_heads, got "
                f"{self.value_heads} and {self.key_heads}; correct one"
            )

    @property
    def values_per_key(self) -> int:
        """Number of value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def sizes(self) -> dict[str, int]:
        key, value, heads = self.key_dim, self.value_dim * self.values_per_key, self.values_per_key
        group = {"qkvz": 2 * key + 2 * value, "ba": 2 * heads, "qkv": 2 * key + value, "z": value, "heads": heads}
        whole = {f"delta_{name}": size * self.key_heads for name, size in group.items()}
        of_group = {f"delta_{name}_group": size for name, size in group.items()}
        return {
            **whole,
            **of_group,
            "delta_keys": self.key_heads,
            "delta_key": key,
            "delta_value": self.value_dim,
            "delta_kernel": self.kernel,
        }

    def unsupported_by_te(self, architecture: Architecture) -> Mapping[str, bool]:
        return {"gated delta nets": True}

    def products(self, architecture: Architecture) -> tuple[int, int]:
        """Return the weights; the state of each value head counts as three: to correct, to update and to read it."""
        sizes = self.sizes
        inputs = architecture.hidden_size * (sizes["delta_qkvz"] + sizes["delta_ba"]) + sizes["delta_qkv"] * self.kernel
        return inputs + 3 * self.value_heads * self.key_dim * self.value_dim, architecture.hidden_size * sizes["delta_z"]

    def pair_flops(self, architecture: Architecture, layer: int) -> tuple[AttentionWindow, int]:
        return AttentionWindow(None), 0

    def context_values(self, architecture: Architecture, ranks: int) -> float:
        """Return the values of the heads of other ranks: the inputs of the convolution and the gates, and the outputs."""
        of_head = self.sizes["delta_qkvz_group"] + self.sizes["delta_ba_group"] + self.sizes["delta_z_group"]
        return self.divided_heads(architecture) * of_head * (ranks - 1) / ranks

    def divided_heads(self, architecture: Architecture) -> int:
        return self.padded_heads(architecture.tensor_parallel) // architecture.tensor_parallel

    def saved_bytes(self, saving: Saving, *, core: bool) -> float:
        """Return the bytes of the projections, from which the backward pass computes all else, and of both inputs."""
        inputs, outputs = self.linear_layers(saving)
        saved = saving.hidden * saving.keeps_input(*_INPUTS) + inputs.outputs
        return saving.element_bytes * (saved + outputs.inputs * saving.keeps_input("out_proj"))

    def table_bytes(self, saving: Saving) -> int:
        return 0

    def backward_bytes(self, saving: Saving) -> float:
        """Return the bytes per token of what is recomputed, all in fp32 and with gradients.

        These are two passes of convolved values and gates, and for each value head five matrices of a chunk's tokens by its
        tokens, four of vectors, and the state at the end of each chunk. For full chunks the peak is a quarter less.
        """
        heads = self.divided_heads(saving.architecture)
        of_head = 5 * CHUNK + 4 * (self.key_dim + self.value_dim) + self.key_dim * self.value_dim / CHUNK
        return 2 * FP32 * heads * (2 * self.sizes["delta_qkvz_group"] + self.values_per_key * of_head)

    def linear_layers(self, saving: Saving) -> tuple[LinearLayer, ...]:
        heads, sizes = self.divided_heads(saving.architecture), self.sizes
        fused, value = heads * (sizes["delta_qkvz_group"] + sizes["delta_ba_group"]), heads * sizes["delta_z_group"]
        names = [hf_name for each in saving.architecture.family.mappings for hf_name in each.hf_names]
        inputs = tuple(name for name in _INPUTS if f"{_HF}{name}.weight" in names)
        return (
            LinearLayer(inputs, saving.hidden, fused, fused),
            LinearLayer(("out_proj",), value, saving.architecture.hidden_size, saving.hidden),
        )

    def padded_heads(self, tensor_parallel: int) -> int:
        """Return the number of key heads with padding: the next multiple of the tensor-parallel ranks."""
        return -(-self.key_heads // tensor_parallel) * tensor_parallel


_OTHERS = (
    _weight(
        "convolution",
        {"conv1d.weight": ("delta_qkv", 1, "delta_kernel")},
        Split.GROUPS,
        *((0, "delta_key"), (0, "delta_key"), (0, "delta_z_group")),
    ),
    _weight("decay_log", {"A_log": ("delta_heads",)}, Split.GROUPS, (0, "delta_heads_group")),
    _weight("step_bias", {"dt_bias": ("delta_heads",)}, Split.GROUPS, (0, "delta_heads_group")),
    _weight("norm", {"norm.weight": ("delta_value",)}, Split.REPLICATED),
    _weight("linear_out.weight", {"out_proj.weight": ("hidden", "delta_z")}, Split.GROUP_COLUMNS, (0, "delta_z_group")),
)
# for files in which the rows of a key head and its value heads stand together, with queries, keys, values and gates, then
# strengths and decays
BY_HEAD = (
    _weight(
        "linear_in.weight",
        {"in_proj_qkvz.weight": ("delta_qkvz", "hidden"), "in_proj_ba.weight": ("delta_ba", "hidden")},
        Split.GROUPS,
        *((0, "delta_qkvz_group"), (1, "delta_ba_group")),
    ),
    *_OTHERS,
)
# for files in which all queries stand before all keys, and so on
BY_KIND = (
    _weight(
        "linear_in.weight",
        {
            "in_proj_qkv.weight": ("delta_qkv", "hidden"),
            "in_proj_z.weight": ("delta_z", "hidden"),
            "in_proj_b.weight": ("delta_heads", "hidden"),
            "in_proj_a.weight": ("delta_heads", "hidden"),
        },
        Split.GROUPS,
        *((0, "delta_key"), (0, "delta_key"), (0, "delta_z_group"), (1, "delta_z_group")),
        *((2, "delta_heads_group"), (3, "delta_heads_group")),
    ),
    *_OTHERS,
)
