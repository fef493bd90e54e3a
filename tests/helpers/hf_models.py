"""Tiny random Hugging Face models, one for each property that a converter can get wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Cohere2Config,
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
    set_seed,
)

from nemo_kto.architecture.architecture import read_architecture
from nemo_kto.architecture.lora import LoRASettings, hf_module

SEQUENCE = 24
_SIZES: dict[str, Any] = {
    "vocab_size": 259,  # odd, so that it is padded at TP2
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # large, so that every part of the model shows in the logits
}
_NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3}
_NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}  # the defaults are past the vocabulary
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 4.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 16,
}


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


def _yarn(theta: float, **more: Any) -> dict[str, Any]:
    return _rope(theta, rope_type="yarn", factor=4.0, original_max_position_embeddings=32, **more)


_SHORT = {"original_max_position_embeddings": 9}  # shorter than the sequences
# three value heads for each of three key heads, which is padded at TP2; the last layer has attention
_DELTA_NET: dict[str, Any] = {
    **_SIZES, "initializer_range": 0.12,  # at 0.3 gated norms enlarge the rounding of transformers beyond the tolerance
    "head_dim": 16, "linear_num_key_heads": 3, "linear_num_value_heads": 9, "linear_key_head_dim": 12,
    "linear_value_head_dim": 16, "full_attention_interval": 2,
}  # fmt: skip
# two heads in each of three groups, which are padded at TP2; time steps of 0.3 and more, which no limit changes
_MAMBA: dict[str, Any] = {
    **_SIZES, **_NO_TOKENS, "initializer_range": 0.12, "head_dim": 16, "mamba_num_heads": 6, "n_groups": 3,
    "mamba_head_dim": 8, "ssm_state_size": 12, "time_step_min": 1e-30, "time_step_max": 1.0, "time_step_floor": 0.3,
}  # fmt: skip
# two heads in one group; no RoPE; the largest steps are limited, as sums of large decays are rounded beyond the tolerance
_GRANITE_HYBRID: dict[str, Any] = {
    **_SIZES, **_NO_TOKENS, "initializer_range": 0.12, "shared_intermediate_size": 40, "mamba_n_heads": 2,
    "mamba_expand": 1, "mamba_d_head": "auto", "mamba_d_state": 12, "time_step_limit": [0.0, 1.5],
    "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 0.5,
    "tie_word_embeddings": True, "layer_types": ["mamba", "attention", "mamba", "mamba"],
}  # fmt: skip
CONFIGS = {
    "deepseek-v3-dense": lambda: DeepseekV3Config(**{**_DEEPSEEK, "first_k_dense_replace": 4}, q_lora_rank=24),
    # caps that the scores and logits of these weights reach, and a window in every second layer
    "gemma2": lambda: Gemma2Config(
        **_SIZES,
        rope_parameters=_rope(5e5),
        head_dim=16,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
        sliding_window=7,
        **_NO_TOKENS,
    ),
    "gemma2-untied-no-caps-bias": lambda: Gemma2Config(
        **_SIZES,
        rope_parameters=_rope(1e5),
        head_dim=8,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        attention_bias=True,
        tie_word_embeddings=False,
        **_NO_TOKENS,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_SIZES,
        rope_parameters={
            "full_attention": _yarn(5e5),
            "sliding_attention": _rope(2e3),
        },
        head_dim=16,
        query_pre_attn_scalar=24,
        final_logit_softcapping=9.0,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        **_NO_TOKENS,
    ),
    "llama": lambda: LlamaConfig(**_SIZES, rope_parameters=_rope(5e5)),
    "llama-tied-llama3-rope": lambda: LlamaConfig(**_SIZES, rope_parameters=_LLAMA3, head_dim=16, tie_word_embeddings=True),
    # as a merged LoRA with new tokens is saved: tied by config.json, with an output weight of its own
    "llama-own-output": lambda: LlamaConfig(**_SIZES, rope_parameters=_rope(1e5)),
    "llama-odd-heads": lambda: LlamaConfig(
        **{**_SIZES, **_NINE_HEADS, "hidden_size": 36},
        rope_parameters=_rope(1e5),
        tie_word_embeddings=True,
    ),
    "llama-one-kv-head": lambda: LlamaConfig(**{**_SIZES, "num_key_value_heads": 1}, rope_parameters=_rope(1e5)),
    "llama-attention-bias": lambda: LlamaConfig(**_SIZES, rope_parameters=_rope(1e5), attention_bias=True),
    "llama-all-biases-linear-rope": lambda: LlamaConfig(
        **_SIZES,
        rope_parameters=_rope(1e5, rope_type="linear", factor=2.5),
        attention_bias=True,
        mlp_bias=True,
    ),
    "llama-yarn-rope": lambda: LlamaConfig(
        **_SIZES,
        rope_parameters=_yarn(1e5, beta_fast=4.0),
    ),
    "mistral-window": lambda: MistralConfig(**_SIZES, rope_parameters=_rope(1e5), sliding_window=7, head_dim=16),
    "mistral": lambda: MistralConfig(**_SIZES, rope_parameters=_rope(1e5), sliding_window=None),
    "nemotron-h": lambda: NemotronHConfig(
        **_MAMBA, layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"]
    ),
    "olmo2": lambda: Olmo2Config(**_SIZES, rope_parameters=_rope(5e5), **_NO_TOKENS),
    "olmo2-tied-odd-heads-bias": lambda: Olmo2Config(
        **{**_SIZES, **_NINE_HEADS, "hidden_size": 36},
        rope_parameters=_rope(1e5),
        attention_bias=True,
        tie_word_embeddings=True,
        **_NO_TOKENS,
    ),
    "olmo3": lambda: Olmo3Config(
        **_SIZES,
        rope_parameters={
            "full_attention": _yarn(5e5),
            "sliding_attention": _rope(5e5),
        },
        sliding_window=7,
        **_NO_TOKENS,
    ),
    "phi3-part-of-each-head": lambda: Phi3Config(
        **_SIZES, rope_parameters=_rope(1e5, partial_rotary_factor=0.5), tie_word_embeddings=True, **_NO_TOKENS
    ),
    # as Phi-4-mini
    "phi3-part-of-each-head-longrope": lambda: Phi3Config(
        **_SIZES,
        rope_parameters=_rope(
            1e5,
            rope_type="longrope",
            partial_rotary_factor=0.75,
            short_factor=[1.0, 1.5, 2.0],
            long_factor=[2.0, 3.0, 4.0],
            attention_factor=0.7,
        ),
        original_max_position_embeddings=32,
        **_NO_TOKENS,
    ),
    "phi3-odd-heads-window-longrope": lambda: Phi3Config(
        **{**_SIZES, **_NINE_HEADS, "hidden_size": 36},
        rope_parameters=_rope(
            1e5, rope_type="longrope", short_factor=[1.0, 1.5], long_factor=[2.0, 4.0], attention_factor=0.7
        ),
        original_max_position_embeddings=32,
        sliding_window=7,
        **_NO_TOKENS,
    ),
    "smollm3": lambda: SmolLM3Config(
        **_SIZES,
        rope_parameters=_rope(2e6),
        no_rope_layers=[1, 0, 1, 0],
        **_NO_TOKENS,
    ),
    "smollm3-window-yarn-rope": lambda: SmolLM3Config(
        **_SIZES,
        rope_parameters=_yarn(1e5),
        use_sliding_window=True,
        sliding_window=7,
        tie_word_embeddings=True,
        **_NO_TOKENS,
    ),
    "seed-oss": lambda: SeedOssConfig(**_SIZES, rope_parameters=_rope(1e6), head_dim=16, **_NO_TOKENS),
    "granite": lambda: GraniteConfig(
        **_SIZES,
        rope_parameters=_yarn(1e5),
        attention_bias=True,
        embedding_multiplier=3.0,
        residual_multiplier=0.3,
        attention_multiplier=0.2,
        logits_scaling=3.0,
        tie_word_embeddings=True,
        **_NO_TOKENS,
    ),
    "granite-hybrid": lambda: GraniteMoeHybridConfig(**_GRANITE_HYBRID, num_local_experts=0, num_experts_per_tok=0),
    # as Granite 4.0 Micro
    "granite-hybrid-attention": lambda: GraniteMoeHybridConfig(
        **{**_GRANITE_HYBRID, "layer_types": ["attention"] * 4},
        rope_parameters=_rope(1e5),
        position_embedding_type="rope",
        attention_bias=True,
        num_local_experts=0,
    ),
    "glm4": lambda: Glm4Config(**_SIZES, rope_parameters=_rope(1e5, partial_rotary_factor=0.5), head_dim=16, **_NO_TOKENS),
    "ernie4-5": lambda: Ernie4_5Config(**_SIZES, rope_parameters=_rope(5e5), head_dim=16, use_bias=True, **_NO_TOKENS),
    "exaone4": lambda: Exaone4Config(**_SIZES, rope_parameters=_rope(1e6), sliding_window=7, **_NO_TOKENS),
    "exaone4-no-window": lambda: Exaone4Config(
        **_SIZES, rope_parameters=_rope(1e6), sliding_window=None, layer_types=["full_attention"] * 4, **_NO_TOKENS
    ),
    "hunyuan": lambda: HunYuanDenseV1Config(
        **_SIZES,
        rope_parameters=_rope(1e4, rope_type="dynamic", factor=1.0, alpha=50.0),
        head_dim=16,
        eod_token_id=None,
        **_NO_TOKENS,
    ),
    "ministral3": lambda: Ministral3Config(
        **_SIZES,
        rope_parameters=_yarn(1e6, llama_4_scaling_beta=0.5, mscale=1.0, mscale_all_dim=0.5) | _SHORT,
        head_dim=16,
        **_NO_TOKENS,
    ),
    "cohere2": lambda: Cohere2Config(
        **_SIZES, rope_parameters=_rope(5e4), sliding_window=7, logit_scale=0.3, tie_word_embeddings=True, **_NO_TOKENS
    ),
    "qwen2": lambda: Qwen2Config(**_SIZES, rope_parameters=_rope(1e6)),
    "qwen2-tied-window": lambda: Qwen2Config(
        **_SIZES,
        rope_parameters=_rope(1e5),
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=2,
    ),
    "qwen3.5-text": lambda: Qwen3_5TextConfig(
        **_DELTA_NET, rope_parameters=_rope(1e6, partial_rotary_factor=0.5), tie_word_embeddings=True, **_NO_TOKENS
    ),
    "qwen3": lambda: Qwen3Config(**_SIZES, rope_parameters=_rope(1e6), head_dim=16),
    "qwen3-tied-bias": lambda: Qwen3Config(
        **_SIZES, rope_parameters=_rope(1e5), head_dim=16, tie_word_embeddings=True, attention_bias=True
    ),
}

_LLAMA4: dict[str, Any] = {
    "head_dim": 8, "num_local_experts": 4, "attention_chunk_size": 7, "floor_scale": 5, "attn_scale": 0.4,
    "attn_temperature_tuning": True, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    **_SIZES, **_ROUTED, **_NO_TOKENS, "num_attention_heads": 5, "num_key_value_heads": 5, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_group": 4, "topk_group": 2,
    "rope_parameters": _yarn(1e5, mscale=0.7, mscale_all_dim=1.3) | _SHORT,
}  # fmt: skip
_V2 = {"num_attention_heads": 4, "num_key_value_heads": 4}
MIXTURES = {
    "gpt-oss": lambda: GptOssConfig(
        **_SIZES,
        rope_parameters=_yarn(1e5, beta_fast=4.0, truncate=False),
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=7,
        # gates and up projections of these weights reach it
        swiglu_limit=1.5,
    ),
    "gpt-oss-odd-heads-no-attention-bias": lambda: GptOssConfig(
        **{**_SIZES, **_NINE_HEADS},
        rope_parameters=_rope(1e5),
        head_dim=8,
        num_local_experts=8,
        num_experts_per_tok=3,
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        swiglu_alpha=1.1,
        attention_bias=False,
        tie_word_embeddings=True,
    ),
    "glm4-moe": lambda: Glm4MoeConfig(
        **_SIZES,
        **_ROUTED,
        rope_parameters=_rope(1e5, partial_rotary_factor=0.5),
        head_dim=16,
        use_qk_norm=True,
        attention_bias=True,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.7,
        num_nextn_predict_layers=0,
        **_NO_TOKENS,
    ),
    # five heads, which are padded at TP2; YaRN with both scales; values narrower than keys
    "deepseek-v3": lambda: DeepseekV3Config(**_DEEPSEEK, q_lora_rank=24, num_nextn_predict_layers=0),
    "deepseek-v3-direct-queries": lambda: DeepseekV3Config(
        **{**_DEEPSEEK, "v_head_dim": 20, "rope_parameters": _yarn(1e5) | _SHORT},
        q_lora_rank=None,
        rope_interleave=False,
        num_nextn_predict_layers=0,
    ),
    "deepseek-v2": lambda: DeepseekV2Config(
        **{**_DEEPSEEK, **_V2}, q_lora_rank=24, topk_method="group_limited_greedy", routed_scaling_factor=3.0
    ),
    "deepseek-v2-lite": lambda: DeepseekV2Config(**{**_DEEPSEEK, **_V2, "n_group": 1, "topk_group": 1}, q_lora_rank=None),
    "glm4-moe-lite": lambda: Glm4MoeLiteConfig(
        **{**_DEEPSEEK, "rope_parameters": _rope(1e5), "n_group": 1, "topk_group": 1},
        q_lora_rank=24,
        rms_norm_eps=1e-3,
        mlp_layer_types=["dense", "sparse", "dense", "sparse"],
    ),
    "dots1": lambda: Dots1Config(
        **_SIZES,
        **_ROUTED,
        rope_parameters=_rope(1e5),
        n_shared_experts=2,
        sliding_window=7,
        max_window_layers=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=False,
        **_NO_TOKENS,
    ),
    "minimax-m2": lambda: MiniMaxM2Config(
        **_SIZES,
        rope_parameters=_rope(1e5, partial_rotary_factor=0.5),
        head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=3,
        **_NO_TOKENS,
    ),
    "ernie4-5-moe": lambda: Ernie4_5_MoeConfig(
        **_SIZES,
        rope_parameters=_rope(1e5),
        moe_num_experts=8,
        moe_k=3,
        moe_intermediate_size=16,
        moe_layer_end_index=2,
        **_NO_TOKENS,
    ),
    # the number of experts for a token is given for each layer
    "hunyuan-moe": lambda: HunYuanMoEV1Config(
        **_SIZES,
        rope_parameters=_rope(1e4, rope_type="dynamic", factor=1.0, alpha=50.0),
        head_dim=16,
        num_experts=8,
        moe_topk=[3] * 4,
        eod_token_id=None,
        **_NO_TOKENS,
    ),
    # chunks shorter than the sequences, and queries that grow within them
    "llama4": lambda: Llama4TextConfig(
        **_SIZES,
        **_LLAMA4,
        rope_parameters=_LLAMA3,
        intermediate_size_mlp=40,
        interleave_moe_layer_step=2,
        no_rope_layers=[1, 0, 1, 0],
        layer_types=["full_attention", "chunked_attention", "chunked_attention", "full_attention"],
    ),
    "llama4-bias-no-norm-odd-heads": lambda: Llama4TextConfig(
        **{**_SIZES, **_NINE_HEADS},
        **_LLAMA4,
        rope_parameters=_yarn(1e5),
        intermediate_size_mlp=24,
        moe_layers=[0, 1, 3],
        no_rope_layers=[1, 1, 1, 1],  # without a rotation the gradients of the keys' biases are zero
        use_qk_norm=False,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "llama4-norms-everywhere": lambda: Llama4TextConfig(
        **_SIZES,
        **{**_LLAMA4, "attn_temperature_tuning": False},
        rope_parameters=_yarn(1e5),
        no_rope_layers=[1, 1, 1, 1],
    ),
    "granite-hybrid-moe": lambda: GraniteMoeHybridConfig(
        **{**_GRANITE_HYBRID, "tie_word_embeddings": False, "mamba_n_heads": 4, "mamba_n_groups": 2},
        num_local_experts=8,
        num_experts_per_tok=3,
    ),
    "mixtral": lambda: MixtralConfig(**_SIZES, rope_parameters=_rope(1e5), num_local_experts=4),
    "mixtral-window": lambda: MixtralConfig(
        **_SIZES, rope_parameters=_rope(1e5), num_local_experts=4, num_experts_per_tok=3, head_dim=16, sliding_window=7
    ),
    # transformers raises steps to time_step_min, which is the smallest of time_step_limit here
    "nemotron-h-moe": lambda: NemotronHConfig(
        **{**_MAMBA, "time_step_min": 0.5},
        time_step_limit=[0.5, math.inf],
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=24,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.7,
    ),
    "qwen2-moe": lambda: Qwen2MoeConfig(
        **_SIZES, **_EXPERTS, rope_parameters=_rope(1e5), shared_expert_intermediate_size=24, mlp_only_layers=[1]
    ),
    "qwen2-moe-window": lambda: Qwen2MoeConfig(
        **_SIZES,
        **_EXPERTS,
        rope_parameters=_rope(1e6),
        shared_expert_intermediate_size=12,
        norm_topk_prob=True,
        qkv_bias=False,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=3,
        tie_word_embeddings=True,
    ),
    "qwen3-next": lambda: Qwen3NextConfig(
        **_DELTA_NET,
        **_EXPERTS,
        rope_parameters=_rope(1e6, partial_rotary_factor=0.25),
        shared_expert_intermediate_size=24,
        mlp_only_layers=[1],
        attention_bias=True,
        **_NO_TOKENS,
    ),
    "qwen3.5-moe-text": lambda: Qwen3_5MoeTextConfig(
        **{name: size for name, size in _DELTA_NET.items() if name != "intermediate_size"},
        **_EXPERTS,
        rope_parameters=_rope(1e6, partial_rotary_factor=0.5),
        shared_expert_intermediate_size=24,
        **_NO_TOKENS,
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(**_SIZES, **_EXPERTS, rope_parameters=_rope(1e6), norm_topk_prob=True),
    "qwen3-moe-dense-layers": lambda: Qwen3MoeConfig(
        **_SIZES,
        **_EXPERTS,
        rope_parameters=_rope(1e5),
        head_dim=16,
        attention_bias=True,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        tie_word_embeddings=True,
    ),
}
# with image input: two layers of the text model, whose only embeddings are tied in some, and a vision tower of one layer
_TEXT: dict[str, Any] = {**_SIZES, **_NO_TOKENS, "num_hidden_layers": 2, "head_dim": 8}
_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_LLAMA4_WIDTHS = ("vision_output_dim", "projector_input_dim", "projector_output_dim")
_QWEN_VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
}  # fmt: skip
_QWEN3_VISION = {**_QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}

_TWO_LAYERS = {**_DELTA_NET, "num_hidden_layers": 2}
_QWEN3_5_VISION = {**_QWEN_VISION, "num_position_embeddings": 16}


def _wrapped(kind: str, text: Mapping[str, Any], vision: Mapping[str, Any], **more: Any) -> Callable[[], Any]:
    return lambda: AutoConfig.for_model(kind, text_config={**_TEXT, **text}, vision_config=dict(vision), **more)


def _mrope(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": _rope(1e5, mrope_section=[*sections]), **more}


MULTIMODAL = {
    "gemma3-vision": _wrapped(
        "gemma3",
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 24},
        _VISION,
        mm_tokens_per_image=4,
        image_token_index=258,
    ),
    "mistral3": _wrapped(
        "mistral3",
        {"model_type": "mistral", "sliding_window": None},
        {**_VISION, "model_type": "pixtral", "head_dim": 16},
        tie_word_embeddings=False,
    ),
    "mistral3-ministral": _wrapped(
        "mistral3",
        {
            "model_type": "ministral3",
            "rope_parameters": {**_yarn(1e5, llama_4_scaling_beta=0.3), **_SHORT},
        },
        {**_VISION, "model_type": "pixtral", "head_dim": 16},
    ),
    "mistral3-latents": _wrapped(
        "mistral3",
        {
            **{name: value for name, value in _DEEPSEEK.items() if name not in ("num_hidden_layers", *_NO_TOKENS)},
            "model_type": "mistral4",
            "head_dim": 12,
            "q_lora_rank": 24,
            "rope_parameters": _yarn(1e5, llama_4_scaling_beta=0.3, mscale=1.0, mscale_all_dim=1.0) | _SHORT,
        },
        {**_VISION, "model_type": "pixtral", "head_dim": 16},
    ),
    "kimi-k2.5": _wrapped(
        "kimi_k25",
        {
            **{name: value for name, value in _DEEPSEEK.items() if name not in ("num_hidden_layers", *_NO_TOKENS)},
            "model_type": "deepseek_v3",
            "head_dim": 4,
            "q_lora_rank": 24,
        },
        {**_VISION, "hidden_size": 32, "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 1},
        projection_hidden_size=32,
        tie_word_embeddings=False,
        image_token_id=256,
    ),
    "llama4-vision": _wrapped(
        "llama4",
        {**_LLAMA4, "intermediate_size_mlp": 40, "interleave_moe_layer_step": 1, "no_rope_layers": [1, 0]},
        # four patches with 32 values each are joined
        {**_VISION, "intermediate_size": 128, **dict.fromkeys(_LLAMA4_WIDTHS, 32)},
    ),
    "qwen2.5-vl": _wrapped("qwen2_5_vl", _mrope(1, 1, 2), {**_QWEN_VISION, "fullatt_block_indexes": [0]}),
    "qwen3-vl": _wrapped("qwen3_vl", _mrope(2, 1, 1), _QWEN3_VISION, tie_word_embeddings=True),
    "qwen3.5": _wrapped("qwen3_5", _mrope(1, 1, 0, **_TWO_LAYERS), _QWEN3_5_VISION),
    "qwen3.5-moe": _wrapped(
        "qwen3_5_moe", _mrope(1, 1, 0, **_TWO_LAYERS, **_EXPERTS, shared_expert_intermediate_size=24), _QWEN3_5_VISION
    ),
    "qwen3-vl-moe": _wrapped("qwen3_vl_moe", _mrope(2, 1, 1, **_EXPERTS), _QWEN3_VISION),
}
# as published but for its weights (tests/parity/test_mxfp4.py): sizes of blocks of 32 values
QUANTIZED = {
    "gpt-oss-mxfp4": lambda: GptOssConfig(
        **{**_SIZES, "hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.15},
        rope_parameters=_rope(1e5),
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
}


def write_model(name: str, folder: Path, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "40KB") -> None:
    """Write a model of those above with random weights, biases and norms included, in several files, with a tokenizer."""
    set_seed(len(name))
    config = (CONFIGS | MIXTURES | QUANTIZED | MULTIMODAL)[name]()
    save_model(auto_class(config.to_dict()).from_config(config, dtype=torch.float32), folder, dtype, max_shard_size)
    if folder.name.endswith("own-output"):
        edit_config(folder, tie_word_embeddings=True)


def save_model(model: Any, folder: Path, dtype: torch.dtype = torch.float32, max_shard_size: str = "40KB") -> None:
    """Write a model of random weights, biases and norms included, with a tokenizer."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # transformers starts norms at one, biases and some weights at zero
            if parameter.dim() == 1 or name.endswith("_bias") or not parameter.any():
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.3)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)


class LazyFolders(dict[str, Path]):
    """Name -> a folder, which is written when it is first asked for."""

    def __init__(self, write: Callable[[str], Path]) -> None:
        super().__init__()
        self._write = write

    def __missing__(self, name: str) -> Path:
        self[name] = self._write(name)
        return self[name]

    def of(self, names: Iterable[str]) -> dict[str, Path]:
        return {name: self[name] for name in names}


def lazy_models(root: Path) -> LazyFolders:
    """The models above, in folders of their names."""
    return LazyFolders(lambda name: write_models([name], root)[name])


def write_models(names: Iterable[str], root: Path) -> dict[str, Path]:
    """Write several models; returns their folders."""
    folders = {name: root / name for name in names}
    for name, folder in folders.items():
        write_model(name, folder)
    return folders


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files.

    transformers names the text layers of Kimi K2.5 as if they were blocks of its vision tower; published files do not.
    """
    found = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return {name.replace("language_model.model.blocks.", "language_model.model.layers."): found[name] for name in found}


@contextmanager
def adaptable_mamba() -> Iterator[None]:
    """Let peft adapt the output projection of Mamba-2, which it refuses because fused kernels would ignore the adapter."""
    from peft.tuners import tuners_utils

    refuse, name = tuners_utils._check_lora_target_modules_mamba, "_check_lora_target_modules_mamba"
    setattr(tuners_utils, name, lambda *arguments: None)
    try:
        yield
    finally:
        setattr(tuners_utils, name, refuse)


def peft_model(folder: Path, settings: LoRASettings) -> Any:
    """The model at ``folder`` under peft, with random A and B; magnitudes are scaled by random factors of 0.5 to 1.5."""
    from peft import LoraConfig, get_peft_model

    family = read_architecture(folder, tensor_parallel=1).family
    own = {usual: name for name, usual in family.module_names.items()}
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft computes with a float too
        use_rslora=settings.rslora,
        use_dora=settings.dora,
        lora_dropout=settings.dropout,
        target_modules=[own.get(module, module) for module in settings.modules],
        layers_to_transform=None if settings.layers is None else [layer - 1 for layer in settings.layers],
        task_type="CAUSAL_LM",
    )
    with adaptable_mamba():
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config)
    draw = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in (each for each in model.parameters() if each.requires_grad):
            if parameter.dim() == 1:
                parameter.mul_(0.5 + torch.rand(parameter.shape, generator=draw))
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2)
    return model


def write_adapters(base: Path, folder: Path, settings: LoRASettings) -> dict[str, torch.Tensor]:
    """Write random adapters in PEFT's format, beside the weights that a model's files name.

    Returns:
        The weights of the model with W + scale * B A in the place of those that are adapted.
    """
    draw = torch.Generator().manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}
    merged = weights(base)
    for weight, values in merged.items():
        if values.dim() != 2 or hf_module(weight) not in settings.modules or "mixer.experts." in weight:
            continue
        if ".experts." in weight and not settings.experts:
            continue
        if settings.layers is None or int(weight.split(".")[2]) + 1 in settings.layers:
            shapes = (settings.rank, values.size(1)), (values.size(0), settings.rank)
            lora_a, lora_b = (torch.randn(shape, generator=draw) * 0.2 for shape in shapes)
            prefix = f"base_model.model.{weight.removesuffix('.weight').replace('backbone.', 'model.')}"
            tensors |= {f"{prefix}.lora_A.weight": lora_a, f"{prefix}.lora_B.weight": lora_b}
            merged[weight] = values + settings.scale * lora_b @ lora_a
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": settings.rank, "lora_alpha": settings.alpha, "use_rslora": settings.rslora}
    if not settings.experts:  # of MLPs beside experts, whose modules would stand for the experts too
        config["target_parameters"] = ["mlp.gate_proj.weight"]
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(base)}))
    return merged


def write_tokenizer(folder: Path) -> None:
    """A byte tokenizer with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {token: number for number, token in enumerate([*alphabet, "<bos>", "<eos>", "<pad>"])}
    inner = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
    tokenizer.save_pretrained(folder)


def edit_config(folder: Path, **changes: Any) -> None:
    """Change entries of config.json; None removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def tokens(rows: int = 2) -> torch.Tensor:
    return torch.randint(0, _SIZES["vocab_size"], (rows, SEQUENCE), generator=torch.Generator().manual_seed(5))


def cotangent() -> torch.Tensor:
    """Weights of the logits in the sum whose gradient is taken: [rows, sequence, vocabulary]."""
    return torch.randn(2, SEQUENCE, _SIZES["vocab_size"], generator=torch.Generator().manual_seed(6))


def auto_class(config: Mapping[str, Any]) -> Any:
    return AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM


def load(folder: Path) -> Any:
    """The model of transformers in fp32. Its sdpa has no soft cap, and transformers 5.17 takes it for gemma2 anyway."""
    config = json.loads((folder / "config.json").read_text())
    kernel = "eager" if config.get("attn_logit_softcapping") is not None else None
    return auto_class(config).from_pretrained(folder, dtype=torch.float32, attn_implementation=kernel)


def transformers_logits(folder: Path) -> torch.Tensor:
    model = load(folder).eval()
    with torch.no_grad():
        return model(tokens()).logits


def gradients(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """Those of transformers, under the names of the file: transformers puts experts together where it has loaded them."""
    model = load(folder)
    (model(tokens()).logits * cotangent()).sum().backward()
    trained = [parameter for name, parameter in model.named_parameters() if not name.endswith("correction_bias")]
    for parameter in trained:
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(out)
    return weights(out)


def assert_adapted_logits(results: list[dict[str, Any]], expected: Any, base: Any, **tolerance: Any) -> None:
    """Compare the logits of all ranks that have some with those of peft, and without adapters with the base model's."""
    seen = [result for result in results if result["base"] is not None]
    assert seen
    for found in seen:
        for which in ("adapted", "merged"):
            np.testing.assert_allclose(found[which], expected, **tolerance, err_msg=which)
        np.testing.assert_array_equal(found["off"], found["base"])
        np.testing.assert_array_equal(found["first"], found["base"])
        np.testing.assert_allclose(found["base"], base, rtol=0, atol=1e-5 * np.abs(base).max())
