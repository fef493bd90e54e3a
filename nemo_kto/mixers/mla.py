"""Multi-head latent attention: queries, keys and values are projected from latents (DeepSeek-AI 2024, arXiv 2405.04434)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nemo_kto.mixers.mixer import AttentionWindow, LinearLayer, SequenceMixer
from nemo_kto.mixers.param_mapping import HF, MCORE, ParamMapping, Shape, Split
from nemo_kto.mixers.saving import FP32, HEAD_MULTIPLE, Saving

if TYPE_CHECKING:
    from nemo_kto.architecture.architecture import Architecture

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
        "linear_kv_up_proj",
        "kv_b_proj",
        ("latent_keys_values", "key_value_latent"),
        Split.GROUPS,
        head="latent_key_value",
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
        of_head = {
            "latent_query": self.query_dim,
            "latent_key_value": self.plain_dim + self.value_dim,
            "latent_value": self.value_dim,
        }
        return {
            **of_head,
            "latent_queries": self.heads * of_head["latent_query"],
            "latent_keys_values": self.heads * of_head["latent_key_value"],
            "latent_values": self.heads * of_head["latent_value"],
            "query_latent": self.query_rank or 0,
            "key_value_latent": self.key_value_rank,
            "key_value_latent_and_rope": self.key_value_rank + self.rotated_dim,
        }

    def unsupported_by_te(self, architecture: Architecture) -> Mapping[str, bool]:
        return {"latent attention": True}

    def products(self, architecture: Architecture) -> tuple[int, int]:
        hidden, sizes = architecture.hidden_size, self.sizes
        queries = sizes["latent_queries"] * (self.query_rank or hidden) + hidden * sizes["query_latent"]
        keys_values = hidden * sizes["key_value_latent_and_rope"] + sizes["latent_keys_values"] * self.key_value_rank
        return queries + keys_values, hidden * sizes["latent_values"]

    def pair_flops(self, architecture: Architecture, layer: int) -> tuple[AttentionWindow, int]:
        return AttentionWindow(None), 2 * self.heads * (self.query_dim + self.value_dim)

    def head_dim_of(self, architecture: Architecture) -> int:
        return self.head_dim

    def context_values(self, architecture: Architecture, ranks: int) -> float:
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

    def padded_heads(self, tensor_parallel: int) -> int:
        """Return the number of heads with padding: the next multiple of the tensor-parallel ranks."""
        return -(-self.heads // tensor_parallel) * tensor_parallel

    def _heads(self, architecture: Architecture) -> int:
        """Return the number of heads on a rank."""
        return self.padded_heads(architecture.tensor_parallel) // architecture.tensor_parallel
