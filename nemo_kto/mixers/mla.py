"""Multi-head latent attention: queries, keys and values are projected from latents (DeepSeek-AI 2024, arXiv 2405.04434)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from nemo_kto.layers.packing import HEAD_MULTIPLE
from nemo_kto.mixers.mixer import FP32, AttentionWindow, LinearLayer, ModelSizes, Saving, SequenceMixer, round_up
from nemo_kto.mixers.param_mapping import HF, MCORE, ParamMapping, Shape, Split
from nemo_kto.utils import lazy_import

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import ModuleSpec
    from torch import Tensor

    from nemo_kto.layers.attention import PackedSequences, TorchAttention
    from nemo_kto.layers.mixer_module import MixerModule
    from nemo_kto.layers.rope_tables import RopeTable, TemperatureTable
else:
    torch, F = lazy_import("torch"), lazy_import("torch.nn.functional")

_NORM_EPSILON = 1e-6  # of the norms of latents, to which rms_norm_eps does not apply
# kinds of mixers, by whether queries are projected from latents or from hidden states
_COMPRESSED, _DIRECT = "latent attention", "latent attention with direct queries"


def _weight(name: str, hf_name: str, shape: Shape, split: Split, *, head: str = "", kind: str = "") -> ParamMapping:
    """Return the mapping of a weight; ``head`` is the size of a head in it."""
    return ParamMapping(
        mcore_name=f"{MCORE}self_attention.{name}.weight",
        hf_names={f"{HF}self_attn.{hf_name}.weight": shape},
        split=split,
        mixer=kind,
        groups="heads",
        parts=((0, head),) if head else (),
    )


WEIGHTS = (
    _weight("linear_q_down_proj", "q_a_proj", ("query_latent", "hidden"), Split.REPLICATED, kind=_COMPRESSED),
    _weight("q_layernorm", "q_a_layernorm", ("query_latent",), Split.REPLICATED, kind=_COMPRESSED),
    _weight(
        "linear_q_up_proj",
        "q_b_proj",
        ("latent_queries", "query_latent"),
        Split.GROUPS,
        head="latent_query",
        kind=_COMPRESSED,
    ),
    _weight("linear_q_proj", "q_proj", ("latent_queries", "hidden"), Split.GROUPS, head="latent_query", kind=_DIRECT),
    _weight("linear_kv_down_proj", "kv_a_proj_with_mqa", ("key_value_latent_and_rope", "hidden"), Split.REPLICATED),
    _weight("kv_layernorm", "kv_a_layernorm", ("key_value_latent",), Split.REPLICATED),
    _weight(
        "linear_kv_up_proj", "kv_b_proj", ("latent_keys_values", "key_value_latent"), Split.GROUPS, head="latent_key_value"
    ),
    _weight("linear_proj", "o_proj", ("hidden", "latent_values"), Split.GROUP_COLUMNS, head="latent_value"),
)


@dataclass(frozen=True, kw_only=True)
class LatentAttention(SequenceMixer):
    """Softmax attention whose keys and values are projected from one latent per token, and mostly queries from another.

    RoPE rotates a part of each query, and one key part that all heads share. Values may have another size than keys; the
    narrower ones are padded with zeros, because torch's fused kernels require equal sizes.
    """

    lora_inputs: ClassVar[tuple[str, ...]] = ("q_a_proj", "q_b_proj", "q_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    lora_outputs: ClassVar[tuple[str, ...]] = ("o_proj",)
    padded_with_heads: ClassVar[tuple[str, ...]] = (
        *(
            f"self_attention.{name}.{kind}"
            for name in ("linear_q_up_proj", "linear_q_proj", "linear_kv_up_proj")
            for kind in ("weight", "lora_b", "lora_magnitude")
        ),
        "self_attention.linear_proj.weight",
        "self_attention.linear_proj.lora_a",
    )

    heads: int
    query_rank: int | None  # size of the latent of queries; None: they are projected from the hidden state
    key_value_rank: int
    plain_dim: int  # channels of a head's query and key that do not rotate
    rotated_dim: int
    value_dim: int  # of a head
    interleaved: bool  # neighbouring channels are rotated together, not channels half of the rotated ones apart

    @property
    def kind(self) -> str:
        return _DIRECT if self.query_rank is None else _COMPRESSED

    @property
    def query_dim(self) -> int:
        """Size of a head's query and key."""
        return self.plain_dim + self.rotated_dim

    @property
    def head_dim(self) -> int:
        """Size of a head's query, key and value in the core attention, of which the narrower ones are padded."""
        return max(self.query_dim, self.value_dim)

    @property
    def sizes(self) -> dict[str, int]:
        key_value = self.plain_dim + self.value_dim
        return {
            "latent_query": self.query_dim,
            "latent_key_value": key_value,
            "latent_value": self.value_dim,
            "latent_queries": self.heads * self.query_dim,
            "latent_keys_values": self.heads * key_value,
            "latent_values": self.heads * self.value_dim,
            "query_latent": self.query_rank or 0,
            "key_value_latent": self.key_value_rank,
            "key_value_latent_and_rope": self.key_value_rank + self.rotated_dim,
        }

    def unsupported_by_te(self, architecture: ModelSizes) -> Mapping[str, bool]:
        return {"latent attention": True}

    def products(self, architecture: ModelSizes) -> tuple[int, int]:
        hidden, sizes = architecture.hidden_size, self.sizes
        queries = sizes["latent_queries"] * (self.query_rank or hidden) + hidden * sizes["query_latent"]
        keys_values = hidden * sizes["key_value_latent_and_rope"] + sizes["latent_keys_values"] * self.key_value_rank
        return queries + keys_values, hidden * sizes["latent_values"]

    def pair_flops(self, architecture: ModelSizes, layer: int) -> tuple[AttentionWindow, int]:
        return AttentionWindow(None), 2 * self.heads * (self.query_dim + self.value_dim)

    def head_dim_of(self, architecture: ModelSizes) -> int:
        return self.head_dim

    def context_values(self, architecture: ModelSizes, ranks: int) -> float:
        return 2 * self._heads(architecture) * self.head_dim * (ranks - 1)

    def saved_bytes(self, saving: Saving, *, core: bool) -> float:
        heads, head_dim = self._heads(saving.architecture), saving.core_head_dim(self.head_dim)
        is_padded = head_dim > self.value_dim
        share = saving.hidden / saving.architecture.hidden_size  # of a token's latents
        ranks = (self.query_rank or 0) + self.key_value_rank
        # latents, their norms, and the hidden state
        saved = saving.norm(share * ranks, trained=saving.adapters is None) + FP32 * share * (1 + bool(self.query_rank))
        values = share * self.rotated_dim  # on the fused latent of keys and values, of which its norm saves a view
        values += share * (self.query_rank or 0) * saving.keeps_input("q_b_proj")
        values += share * self.key_value_rank * saving.keeps_input("kv_b_proj")
        values += saving.hidden * saving.keeps_input("q_a_proj", "q_proj", "kv_a_proj_with_mqa")
        # queries and keys; values, a view of their projection unless they are copied; outputs
        keeps_output, joined = saving.keeps_input("o_proj"), saving.packed or saving.context_parallel > 1
        if not core:
            values += heads * (2 * self.query_dim + self.plain_dim + self.value_dim + self.value_dim * keeps_output)
            return saved + saving.element_bytes * values
        is_copied = is_padded or self.plain_dim % HEAD_MULTIPLE > 0
        value = head_dim if is_copied else self.plain_dim + self.value_dim
        if saving.context_parallel > 1 and not saving.on_gpu:  # keys and values of all ranks
            values += heads * self.head_dim * 2 * saving.context_parallel
        else:
            values += heads * (head_dim + value)
        values += heads * 2 * head_dim
        # outputs without padding are another tensor, and so are joined ones
        values += heads * self.value_dim * (keeps_output and (is_padded or (joined and not saving.on_gpu)))
        return saved + saving.element_bytes * values + FP32 * heads  # log-sum-exp of each head

    def table_bytes(self, saving: Saving) -> int:
        return 3 * (FP32 if self.interleaved else saving.element_bytes) * self.rotated_dim // 2

    def backward_bytes(self, saving: Saving) -> float:
        """Return the bytes per token of the gradients of queries, keys, values and outputs."""
        return saving.element_bytes * 4 * self._heads(saving.architecture) * saving.core_head_dim(self.head_dim)

    def linear_layers(self, saving: Saving) -> tuple[LinearLayer, ...]:
        heads, hidden = self._heads(saving.architecture), saving.architecture.hidden_size
        share = saving.hidden / hidden
        queries, latent = heads * self.query_dim, self.sizes["key_value_latent_and_rope"]
        keys_values, values = heads * self.sizes["latent_key_value"], heads * self.value_dim
        of_queries = [LinearLayer(("q_proj",), saving.hidden, queries, queries)]
        if (rank := self.query_rank) is not None:
            of_queries = [
                LinearLayer(("q_a_proj",), saving.hidden, rank, share * rank),
                LinearLayer(("q_b_proj",), share * rank, queries, queries),
            ]
        return (
            *of_queries,
            LinearLayer(("kv_a_proj_with_mqa",), saving.hidden, latent, share * latent),
            LinearLayer(("kv_b_proj",), share * self.key_value_rank, keys_values, keys_values),
            LinearLayer(("o_proj",), values, hidden, saving.hidden),
        )

    def specify(self, layer: ModuleSpec, architecture: ModelSizes, *, use_te: bool, share_prompts: bool) -> None:
        from megatron.core.transformer.spec_utils import ModuleSpec

        from nemo_kto.layers.mixer_module import MixerModule
        from nemo_kto.layers.rope_tables import RopeTable, TemperatureTable

        temperature = architecture.temperature
        if temperature is not None:  # the core attention, which scales the queries, has no RoPE
            temperature = replace(temperature, with_rope=False)
        params = {
            "mixer": self,
            "rope": RopeTable(rope=architecture.rope, interleaved=self.interleaved),
            "temperature": None if temperature is None else TemperatureTable(temperature=temperature),
        }
        layer.submodules.self_attention = ModuleSpec(module=MixerModule, params=params)

    def build(
        self,
        module: MixerModule,
        *,
        rope: RopeTable,
        temperature: TemperatureTable | None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: object,  # those of attention
    ) -> None:
        """Add the projections, norms and core attention.

        Every rank has the whole projections to latents, and those from latents to its heads. With sequence parallelism a
        rank projects and normalises the latents of its part of the sequence.
        """
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer.enums import AttnMaskType

        from nemo_kto.layers.attention import TorchAttention
        from nemo_kto.layers.mixer_module import ReplicatedLinear
        from nemo_kto.layers.norm import TorchNorm

        config, sizes = module.config, self.sizes
        heads, hidden = self.padded_heads(config.tensor_model_parallel_size), config.hidden_size
        linear: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False}
        to_heads = {"gather_output": False, **linear}
        module.rope = rope
        if self.query_rank is None:
            module.linear_q_proj = ColumnParallelLinear(hidden, heads * self.query_dim, **to_heads)
        else:
            module.linear_q_down_proj = ReplicatedLinear(hidden, self.query_rank, config=config)
            module.q_layernorm = TorchNorm(config, self.query_rank, eps=_NORM_EPSILON)
            module.linear_q_up_proj = ColumnParallelLinear(self.query_rank, heads * self.query_dim, **to_heads)
        module.linear_kv_down_proj = ReplicatedLinear(hidden, sizes["key_value_latent_and_rope"], config=config)
        module.kv_layernorm = TorchNorm(config, self.key_value_rank, eps=_NORM_EPSILON)
        module.linear_kv_up_proj = ColumnParallelLinear(self.key_value_rank, heads * sizes["latent_key_value"], **to_heads)
        module.core_attention = TorchAttention(
            config,
            module.layer_number,
            AttnMaskType.causal,
            "self",
            softmax_scale=config.softmax_scale,
            pg_collection=pg_collection,
            temperature=temperature,
        )
        module.linear_proj = RowParallelLinear(
            heads * self.value_dim, hidden, input_is_parallel=True, skip_bias_add=True, **linear
        )

    def mix(self, module: MixerModule, hidden_sbH: Tensor, packed: PackedSequences | None) -> Tensor:
        """Attend over [sequence, batch, hidden], of packed sequences with batch 1."""
        from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

        if self.query_rank is None:
            queries = module.linear_q_proj(hidden_sbH)[0]
        else:
            queries = module.linear_q_up_proj(module.q_layernorm(module.linear_q_down_proj(hidden_sbH)[0]))[0]
        latent, key_rope = module.linear_kv_down_proj(hidden_sbH)[0].split([self.key_value_rank, self.rotated_dim], -1)
        keys_values = module.linear_kv_up_proj(module.kv_layernorm(latent))[0]
        # the rotated part of the keys serves the heads of all ranks, so that its gradient is summed over them
        if module.config.sequence_parallel:
            key_rope = gather_from_sequence_parallel_region(key_rope)
        else:
            key_rope = copy_to_tensor_model_parallel_region(key_rope)
        key_rope = module.core_attention.rotate(module.rope, key_rope.unsqueeze(2), packed)
        query, query_rope = _split(queries, self.plain_dim, self.rotated_dim)
        key, value = _split(keys_values, self.plain_dim, self.value_dim)
        query = torch.cat((query, module.core_attention.rotate(module.rope, query_rope, packed)), -1)
        key = torch.cat((key, key_rope.expand(-1, -1, key.size(2), -1)), -1)
        mixed_sbX = module.attend(self._attend, module.core_attention, query, key, value, packed)
        output: Tensor = module.linear_proj(mixed_sbX)[0]
        return output

    def _attend(
        self, attention: TorchAttention, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences | None
    ) -> Tensor:
        """Return the values that the heads of this rank attend to, [sequence, batch, heads * size of a value]."""
        size = self.head_dim
        if self.plain_dim % HEAD_MULTIPLE:  # kernels on GPUs cannot read values that begin there, after the keys
            value = value.contiguous()
        parts = [each if each.size(-1) == size else F.pad(each, (0, size - each.size(-1))) for each in (query, key, value)]
        if packed is not None:
            parts = [each.squeeze(1) for each in parts]
        mixed = attention(*parts, None, packed_seq_params=packed).unflatten(-1, (-1, size))
        mixed = mixed[..., : self.value_dim].flatten(-2)
        return mixed if packed is None else mixed.unsqueeze(1)

    def padded_heads(self, tensor_parallel: int) -> int:
        """Return the number of heads, rounded up to a multiple of the tensor-parallel size."""
        return round_up(self.heads, tensor_parallel)

    def _heads(self, architecture: ModelSizes) -> int:
        return self.padded_heads(architecture.tensor_parallel) // architecture.tensor_parallel


def _split(heads_sbX: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Return the parts of each head, [sequence, batch, heads of this rank, size]."""
    return heads_sbX.unflatten(-1, (-1, sum(sizes))).split([*sizes], -1)
