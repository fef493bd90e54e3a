"""config.json of published models that tests plan: files of tests/data/published_configs, and changes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).resolve().parents[1] / "data" / "published_configs"
_FILES = {
    "Llama-3.1-8B": "meta-llama--Meta-Llama-3.1-8B",
    "Llama-3.1-70B": "meta-llama--Meta-Llama-3.1-70B",
    "Llama-3.1-405B": "meta-llama--Meta-Llama-3.1-405B",
    "Qwen3-30B-A3B": "Qwen--Qwen3-30B-A3B",
    "GLM-4.5-Air": "zai-org--GLM-4.5-Air",
    "gemma-3-27b-it": "google--gemma-3-27b-it",
    "DeepSeek-V3": "deepseek-ai--DeepSeek-V3",
    "NVIDIA-Nemotron-3-Nano-30B-A3B": "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
}


def _without_quantization(name: str) -> dict[str, Any]:
    config = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return {field: value for field, value in config.items() if field != "quantization_config"}


_PUBLISHED = {name: _without_quantization(file) for name, file in _FILES.items()}
_LLAMA2 = {"vocab_size": 32000, "rope_scaling": None}
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = _PUBLISHED | {
    "Llama-2-7B": _PUBLISHED["Llama-3.1-8B"] | _LLAMA2 | {"intermediate_size": 11008, "num_key_value_heads": 32},
    "Llama-2-70B": _PUBLISHED["Llama-3.1-70B"] | _LLAMA2,
    "Qwen2.5-7B": _QWEN2 | {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "Qwen2.5-32B": _QWEN2 | {
        "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "Qwen3-8B": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
    "Qwen3-235B-A22B": _PUBLISHED["Qwen3-30B-A3B"] | {
        "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
        "num_attention_heads": 64,
    },
    "gpt-oss-120b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "num_local_experts": 128, "num_experts_per_tok": 4, "layer_types": ["sliding_attention", "full_attention"] * 18,
        "sliding_window": 128, "attention_bias": True, "vocab_size": 201088, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 150000, "tie_word_embeddings": False, "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
    },
    "granite-4.0-h-small": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_size": 4096,
        "num_hidden_layers": 40, "layer_types": [("mamba", "attention")[layer % 10 == 5] for layer in range(40)],
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 768, "shared_intermediate_size": 1536,
        "num_local_experts": 72, "num_experts_per_tok": 10, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128,
        "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "position_embedding_type": "nope", "vocab_size": 100352,
        "attention_multiplier": 0.0078125, "embedding_multiplier": 12, "residual_multiplier": 0.22, "logits_scaling": 16,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 10000, "tie_word_embeddings": True,
    },
}  # fmt: skip
