"""Ling 2.0 and Ring 2.0: experts as in GLM 4.5, and query, key and value in one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, cast

from nemo_kto.architecture.config_fields import ABSENT, Count, ModelFields, OrZero, PartCount, Positive, Switch
from nemo_kto.architecture.families.glm import GLM4_MOE
from nemo_kto.architecture.family import ExpertFields, with_required
from nemo_kto.architecture.mappings import renamed
from nemo_kto.mixers.param_mapping import Shape


class LingFields(ModelFields):
    use_qk_norm: Switch = ABSENT
    use_qkv_bias: Switch = ABSENT
    use_bias: Literal[False] = ABSENT
    num_experts: PartCount = ABSENT
    num_shared_experts: OrZero | None = None
    n_group: OrZero | None = None
    topk_group: OrZero | None = None
    first_k_dense_replace: OrZero | None = None
    moe_intermediate_size: Count = ABSENT
    norm_topk_prob: Switch | None = None
    routed_scaling_factor: Positive = ABSENT
    moe_shared_expert_intermediate_size: Count | None = None
    score_function: Literal["sigmoid"] = ABSENT
    moe_router_enable_expert_bias: Literal[True] = ABSENT


_REQUIRED = (
    "first_k_dense_replace", "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings",
    "moe_intermediate_size", "n_group", "num_attention_heads", "num_experts", "num_experts_per_tok", "num_hidden_layers",
    "num_key_value_heads", "num_shared_experts", "partial_rotary_factor", "rms_norm_eps", "rope_theta",
    "routed_scaling_factor", "topk_group", "use_qk_norm", "vocab_size",
)  # fmt: skip


def _renewed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with defaults of the published class; ValueError if the shared expert has a width of its own."""
    found = with_required(config, _REQUIRED)
    width, of_shared = found["moe_intermediate_size"], found.get("moe_shared_expert_intermediate_size")
    if of_shared not in (None, width):
        text = f"moe_shared_expert_intermediate_size must be moe_intermediate_size, {width}, got {of_shared}"
        raise ValueError(f"{text}; choose another model")
    if found.get("norm_topk_prob") is False:  # its code does not read it
        raise ValueError("norm_topk_prob must be true for bailing_moe, got false; choose another model")
    return {"use_qkv_bias": False, "norm_topk_prob": True, **found}


def _attention(ours: str, theirs: str, *shape: str) -> dict[str, dict[str, Shape]]:
    return {f"self_attention.{ours}": {f"attention.{theirs}": shape}}


_LAYER: dict[str, dict[str, Shape]] = {
    **_attention("linear_qkv.weight", "query_key_value.weight", "query_key_value", "hidden"),
    **_attention("linear_qkv.bias", "query_key_value.bias", "query_key_value"),
    **_attention("linear_proj.weight", "dense.weight", "hidden", "query"),
    **_attention("q_layernorm.weight", "query_layernorm.weight", "head"),
    **_attention("k_layernorm.weight", "key_layernorm.weight", "head"),
    "mlp.router.correction_bias": {"mlp.gate.expert_bias": ("experts",)},
}
_EMBEDDING = {"model.word_embeddings.weight": ("vocabulary", "hidden")}
LING = replace(
    GLM4_MOE,
    name="bailing_moe",
    hf_architecture="BailingMoeV2ForCausalLM",
    published="Ling 2.0 and Ring 2.0: mini, flash, 1T",
    aliases=("bailing_moe_v2",),
    config_type=GLM4_MOE.name,
    mappings=tuple(
        replace(each, hf_names=_EMBEDDING) if each.mcore_name.startswith("embedding.") else each
        for each in renamed(GLM4_MOE.mappings, _LAYER)
    ),
    fields=LingFields,
    flags={"qkv_bias": "use_qkv_bias", "qk_norm": "use_qk_norm"},
    module_names={"dense": "o_proj", "word_embeddings": "embed_tokens"},
    own=("score_function", "use_bias", "moe_router_enable_expert_bias", "moe_shared_expert_intermediate_size"),
    experts=replace(cast(ExpertFields, GLM4_MOE.experts), number="num_experts", shared_experts="num_shared_experts"),
    renewed=_renewed,
)
