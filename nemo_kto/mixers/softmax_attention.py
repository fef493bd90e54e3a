"""Softmax attention with grouped heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nemo_kto.layers.packing import HEAD_MULTIPLE, MAX_HEAD_DIM
from nemo_kto.mixers.mixer import FP32, AttentionWindow, LinearLayer, ModelSizes, Saving, SequenceMixer
from nemo_kto.mixers.param_mapping import HF, MCORE, ParamMapping, Shape, Split

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

_HF = HF + "self_attn."
_QKV = ("q_proj", "k_proj", "v_proj")


def _qkv(kind: str, *sizes: str) -> dict[str, Shape]:
    widths = zip(_QKV, ("query", "key_value", "key_value"), strict=True)
    return {f"{_HF}{name}.{kind}": (width, *sizes) for name, width in widths}


_KIND = "softmax attention"


def _weight(name: str, hf_names: dict[str, Shape], split: Split, flag: str = "") -> ParamMapping:
    mcore = f"{MCORE}self_attention.{name}"
    return ParamMapping(mcore_name=mcore, hf_names=hf_names, split=split, required_flag=flag, mixer=_KIND)


SINKS = _weight("core_attention.softmax_offset", {_HF + "sinks": ("heads",)}, Split.HEAD_NUMBERS)


def qk_norms(query: str, key: str) -> tuple[ParamMapping, ParamMapping]:
    """Return the norms of queries and keys with these widths: ``head``, or all heads together."""
    return (
        _weight("q_layernorm.weight", {_HF + "q_norm.weight": (query,)}, Split.REPLICATED),
        _weight("k_layernorm.weight", {_HF + "k_norm.weight": (key,)}, Split.REPLICATED),
    )


HEAD_NORMS = tuple(
    _weight(f"{part}_layernorm.weight", {f"{_HF}{part}_norm.weight": (heads, "head")}, Split.REPLICATED, "qk_norm")
    for part, heads in (("q", "heads"), ("k", "key_heads"))
)


NORMS_AFTER_ROPE = (
    _weight("core_attention.q_layernorm.weight", {_HF + "query_layernorm.weight": ("head",)}, Split.REPLICATED),
    _weight("core_attention.k_layernorm.weight", {_HF + "key_layernorm.weight": ("head",)}, Split.REPLICATED),
)
# of ``renamed``: the query projection has each query head followed by its gate
QUERY_AND_GATE: dict[str, dict[str, Shape]] = {
    f"self_attention.linear_qkv.{kind}": {
        f"self_attn.{name}.{kind}": (width, *sizes)
        for name, width in zip(_QKV, ("query_and_gate", "key_value", "key_value"), strict=True)
    }
    for kind, sizes in {"weight": ("hidden",), "bias": ()}.items()
}


WEIGHTS = (
    _weight("linear_qkv.weight", _qkv("weight", "hidden"), Split.QKV),
    _weight("linear_qkv.bias", _qkv("bias"), Split.QKV, "qkv_bias"),
    _weight("linear_proj.weight", {_HF + "o_proj.weight": ("hidden", "query")}, Split.HEADS),
    _weight("linear_proj.bias", {_HF + "o_proj.bias": ("hidden",)}, Split.REPLICATED, "output_bias"),
)


@dataclass(frozen=True, kw_only=True)
class SoftmaxAttention(SequenceMixer):
    """softmax(scale * q k^T) v, with the windows, soft caps, sinks, norms and gates of the architecture."""

    kind: ClassVar[str] = _KIND
    lora_inputs: ClassVar[tuple[str, ...]] = _QKV
    lora_outputs: ClassVar[tuple[str, ...]] = ("o_proj",)
    padded_with_heads: ClassVar[tuple[str, ...]] = (
        *(f"self_attention.linear_qkv.{name}" for name in ("weight", "bias", "lora_b", "lora_magnitude")),
        *("self_attention.linear_proj.weight", "self_attention.linear_proj.lora_a"),
        "self_attention.core_attention.softmax_offset",
    )

    def unsupported_by_te(self, architecture: ModelSizes) -> Mapping[str, bool]:
        return {
            "query and key norms over all heads": architecture.all_heads_norm,
            "a separate RoPE for sliding-window layers": architecture.local_rope is not None,
            "an attention factor for some layers or channels": architecture.rope.factor_in_table,
            "a soft cap on attention scores": architecture.attention_softcap is not None,
            "sinks in the softmax": architecture.sinks,
            "attention in chunks": architecture.family.chunked and any(architecture.windows),
            "interleaved RoPE": architecture.family.interleaved_rotary,
            "query and key norms after RoPE": architecture.rotated_norm or architecture.qk_norm_after_rope,
            "norms of values": architecture.value_norm,
            "clamped queries, keys and values": architecture.qkv_limit is not None,
            "attention temperature scaling": architecture.temperature is not None,
            "gated attention": architecture.output_gate,
            f"heads whose size is not a multiple of {HEAD_MULTIPLE}": architecture.head_dim % HEAD_MULTIPLE > 0,
            f"heads of more than {MAX_HEAD_DIM} values": architecture.head_dim > MAX_HEAD_DIM,
        }

    def products(self, architecture: ModelSizes) -> tuple[int, int]:
        heads, head = architecture.num_attention_heads, architecture.hidden_size * architecture.head_dim
        return head * (heads * (1 + architecture.output_gate) + 2 * architecture.num_query_groups), head * heads

    def pair_flops(self, architecture: ModelSizes, layer: int) -> tuple[AttentionWindow, int]:
        size = architecture.windows[layer]
        window = AttentionWindow(size, chunked=architecture.family.chunked and size is not None)
        return window, 4 * architecture.num_attention_heads * architecture.head_dim

    def head_dim_of(self, architecture: ModelSizes) -> int:
        return architecture.head_dim

    def context_values(self, architecture: ModelSizes, ranks: int) -> float:
        groups = max(1, architecture.padded_query_groups // architecture.tensor_parallel)
        return 2 * groups * architecture.head_dim * (ranks - 1)

    def saved_bytes(self, saving: Saving, *, core: bool) -> float:
        architecture, query, key_value = saving.architecture, _query(saving), _key_value(saving)
        heads = (architecture.padded_attention_heads + architecture.padded_query_groups) / architecture.tensor_parallel
        # otherwise the core attention saves its inputs: queries, and two views
        rotates_before = core or (saving.on_gpu and not architecture.unsupported_by_te)
        # attention in blocks does not save its output; the output projection saves it if it needs its input
        output = query * (not architecture.attends_in_blocks or saving.keeps_input("o_proj"))
        # the fused queries, keys and values, of which the values are a view, and the output
        saved: float = saving.element_bytes * (query + 2 * key_value + output)
        # rotated ones are tensors of their own, and so are normalised ones
        rotating = architecture.rotates.count(True) / architecture.num_layers
        changed = 1.0 if architecture.qk_norm else rotating
        # without RoPE the core attention saves a copy of the queries, if there are several groups
        copied = changed if rotating or key_value == architecture.head_dim else 1.0
        saved += saving.element_bytes * (query * copied + (key_value if rotates_before else 0) * changed)
        if saving.context_parallel > 1 and core and not saving.on_gpu:
            # queries, outputs, and the keys and values of all ranks; also the fused tensor if a norm saves views of it
            saved = saving.element_bytes * (query + output + 2 * saving.context_parallel * key_value)
            saved += saving.element_bytes * (query + 2 * key_value) * (architecture.qk_norm and saving.norms_in_few_passes)
        padding = saving.core_head_dim(architecture.head_dim) / architecture.head_dim
        repeats = saving.packed and saving.repeats_keys and query > key_value
        if core and (padding > 1 or repeats):
            # torch's kernel saves its own queries, keys, values and output, instead of the fused and the rotated ones
            widened = 2 * query + 2 * (query if repeats else key_value)
            saved = saving.element_bytes * (padding * widened + query * (padding > 1 and saving.keeps_input("o_proj")))
            # keys and gates, counted below, are views of the fused tensor
            saved += saving.element_bytes * (query + key_value) * (architecture.qk_norm or architecture.output_gate)
        if core:
            saved += 4 * architecture.padded_attention_heads / architecture.tensor_parallel  # log-sum-exp of each head
            joined = (saving.packed or saving.context_parallel > 1) and not saving.on_gpu
            keeps_joined = joined and not architecture.attends_in_blocks and saving.keeps_input("o_proj")
            saved += saving.element_bytes * query * keeps_joined
        if architecture.output_gate:  # the gates, a part of the fused tensor, their sigmoids in fp32, and the products
            saved += (saving.element_bytes * (1 + saving.keeps_input("o_proj")) + FP32) * query
        if core and architecture.rotated_norm:  # the input of the norm in fp32, and the root mean square of each head
            saved += rotating * FP32 * (query + key_value + heads)
        if core and architecture.value_norm:  # the output of the norm, its input in fp32, the root mean square of each head
            is_copied = saving.element_bytes < FP32
            saved += (saving.element_bytes + FP32 * is_copied) * key_value + FP32 * key_value / architecture.head_dim
            saved -= saving.element_bytes * (query + 2 * key_value) * norms_copy(saving)
        if core and architecture.qkv_limit is not None:  # before they are clamped
            saved += saving.element_bytes * (query + 2 * key_value)
        if architecture.all_heads_norm:  # queries, a view of the fused keys, and the root mean square of each
            saved += saving.element_bytes * query + 2 * FP32
        elif architecture.qk_norm and architecture.head_norms:
            # inputs in fp32, of which keys may be a view of the fused tensor; normalised; mean and deviation of each head
            saved += FP32 * (query + key_value * (saving.element_bytes < FP32) + 2 * heads)
            saved += FP32 * (query + key_value) * (saving.adapters is None)
        elif architecture.qk_norm:
            is_view = saving.norms_in_few_passes and not architecture.qk_norm_after_rope  # of the fused tensor
            keys = 0 if is_view else key_value
            saved += saving.norm(query + keys, trained=saving.adapters is None) + 4 * heads
        return saved + saving.element_bytes * saving.hidden * saving.keeps_input(*_QKV)

    def table_bytes(self, saving: Saving) -> int:
        """Return the bytes per position of the RoPE tables: cosines, and half as many sines."""
        architecture = saving.architecture
        pairs = sum(len(rope.frequencies) for rope in (architecture.rope, architecture.local_rope) if rope is not None)
        return 3 * (FP32 if architecture.family.interleaved_rotary else saving.element_bytes) * pairs

    def backward_bytes(self, saving: Saving) -> float:
        """Return the bytes per token of the scores of a block of queries in fp32, their gradients and two more tensors."""
        if not saving.architecture.attends_in_blocks:
            return 0
        from nemo_kto.layers.block_attention import QUERY_BLOCK

        heads = saving.architecture.padded_attention_heads / saving.architecture.tensor_parallel
        return 4 * FP32 * heads * QUERY_BLOCK

    def linear_layers(self, saving: Saving) -> tuple[LinearLayer, ...]:
        query = _query(saving)
        fused = query * (1 + saving.architecture.output_gate) + 2 * _key_value(saving)
        return (
            LinearLayer(_QKV, saving.hidden, fused, fused),
            LinearLayer(("o_proj",), query, saving.architecture.hidden_size, saving.hidden),
        )

    def specify(self, layer: ModuleSpec, architecture: ModelSizes, *, use_te: bool, share_prompts: bool) -> None:
        """Put this project's modules into the attention of a layer, or complete Transformer Engine's."""
        from megatron.core.transformer.identity_op import IdentityOp
        from megatron.core.transformer.spec_utils import ModuleSpec

        from nemo_kto.layers.attention import GatedAttention, TorchAttention, with_shared_prompts
        from nemo_kto.layers.mlp import with_bias
        from nemo_kto.layers.norm import AllHeadsNorm, HeadNorms, TorchNorm
        from nemo_kto.layers.rope_tables import RopeTable, TemperatureTable

        attention = layer.submodules.self_attention
        parts = attention.submodules
        if architecture.output_bias and not architecture.mlp_bias:
            parts.linear_proj = with_bias(parts.linear_proj)
        if use_te:
            if share_prompts:
                parts.core_attention = with_shared_prompts(parts.core_attention)
            return
        if architecture.output_gate:
            attention.module = GatedAttention
        local_rope, temperature = architecture.local_rope, architecture.temperature
        parts.core_attention = ModuleSpec(
            module=TorchAttention,
            params={
                "softcap": architecture.attention_softcap,
                "sinks": architecture.sinks,
                "chunked": architecture.family.chunked,
                "rope": RopeTable(rope=architecture.rope, interleaved=architecture.family.interleaved_rotary),
                "norm_after_rope": architecture.rotated_norm,
                "qk_norm_after_rope": architecture.qk_norm_after_rope,
                "temperature": None if temperature is None else TemperatureTable(temperature=temperature),
                "value_norm": architecture.value_norm,
                "qkv_limit": architecture.qkv_limit,
                "local_rope": None if local_rope is None else RopeTable(rope=local_rope),
            },
        )
        if architecture.all_heads_norm or (architecture.qk_norm and architecture.head_norms):
            norm = AllHeadsNorm if architecture.all_heads_norm else HeadNorms
            parts.q_layernorm, parts.k_layernorm = (
                ModuleSpec(module=norm, params={"heads": heads, "padded_heads": padded})
                for heads, padded in (
                    (architecture.num_attention_heads, architecture.padded_attention_heads),
                    (architecture.num_query_groups, architecture.padded_query_groups),
                )
            )
        elif architecture.qk_norm_after_rope:
            parts.q_layernorm = parts.k_layernorm = IdentityOp
        elif architecture.qk_norm:
            parts.q_layernorm = parts.k_layernorm = TorchNorm


def norms_copy(saving: Saving) -> bool:
    """Return whether norms save fp32 copies of parts of the fused tensor, which is not kept if values have a norm too."""
    return not saving.on_gpu and saving.element_bytes < FP32


def _query(saving: Saving) -> int:
    """Return the query values per token on a rank."""
    architecture = saving.architecture
    return architecture.padded_attention_heads * architecture.head_dim // architecture.tensor_parallel


def _key_value(saving: Saving) -> int:
    """Return the values of the keys per token on a rank, as many as those of the values."""
    architecture = saving.architecture
    return max(1, architecture.padded_query_groups // architecture.tensor_parallel) * architecture.head_dim


SOFTMAX_ATTENTION = SoftmaxAttention()
