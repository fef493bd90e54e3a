"""MiniMax M3: experts beside a shared one, a clamped SwiGLU, and attention to blocks of keys that an indexer chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from nemo_kto.architecture.config_fields import ABSENT, STRICT, Count, Flags, ModelFields, Positive
from nemo_kto.architecture.families.llama import MINIMAX_M2, MIXTRAL
from nemo_kto.architecture.family import ExpertFields, with_required
from nemo_kto.architecture.mappings import LLAVA, MTP_LAYERS, correction_bias, shared_expert
from nemo_kto.mixers.softmax_attention import qk_norms


class SparseAttentionFields(BaseModel):
    model_config = STRICT

    sparse_topk_blocks: Count = ABSENT
    sparse_block_size: Count = ABSENT


class MiniMaxM3Fields(ModelFields):
    """Fields of config.json; those with one value describe parts that no published model has otherwise."""

    rotary_dim: Count = ABSENT
    dense_intermediate_size: Count = ABSENT
    shared_intermediate_size: Count = ABSENT
    routed_scaling_factor: Positive = ABSENT
    moe_layer_freq: Flags = ABSENT
    mlp_layer_types: list[Literal["dense", "sparse"]] | None = None
    swiglu_alpha: Positive = ABSENT
    swiglu_limit: Positive = ABSENT
    sparse_attention_config: Annotated[SparseAttentionFields | None, Field(description="an object")] = None
    index_topk_blocks: Count = ABSENT
    index_block_size: Count = ABSENT
    index_topk: Count = ABSENT
    n_shared_experts: Literal[1] = ABSENT
    use_gemma_norm: Literal[True] = ABSENT
    use_qk_norm: Literal[True] = ABSENT
    use_routing_bias: Literal[True] = ABSENT
    attention_output_gate: Literal[False] = ABSENT
    scoring_func: Literal["sigmoid"] = ABSENT
    qk_norm_type: Literal["per_head"] = ABSENT


# flat name in newer files, name in ``sparse_attention_config``, default of transformers
_CHOSEN = (("index_topk_blocks", "sparse_topk_blocks", 16), ("index_block_size", "sparse_block_size", 128))
_FIXED = (
    "n_shared_experts", "use_gemma_norm", "use_qk_norm", "use_routing_bias", "attention_output_gate", "scoring_func",
    "qk_norm_type",
)  # fmt: skip


_REQUIRED = (
    "dense_intermediate_size", "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings",
    "num_attention_heads", "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads", "num_local_experts",
    "rms_norm_eps", "rope_theta", "routed_scaling_factor", "shared_intermediate_size", "swiglu_alpha", "swiglu_limit",
    "vocab_size",
)  # fmt: skip


def _renewed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with the kind of each MLP, the rotated part of a head, and the number of chosen keys."""
    found, sparse = dict(config), config.get("sparse_attention_config")
    if isinstance(freq := config.get("moe_layer_freq"), list):
        found.setdefault("mlp_layer_types", ["sparse" if each else "dense" for each in freq])
    rotated, head, factor = config.get("rotary_dim"), config.get("head_dim", 128), config.get("partial_rotary_factor")
    if isinstance(rotated, int) and isinstance(head, int) and head and not config.get("rope_parameters"):
        if isinstance(factor, int | float) and abs(factor * head - rotated) >= 1:
            text = f"rotary_dim must be partial_rotary_factor * head_dim, {factor} * {head}, got {rotated}"
            raise ValueError(f"{text}; correct one")
        found["partial_rotary_factor"] = rotated / head if factor is None else factor
    nested = sparse if isinstance(sparse, dict) else {}
    blocks, size = (nested.get(old, config.get(new, default)) for new, old, default in _CHOSEN)
    if type(blocks) is int and type(size) is int:  # others are refused by their types
        found["index_topk"] = blocks * size
    if config.get("hidden_act") == "swigluoai":
        found["hidden_act"] = "silu"
    return found


_INDEXERS = {"indexers": r"{model}layers\.(?!{layers}\.)\d+\.self_attn\.index(er\.|_)"}
MINIMAX_M3_TEXT = replace(
    MINIMAX_M2,
    name="minimax_m3",
    hf_architecture="MiniMaxM3ForCausalLM",
    published="MiniMax-M3 without image input",
    config_type="minimax_m3_vl_text",
    mappings=(
        *MIXTRAL.mappings,
        *shared_expert("block_sparse_moe.shared_experts"),
        *qk_norms("head", "head"),
        correction_bias("block_sparse_moe.e_score_correction_bias", "experts"),
    ),
    fields=MiniMaxM3Fields,
    flags={"qk_norm": True, "zero_centered_norm": True},
    numbers={"swiglu_alpha": "swiglu_alpha", "swiglu_limit": "swiglu_limit"},
    own=(
        *("rotary_dim", "moe_layer_freq", "sparse_attention_config", *_FIXED),
        *(name for new, old, _ in _CHOSEN for name in (new, f"sparse_attention_config.{old}")),
    ),
    unadapted=("mlp.",),
    joined_linear={"mlp.gate_up_proj": 2, "mlp.shared_experts.gate_up_proj": 2, "mlp.shared_experts.down_proj": 1},
    chosen_keys="index_topk",
    dense_width="dense_intermediate_size",
    experts=ExpertFields(
        layer_kinds="mlp_layer_types",
        shared_ffn_hidden_size="shared_intermediate_size",
        shared_gate=False,
        scale="routed_scaling_factor",
        sigmoid=True,
        correction=(-1,),
    ),
    untrained={**_INDEXERS, **MTP_LAYERS},
    renewed=lambda config: _renewed(with_required(config, _REQUIRED)),
)
MINIMAX_M3 = replace(
    MINIMAX_M3_TEXT,
    name="minimax_m3_vl",
    hf_architecture="MiniMaxM3SparseForConditionalGeneration",
    published="MiniMax-M3",
    text_type="minimax_m3_vl_text",
    config_type="",
    aliases=("minimax_m3",),
    ties_in_either=True,
    renewed=_renewed,
    **{
        **LLAVA,
        "untrained": {
            "vision tower": r"(model\.)?vision_tower\.",
            "projector": r"(model\.)?(multi_modal_projector|patch_merge_mlp)\.",
            **MINIMAX_M3_TEXT.untrained,
        },
    },
)
