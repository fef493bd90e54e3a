"""Command R, R+, R7B and A: attention and MLP in parallel, layer norms; in R7B and A RoPE in layers with a window only."""

from __future__ import annotations

from dataclasses import replace

from nemo_kto.architecture.config_fields import ABSENT, Count, ModelFields, Positive, Switch
from nemo_kto.architecture.family import SLIDING_LAYERS, Family
from nemo_kto.architecture.mappings import DENSE, without
from nemo_kto.mixers.param_mapping import replicated
from nemo_kto.mixers.softmax_attention import HEAD_NORMS


class CohereFields(ModelFields):
    layer_norm_eps: Positive = ABSENT
    logit_scale: Positive = ABSENT
    use_qk_norm: Switch = ABSENT
    sliding_window: Count = ABSENT  # type: ignore[assignment]  # without windows no layer would have RoPE


COHERE2 = Family(
    name="cohere2",
    hf_architecture="Cohere2ForCausalLM",
    published="Command R7B, Command A",
    mappings=(
        *without(DENSE, "input_layernorm.", "pre_mlp_layernorm."),
        replicated("shared_layernorm.weight", "input_layernorm.weight", "hidden"),
    ),
    fields=CohereFields,
    flags={"qkv_bias": "attention_bias", "output_bias": "attention_bias", "layer_norm": True, "parallel": True},
    numbers={"logit_multiplier": "logit_scale"},
    norm_epsilon="layer_norm_eps",
    window=SLIDING_LAYERS,
    layer_pattern="sliding_window_pattern",
    rope_in_windows=True,
    interleaved_rotary=True,
)


COHERE = replace(
    COHERE2,
    name="cohere",
    hf_architecture="CohereForCausalLM",
    published="Command R, Command R+, Aya 23, Aya Expanse",
    mappings=COHERE2.mappings + HEAD_NORMS,
    flags={**COHERE2.flags, "qk_norm": "use_qk_norm", "head_norms": True},
    window=("", ""),
    layer_pattern="",
    rope_in_windows=False,
)
