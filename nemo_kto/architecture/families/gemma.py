"""Gemma 2 and 3."""

from __future__ import annotations

from dataclasses import replace

from nemo_kto.architecture.config_fields import ABSENT, ModelFields, Positive
from nemo_kto.architecture.family import SLIDING_LAYERS, Family
from nemo_kto.architecture.mappings import DENSE, LLAVA, POST_NORMS, renamed
from nemo_kto.mixers.softmax_attention import qk_norms


class GemmaFields(ModelFields):
    query_pre_attn_scalar: Positive = ABSENT


_NORMS = {"pre_mlp_layernorm.weight": {"pre_feedforward_layernorm.weight": ("hidden",)}}
# norms before and after attention and MLP, soft caps on scores and logits, a sliding window in every second layer
GEMMA2 = Family(
    name="gemma2",
    hf_architecture="Gemma2ForCausalLM",
    published="Gemma 2",
    mappings=POST_NORMS + renamed(DENSE, _NORMS),
    fields=GemmaFields,
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
