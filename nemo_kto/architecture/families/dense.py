"""Dense model families: the weights they share, with their Hugging Face names, and their differences."""

from __future__ import annotations

from dataclasses import replace

from nemo_kto.architecture.families.table import (
    Family,
    ParamMapping,
    Split,
    no_rope_layers,
    window_by_layer_type,
    window_everywhere,
)

_MCORE = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."
_ATTENTION = _HF + "self_attn."
_MLP = _HF + "mlp."


def _qkv(kind: str, *sizes: str) -> dict[str, tuple[str, ...]]:
    widths = {"q": "query", "k": "key_value", "v": "key_value"}
    return {f"{_ATTENTION}{part}_proj.{kind}": (width, *sizes) for part, width in widths.items()}


def _gate_and_up(kind: str, *sizes: str) -> dict[str, tuple[str, ...]]:
    return {f"{_MLP}{part}_proj.{kind}": ("ffn", *sizes) for part in ("gate", "up")}


# mcore_name, hf_names, split, required_flag
_DENSE: tuple[tuple[str, dict[str, tuple[str, ...]], Split, str], ...] = (
    ("embedding.word_embeddings.weight", {"model.embed_tokens.weight": ("vocabulary", "hidden")}, Split.VOCABULARY, ""),
    (_MCORE + "input_layernorm.weight", {_HF + "input_layernorm.weight": ("hidden",)}, Split.REPLICATED, ""),
    (_MCORE + "self_attention.linear_qkv.weight", _qkv("weight", "hidden"), Split.QKV, ""),
    (_MCORE + "self_attention.linear_qkv.bias", _qkv("bias"), Split.QKV, "qkv_bias"),
    (_MCORE + "self_attention.linear_proj.weight", {_ATTENTION + "o_proj.weight": ("hidden", "query")}, Split.HEADS, ""),
    (_MCORE + "self_attention.linear_proj.bias", {_ATTENTION + "o_proj.bias": ("hidden",)}, Split.REPLICATED, "output_bias"),
    (_MCORE + "pre_mlp_layernorm.weight", {_HF + "post_attention_layernorm.weight": ("hidden",)}, Split.REPLICATED, ""),
    (_MCORE + "mlp.linear_fc1.weight", _gate_and_up("weight", "hidden"), Split.GATED, ""),
    (_MCORE + "mlp.linear_fc1.bias", _gate_and_up("bias"), Split.GATED, "mlp_bias"),
    (_MCORE + "mlp.linear_fc2.weight", {_MLP + "down_proj.weight": ("hidden", "ffn")}, Split.ROW_PARALLEL, ""),
    (_MCORE + "mlp.linear_fc2.bias", {_MLP + "down_proj.bias": ("hidden",)}, Split.REPLICATED, "mlp_bias"),
    ("decoder.final_layernorm.weight", {"model.norm.weight": ("hidden",)}, Split.REPLICATED, ""),
    ("output_layer.weight", {"lm_head.weight": ("vocabulary", "hidden")}, Split.VOCABULARY, "untied"),
)
_DENSE_MAPPINGS = tuple(
    ParamMapping(mcore_name=mcore_name, hf_names=hf_names, split=split, required_flag=flag)
    for mcore_name, hf_names, split, flag in _DENSE
)


def _qk_norms(query: str, key: str) -> tuple[ParamMapping, ...]:
    return tuple(
        ParamMapping(
            mcore_name=f"{_MCORE}self_attention.{part}_layernorm.weight",
            hf_names={f"{_ATTENTION}{part}_norm.weight": (width,)},
            split=Split.REPLICATED,
        )
        for part, width in (("q", query), ("k", key))
    )


_QK_NORM_MAPPINGS, _ALL_HEADS_NORM_MAPPINGS = _qk_norms("head", "head"), _qk_norms("query", "key_value")
# for models that have norms before the MLP too
_PRE_MLP_NORM = {_MCORE + "pre_mlp_layernorm.weight": {_HF + "pre_feedforward_layernorm.weight": ("hidden",)}}
_POST_NORM_MAPPINGS = tuple(
    ParamMapping(
        mcore_name=f"{_MCORE}post_{ours}_layernorm.weight",
        hf_names={f"{_HF}post_{theirs}_layernorm.weight": ("hidden",)},
        split=Split.REPLICATED,
    )
    for ours, theirs in (("attention", "attention"), ("mlp", "feedforward"))
)


def _without(mappings: tuple[ParamMapping, ...], *names: str) -> tuple[ParamMapping, ...]:
    return tuple(mapping for mapping in mappings if mapping.mcore_name.removeprefix(_MCORE) not in names)


# Phi-3 fuses weights that other families have in separate tensors.
_FUSED = {
    _MCORE + "self_attention.linear_qkv.weight": {_ATTENTION + "qkv_proj.weight": ("query_key_value", "hidden")},
    _MCORE + "mlp.linear_fc1.weight": {_MLP + "gate_up_proj.weight": ("gate_and_up", "hidden")},
}
_FUSED_MAPPINGS = tuple(
    replace(mapping, hf_names=_FUSED.get(mapping.mcore_name, mapping.hf_names)) for mapping in _DENSE_MAPPINGS
)

_GEMMA_MAPPINGS = _POST_NORM_MAPPINGS + tuple(
    replace(mapping, hf_names=_PRE_MLP_NORM.get(mapping.mcore_name, mapping.hf_names)) for mapping in _DENSE_MAPPINGS
)

# Gemma 2: norms before and after attention and MLP, soft caps on scores and logits, a sliding window in every second layer.
GEMMA2 = Family(
    name="gemma2",
    hf_architecture="Gemma2ForCausalLM",
    mappings=_GEMMA_MAPPINGS,
    flags={
        "qkv_bias": "attention_bias",
        "output_bias": "attention_bias",
        "post_norm": True,
        "zero_centered_norm": True,
        "scaled_embedding": True,
    },
    numbers={
        "query_pre_attn_scalar": "query_pre_attn_scalar",
        "attention_softcap": "attn_logit_softcapping",
        "logit_softcap": "final_logit_softcapping",
    },
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    windows=window_by_layer_type,
    own_head_dim=True,
)
# Gemma 3 text models: no cap on the scores, query and key norms, and a separate RoPE for sliding-window layers.
GEMMA3 = replace(
    GEMMA2,
    name="gemma3_text",
    hf_architecture="Gemma3ForCausalLM",
    mappings=_GEMMA_MAPPINGS + _QK_NORM_MAPPINGS,
    flags={**GEMMA2.flags, "qk_norm": True},
    numbers={name: theirs for name, theirs in GEMMA2.numbers.items() if name != "attention_softcap"},
    local_rope=True,
)
# Llama 1 to 3.x and models of the same architecture: SmolLM2, TinyLlama, Yi, ...
LLAMA = Family(
    name="llama",
    hf_architecture="LlamaForCausalLM",
    mappings=_DENSE_MAPPINGS,
    flags={"qkv_bias": "attention_bias", "output_bias": "attention_bias", "mlp_bias": "mlp_bias"},
)
# Llama with a sliding attention window in every layer if ``sliding_window`` is set.
MISTRAL = Family(name="mistral", hf_architecture="MistralForCausalLM", mappings=_DENSE_MAPPINGS, windows=window_everywhere)
# Phi 3, 3.5 and 4: Llama with fused tensors, Mistral's window, and in some models a rotation of only a part of each head.
PHI3 = Family(
    name="phi3",
    hf_architecture="Phi3ForCausalLM",
    mappings=_FUSED_MAPPINGS,
    windows=window_everywhere,
    partial_rotary=True,
)
# SmolLM 3: Llama without rotary embeddings in every fourth layer.
SMOLLM3 = Family(
    name="smollm3",
    hf_architecture="SmolLM3ForCausalLM",
    mappings=_DENSE_MAPPINGS,
    flags={"qkv_bias": "attention_bias", "output_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    windows=window_by_layer_type,
    rotates=no_rope_layers,
)
# Qwen 2 and 2.5: biases only on query, key and value.
QWEN2 = Family(
    name="qwen2",
    hf_architecture="Qwen2ForCausalLM",
    mappings=_DENSE_MAPPINGS,
    flags={"qkv_bias": True},
    windows=window_by_layer_type,
)
# Qwen 3: a norm on every query and key head, and a head size that is set separately.
QWEN3 = Family(
    name="qwen3",
    hf_architecture="Qwen3ForCausalLM",
    mappings=_DENSE_MAPPINGS + _QK_NORM_MAPPINGS,
    flags={"qk_norm": True, "qkv_bias": "attention_bias", "output_bias": "attention_bias"},
    windows=window_by_layer_type,
    own_head_dim=True,
)
# OLMo 2: norms after attention and MLP instead of before them, and norms over all query heads and over all key heads.
OLMO2 = Family(
    name="olmo2",
    hf_architecture="Olmo2ForCausalLM",
    mappings=_without(_DENSE_MAPPINGS, "input_layernorm.weight", "pre_mlp_layernorm.weight")
    + _POST_NORM_MAPPINGS
    + _ALL_HEADS_NORM_MAPPINGS,
    flags={
        "qkv_bias": "attention_bias",
        "output_bias": "attention_bias",
        "qk_norm": True,
        "all_heads_norm": True,
        "pre_norm": False,
        "post_norm": True,
    },
)
# OLMo 3: a sliding window in three of four layers, whose RoPE is not scaled.
OLMO3 = replace(OLMO2, name="olmo3", hf_architecture="Olmo3ForCausalLM", windows=window_by_layer_type, local_rope=True)
