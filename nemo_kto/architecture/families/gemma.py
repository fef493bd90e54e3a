"""Gemma 1 to 4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import Field

from nemo_kto.architecture.config_fields import ABSENT, Count, ModelFields, OrZero, Positive, Switch
from nemo_kto.architecture.family import SLIDING_LAYERS, ExpertFields, Family, check_constants
from nemo_kto.architecture.mappings import DENSE, EXPERT, LLAVA, POST_NORMS, renamed, shared_expert, sparse, with_experts
from nemo_kto.mixers import SOFTMAX_ATTENTION, GlobalAttention, SequenceMixer
from nemo_kto.mixers.global_attention import WEIGHTS
from nemo_kto.mixers.param_mapping import MCORE, Layers, Split, replicated
from nemo_kto.mixers.softmax_attention import qk_norms

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class GemmaFields(ModelFields):
    query_pre_attn_scalar: Positive = ABSENT


def _with_tanh(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with the activation that older files name gelu."""
    return {**config, "hidden_act": "gelu_pytorch_tanh"} if config.get("hidden_act") == "gelu" else dict(config)


_BIASES = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
GEMMA = Family(
    name="gemma",
    hf_architecture="GemmaForCausalLM",
    published="Gemma 2B, 7B, CodeGemma",
    mappings=DENSE,
    flags={**_BIASES, "zero_centered_norm": True, "scaled_embedding": True},
    activation=("hidden_act", "gelu_pytorch_tanh"),
    own_head_dim=True,
    renewed=_with_tanh,
)
_NORMS = {"pre_mlp_layernorm.weight": {"pre_feedforward_layernorm.weight": ("hidden",)}}
# norms before and after attention and MLP, soft caps on scores and logits, a sliding window in every second layer
GEMMA2 = Family(
    name="gemma2",
    hf_architecture="Gemma2ForCausalLM",
    published="Gemma 2",
    mappings=POST_NORMS + renamed(DENSE, _NORMS),
    fields=GemmaFields,
    flags={**GEMMA.flags, "post_norm": True},
    numbers={
        "query_pre_attn_scalar": "query_pre_attn_scalar",
        "attention_softcap": "attn_logit_softcapping",
        "logit_softcap": "final_logit_softcapping",
    },
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    window=SLIDING_LAYERS,
    own_head_dim=True,
)
# no cap on the scores, query and key norms, and a separate RoPE for sliding-window layers
GEMMA3 = replace(
    GEMMA2,
    name="gemma3_text",
    hf_architecture="Gemma3ForCausalLM",
    published="Gemma 3 270M, 1B",
    mappings=GEMMA2.mappings + qk_norms("head", "head"),
    flags={**GEMMA2.flags, "qk_norm": True},
    numbers={name: theirs for name, theirs in GEMMA2.numbers.items() if name != "attention_softcap"},
    local_rope=True,
    layer_pattern="sliding_window_pattern",
    own=("attn_logit_softcapping",),
)
GEMMA3_VISION = replace(
    GEMMA3,
    name="gemma3",
    hf_architecture="Gemma3ForConditionalGeneration",
    published="Gemma 3 4B, 12B, 27B",
    text_type=GEMMA3.name,
    **LLAVA,
)


_OWN = Literal["head_dim", "num_key_value_heads"]
_CONSTANT = {"attention_bias": False, "attention_k_eq_v": True}  # settings that no supported size has otherwise
_OF_E_SIZES = {
    "hidden_size_per_layer_input": "embeddings for each layer",
    "num_kv_shared_layers": "layers that attend to the keys and values of another layer",
}
_EXPERTS = ExpertFields(
    number="num_experts",
    chosen="top_k_experts",
    ffn_hidden_size="moe_intermediate_size",
    shared_ffn_hidden_size="intermediate_size",
    shared_gate=False,
    router_in_fp32=False,
    normed=True,
)
_MIXTURE_NORMS = {"pre_shared": "pre_feedforward_layernorm", "post_shared": "post_feedforward_layernorm_1"}
_MIXTURE_NORMS |= {"pre_experts": "pre_feedforward_layernorm_2", "post_experts": "post_feedforward_layernorm_2"}
_SPARSE = (
    *(
        sparse(f"mlp.{name}_layernorm.weight", {f"{theirs}.weight": ("hidden",)}, Split.REPLICATED)
        for name, theirs in _MIXTURE_NORMS.items()
    ),
    sparse("mlp.router.weight", {"router.proj.weight": ("experts", "hidden")}, Split.REPLICATED),
    sparse("mlp.router.scale", {"router.scale": ("hidden",)}, Split.REPLICATED),
    sparse("mlp.router.per_expert_scale", {"router.per_expert_scale": ("experts",)}, Split.REPLICATED),
    sparse(EXPERT + "linear_fc1.weight", {"experts.gate_up_proj": ("expert_gate_and_up", "hidden")}, Split.GATED),
    sparse(EXPERT + "linear_fc2.weight", {"experts.down_proj": ("hidden", "expert_ffn")}, Split.ROW_PARALLEL),
    *shared_expert("mlp"),
)


class Gemma4Fields(ModelFields):
    use_bidirectional_attention: Switch | Literal["all", "vision"] | None = None  # type: ignore[assignment]
    global_head_dim: Count = ABSENT  # of layers without a window, like the next one
    num_global_key_value_heads: Count | None = None
    # the same in newer files, by the number of the layer
    per_layer_config: Annotated[dict[str, dict[_OWN, Count]], Field(description="an object")] = ABSENT
    attention_k_eq_v: Switch = ABSENT
    hidden_size_per_layer_input: OrZero = ABSENT
    num_kv_shared_layers: OrZero = ABSENT
    enable_moe_block: Switch = ABSENT
    num_experts: Annotated[int, Ge(0), Le(10_000)] | None = None  # 0: an MLP only
    top_k_experts: Count | None = None
    moe_intermediate_size: Count | None = None


def _of_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields without attention in both directions within an image, which text has none of."""
    of_images = config.get("use_bidirectional_attention", "vision") == "vision"
    return {**config, "use_bidirectional_attention": None} if of_images else dict(config)


def _renewed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of text without experts that are not used."""
    config = _of_text(config)
    if not config.get("enable_moe_block"):
        return {**config, _EXPERTS.number: 0}
    if missing := sorted(name for name in (_EXPERTS.number, *_EXPERTS.names) if config.get(name) is None):
        raise ValueError(f"enable_moe_block=true needs {', '.join(missing)}; add what is missing")
    return config


def _mixers(config: PretrainedConfig) -> tuple[SequenceMixer, ...]:
    for name, part in _OF_E_SIZES.items():
        if size := getattr(config, name, 0):
            message = f"{name} must be 0, got {size}: this program lacks {part}, which the E sizes have"
            raise ValueError(f"{message}; choose another size")
    check_constants(config, _CONSTANT)
    full = config.per_layer_config["full_attention"]
    of_full = GlobalAttention(heads=config.num_attention_heads, groups=full.num_key_value_heads, head_dim=full.head_dim)
    return tuple(of_full if kind == "full_attention" else SOFTMAX_ATTENTION for kind in config.layer_types)


# layers without a window have wider heads whose keys are also values; in the mixture each layer has an MLP beside experts
GEMMA4 = replace(
    GEMMA3,
    name="gemma4_text",
    hf_architecture="Gemma4ForCausalLM",
    published="Gemma 4 31B, 26B-A4B without image input",
    mappings=(
        *(
            replace(each, layers=Layers.DENSE) if each.mcore_name == MCORE + "pre_mlp_layernorm.weight" else each
            for each in with_experts(GEMMA3.mappings, _SPARSE)
        ),
        *WEIGHTS,
        replace(replicated("layer_scalar", "layer_scalar", 1), frozen=True),
    ),
    fields=Gemma4Fields,
    flags={**GEMMA3.flags, "zero_centered_norm": False, "value_norm": True, "scaled_layers": True},
    numbers={"logit_softcap": "final_logit_softcapping", "attention_multiplier": lambda config: 1.0},
    layer_pattern="",
    own=(*_OF_E_SIZES, *_CONSTANT, "enable_moe_block", "global_head_dim", "num_global_key_value_heads", "per_layer_config"),
    partial_rotary=True,
    experts=_EXPERTS,
    renewed=_renewed,
    mixers=_mixers,
)
GEMMA4_VISION = replace(
    GEMMA4,
    name="gemma4",
    hf_architecture="Gemma4ForConditionalGeneration",
    published="Gemma 4 31B, 26B-A4B",
    text_type=GEMMA4.name,
    prefixes={"model.": ("model.language_model.",)},
    module_prefix="model.language_model.",
    untrained={"vision tower": r"model\.(vision_tower|embed_vision|audio_tower|embed_audio)\."},
)
# the same without experts, and without towers: images and sounds are only projected
GEMMA4_UNIFIED = replace(
    GEMMA4,
    name="gemma4_unified_text",
    hf_architecture="Gemma4UnifiedForCausalLM",
    published="Gemma 4 12B without image input",
    mappings=tuple(each for each in GEMMA4.mappings if each.layers != Layers.SPARSE),
    experts=None,
    own=tuple(name for name in GEMMA4.own if name != "enable_moe_block"),
    renewed=_of_text,
)
GEMMA4_UNIFIED_VISION = replace(
    GEMMA4_UNIFIED,
    name="gemma4_unified",
    hf_architecture="Gemma4UnifiedForConditionalGeneration",
    published="Gemma 4 12B",
    text_type=GEMMA4_UNIFIED.name,
    prefixes=GEMMA4_VISION.prefixes,
    module_prefix=GEMMA4_VISION.module_prefix,
    untrained={"projections of images and sounds": r"model\.(vision_embedder|embed_vision|embed_audio)\."},
)
