"""Softmax attention over all tokens with heads of their own size, whose values are the keys (Gemma 4, Google 2026)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from nemo_kto.mixers.mixer import AttentionWindow, LinearLayer, ModelSizes, Saving, SequenceMixer, round_up
from nemo_kto.mixers.param_mapping import HF, MCORE, ParamMapping, Shape, Split
from nemo_kto.mixers.softmax_attention import SOFTMAX_ATTENTION, norms_copy

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import ModuleSpec
    from torch import Tensor

    from nemo_kto.layers.attention import PackedSequences
    from nemo_kto.layers.mixer_module import MixerModule
    from nemo_kto.layers.rope_tables import RopeTable

_KIND = "global attention"


def _weight(name: str, hf_names: dict[str, Shape], split: Split, *parts: str) -> ParamMapping:
    return ParamMapping(
        mcore_name=f"{MCORE}self_attention.{name}.weight",
        hf_names={f"{HF}self_attn.{theirs}.weight": shape for theirs, shape in hf_names.items()},
        split=split,
        mixer=_KIND,
        groups="global_groups",
        parts=tuple(enumerate(parts)),
    )


WEIGHTS = (
    _weight(
        "linear_qk",
        {"q_proj": ("global_query", "hidden"), "k_proj": ("global_key", "hidden")},
        Split.GROUPS,
        "global_group_query",
        "global_head",
    ),
    _weight("full_q_layernorm", {"q_norm": ("global_head",)}, Split.REPLICATED),
    _weight("full_k_layernorm", {"k_norm": ("global_head",)}, Split.REPLICATED),
    _weight("linear_out", {"o_proj": ("hidden", "global_query")}, Split.GROUP_COLUMNS, "global_group_query"),
)


@dataclass(frozen=True, kw_only=True)
class GlobalAttention(SequenceMixer):
    """softmax(q k^T) v without a window; k is the projected key with its norm and RoPE, v the same key with another norm."""

    kind: ClassVar[str] = _KIND
    lora_inputs: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj")
    lora_outputs: ClassVar[tuple[str, ...]] = ("o_proj",)
    padded_with_heads: ClassVar[tuple[str, ...]] = (
        *(f"self_attention.linear_qk.{name}" for name in ("weight", "lora_b", "lora_magnitude")),
        *(f"self_attention.linear_out.{name}" for name in ("weight", "lora_a")),
    )

    heads: int
    groups: int  # number of keys of a token
    head_dim: int

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "global_groups": self.groups,
            "global_head": self.head_dim,
            "global_group_query": self.heads // self.groups * self.head_dim,
            "global_query": self.heads * self.head_dim,
            "global_key": self.groups * self.head_dim,
        }

    def unsupported_by_te(self, architecture: ModelSizes) -> Mapping[str, bool]:
        return {"heads of several sizes": True}

    def products(self, architecture: ModelSizes) -> tuple[int, int]:
        hidden, sizes = architecture.hidden_size, self.sizes
        return hidden * (sizes["global_query"] + sizes["global_key"]), hidden * sizes["global_query"]

    def pair_flops(self, architecture: ModelSizes, layer: int) -> tuple[AttentionWindow, int]:
        return AttentionWindow(None), 4 * self.heads * self.head_dim

    def head_dim_of(self, architecture: ModelSizes) -> int:
        return self.head_dim

    def context_values(self, architecture: ModelSizes, ranks: int) -> float:
        return SOFTMAX_ATTENTION.context_values(self._sizes(architecture), ranks)

    def saved_bytes(self, saving: Saving, *, core: bool) -> float:
        """Return those of softmax attention, without the projected values."""
        saved = SOFTMAX_ATTENTION.saved_bytes(replace(saving, architecture=self._sizes(saving.architecture)), core=core)
        if core and norms_copy(saving):
            return saved
        return (
            saved
            - saving.element_bytes * self.head_dim * self._groups(saving.architecture) / saving.architecture.tensor_parallel
        )

    def backward_bytes(self, saving: Saving) -> float:
        return SOFTMAX_ATTENTION.backward_bytes(replace(saving, architecture=self._sizes(saving.architecture)))

    def linear_layers(self, saving: Saving) -> tuple[LinearLayer, ...]:
        groups = self._groups(saving.architecture) / saving.architecture.tensor_parallel
        query, key = groups * self.sizes["global_group_query"], groups * self.head_dim
        return (
            LinearLayer(self.lora_inputs, saving.hidden, query + key, query + key),
            LinearLayer(self.lora_outputs, query, saving.architecture.hidden_size, saving.hidden),
        )

    def specify(self, layer: ModuleSpec, architecture: ModelSizes, *, use_te: bool, share_prompts: bool) -> None:
        from megatron.core.transformer.spec_utils import ModuleSpec

        from nemo_kto.layers.mixer_module import MixerModule
        from nemo_kto.layers.rope_tables import RopeTable

        params = {"mixer": self, "rope": RopeTable(rope=architecture.rope)}
        layer.submodules.self_attention = ModuleSpec(module=MixerModule, params=params)

    def build(
        self,
        module: MixerModule,
        *,
        rope: RopeTable,
        pg_collection: ProcessGroupCollection | None = None,
        **_: object,  # those of attention
    ) -> None:
        """Add the projections, norms and core attention."""
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer.enums import AttnMaskType

        from nemo_kto.layers.attention import TorchAttention
        from nemo_kto.layers.norm import TorchNorm

        config, sizes = module.config, self.sizes
        groups, query, hidden = (
            round_up(self.groups, config.tensor_model_parallel_size),
            sizes["global_group_query"],
            config.hidden_size,
        )
        linear: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False}
        module.linear_qk = ColumnParallelLinear(hidden, groups * (query + self.head_dim), gather_output=False, **linear)
        module.full_q_layernorm, module.full_k_layernorm = (
            TorchNorm(config, self.head_dim, eps=config.layernorm_epsilon) for _ in range(2)
        )
        module.core_attention = TorchAttention(
            config,
            module.layer_number,
            AttnMaskType.causal,
            "self",
            softmax_scale=config.softmax_scale,
            pg_collection=pg_collection,
            rope=rope,
            value_norm=True,
        )
        module.linear_out = RowParallelLinear(groups * query, hidden, input_is_parallel=True, skip_bias_add=True, **linear)

    def mix(self, module: MixerModule, hidden_sbH: Tensor, packed: PackedSequences | None) -> Tensor:
        """Attend over [sequence, batch, hidden], of packed sequences with batch 1."""
        projected_sbgX = module.linear_qk(hidden_sbH)[0].unflatten(
            -1, (-1, self.sizes["global_group_query"] + self.head_dim)
        )
        query, key = projected_sbgX.split([self.sizes["global_group_query"], self.head_dim], -1)
        query = module.full_q_layernorm(query.unflatten(-1, (-1, self.head_dim)).flatten(2, 3))
        parts = [query, module.full_k_layernorm(key), key]
        if packed is not None:
            parts = [each.squeeze(1) for each in parts]
        mixed = module.attend(module.core_attention, *parts, None, packed_seq_params=packed)
        output: Tensor = module.linear_out(mixed if packed is None else mixed.unsqueeze(1))[0]
        return output

    def _groups(self, architecture: ModelSizes) -> int:
        """Return the number of keys of a token, rounded up to a multiple of the tensor-parallel size."""
        return round_up(self.groups, architecture.tensor_parallel)

    def _sizes(self, architecture: ModelSizes) -> ModelSizes:
        """Return the sizes of a model whose softmax attention has these heads."""
        groups = self._groups(architecture)
        heads = self.heads // self.groups * groups
        return replace(architecture, num_attention_heads=heads, num_query_groups=groups, head_dim=self.head_dim)
