"""config.json of a model from the settings of NeMo-Aligner, Megatron-LM or Megatron-Bridge."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from nemo_kto.architecture.families import FAMILIES

Settings = Mapping[str, Any]
# Field of config.json -> names of the same setting; each program has one of them.
_NUMBERS: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_layers",),
    "hidden_size": ("hidden_size",),
    "intermediate_size": ("ffn_hidden_size",),
    "num_attention_heads": ("num_attention_heads",),
    "max_position_embeddings": ("max_position_embeddings", "encoder_seq_length", "seq_length"),
    "rms_norm_eps": ("layernorm_epsilon", "norm_epsilon"),
    "rope_theta": ("rotary_base",),
}
# Settings that a model of these families has only with these values, where they are given; None is the same as absent.
_REQUIRED: dict[str, tuple[object, ...]] = {
    "position_embedding_type": ("rope",),
    "rotary_percent": (1,),
    "rotary_percentage": (1,),
    "rotary_interleaved": (False,),
    "normalization": ("RMSNorm", "rmsnorm", "layernorm1p"),
    "activation": ("swiglu", "fast-swiglu"),
    "swiglu": (True,),
    "gated_linear_unit": (True,),
    "activation_func": ("torch.nn.functional.silu",),
    "multi_latent_attention": (False,),
    "apply_embedding_scaling": (False,),
    "moe_layer_freq": (1,),
    "window_attn_skip_freq": (),
    "moe_shared_expert_intermediate_size": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "softmax_scale": (),
    "query_pre_attn_scalar": (),
}


def derive(settings: Settings, weights: Collection[str], *, rows: int) -> dict[str, Any]:
    """Return the content of config.json for the families whose configuration follows from the settings.

    Args:
        weights: names in megatron-core of the weights of the model, those of a layer without the layer.
        rows: number of rows of the embedding, with padding.

    Raises:
        ValueError: a setting is missing or has a value that these families cannot have, or the weights are of others.
    """
    if not settings:
        raise ValueError("it has no model_config.yaml, run_config.yaml or arguments in common.pt")
    for name, values in _REQUIRED.items():
        found = settings.get(name)
        if isinstance(found, Mapping):  # a function in Megatron-Bridge's notation
            found = found.get("_target_")
        if found is not None and found not in values:
            raise ValueError(f"{name} must be {' or '.join(map(str, values)) or 'unset'}, got {found}")
    config: dict[str, Any] = {field: _number(settings, *names) for field, names in _NUMBERS.items()}
    heads = config["num_attention_heads"]
    kv_heads = _number(settings, "num_query_groups", default=heads)
    config["num_key_value_heads"] = heads if settings.get("group_query_attention") is False else kv_heads
    config["head_dim"] = _number(settings, "kv_channels", default=config["hidden_size"] // heads)
    vocabulary = _number(settings, "vocab_size", default=rows)
    config["vocab_size"] = vocabulary if vocabulary <= rows else rows
    shared, untied = settings.get("share_embeddings_and_output_weights"), settings.get("untie_embeddings_and_output_weights")
    has_output = "output_layer.weight" in weights
    config["tie_word_embeddings"] = (
        shared if isinstance(shared, bool) else not untied if isinstance(untied, bool) else not has_output
    )
    config["rope_scaling"] = _rope_scaling(settings)
    config |= _family_fields(settings, weights, config)
    family = FAMILIES[config["architectures"][0]]
    return {"model_type": family.name, family.activation[0]: family.activation[1], **config}


def compare(config: Mapping[str, Any], settings: Settings) -> list[str]:
    """Return a line for each value of a config.json that differs from the setting of the checkpoint, where both have one."""
    rope = config.get("rope_parameters") or {}
    given = {"rope_theta": rope.get("rope_theta"), **{name: value for name, value in config.items() if value is not None}}
    names = {
        name: aliases for name, aliases in _NUMBERS.items() if name not in ("intermediate_size", "max_position_embeddings")
    }
    if settings.get("group_query_attention") is not False:
        names["num_key_value_heads"] = ("num_query_groups",)
    lines = []
    for field, aliases in names.items():
        found = next((value for name in aliases if (value := _float(settings.get(name))) is not None), None)
        expected = _float(given.get(field))
        if found is not None and expected is not None and not math.isclose(found, expected, rel_tol=1e-6):
            lines.append(f"{field} = {expected:g}, but {aliases[0]} = {found:g}")
    return lines


def _family_fields(settings: Settings, weights: Collection[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the architecture that the names of the weights show, and its own fields."""
    has_qkv_bias, has_output_bias = (f"self_attention.linear_{part}.bias" in weights for part in ("qkv", "proj"))
    has_qk_norm, has_experts = "self_attention.q_layernorm.weight" in weights, "mlp.router.weight" in weights
    window = settings.get("window_size")
    if any(("post_" in name and "norm" in name) or "softmax_offset" in name for name in weights):
        raise ValueError("its weights are those of a family whose config.json does not follow from its settings")
    if has_experts:
        if has_qkv_bias or window is not None:
            raise ValueError(
                "its weights are those of a mixture of experts whose config.json does not follow from its settings"
            )
        experts, normalized = _number(settings, "num_moe_experts", "num_experts"), not settings.get("moe_router_pre_softmax")
        width = _number(settings, "moe_ffn_hidden_size", default=config["intermediate_size"])
        per_token = {"num_experts_per_tok": _number(settings, "moe_router_topk")}
        if has_qk_norm:
            own = {"num_experts": experts, "moe_intermediate_size": width, "norm_topk_prob": normalized}
            return {"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, **own, **per_token}
        if not normalized:
            raise ValueError("moe_router_pre_softmax must be false for Mixtral, got true")
        return {
            "architectures": ["MixtralForCausalLM"], "num_local_experts": experts, "intermediate_size": width, **per_token
        }  # fmt: skip
    if window is not None and (has_qk_norm or has_qkv_bias):
        raise ValueError(f"window_size must be unset with biases or norms of queries and keys, got {window}")
    if has_qk_norm:
        return {"architectures": ["Qwen3ForCausalLM"], "attention_bias": has_qkv_bias}
    if has_qkv_bias and not has_output_bias:
        return {"architectures": ["Qwen2ForCausalLM"]}
    if isinstance(window, list | tuple) and len(window) == 2:  # previous tokens; the current one counts too in config.json
        return {"architectures": ["MistralForCausalLM"], "sliding_window": int(window[0]) + 1}
    if window is not None:
        raise ValueError(f"window_size must be a pair, got {window}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": has_qkv_bias,
        "mlp_bias": "mlp.linear_fc1.bias" in weights,
    }


def _rope_scaling(settings: Settings) -> dict[str, Any] | None:
    linear = next((settings[name] for name in ("seq_len_interpolation_factor", "rotary_seq_len_interpolation_factor")
                   if settings.get(name) not in (None, 1, 1.0)), None)  # fmt: skip
    if linear is not None:
        return {"rope_type": "linear", "factor": float(linear)}
    factors = {
        "rope_scaling": _float(settings.get("rope_scaling_factor")),
        "use_rope_scaling": _float(settings.get("rope_scaling_factor")) or 8.0,
        "scale_positional_embedding": _float(settings.get("scale_factor")) or 8.0,
    }
    for name, factor in factors.items():
        if settings.get(name) is True:
            # the defaults are constants of megatron-core and NeMo
            bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
            bands = {band: _number(settings, band, default=int(usual)) for band, usual in bands.items()}
            context = _number(settings, "old_context_len", default=8192)
            return {"rope_type": "llama3", "factor": factor or 8.0, **bands, "original_max_position_embeddings": context}
    return None


def _number(settings: Settings, *names: str, default: int | None = None) -> Any:
    """Return a setting as an integer, or as a float if it is none."""
    found = next(((name, settings[name]) for name in names if settings.get(name) is not None), None)
    if found is None:
        if default is None:
            raise ValueError(f"{names[0]} must be given, got none")
        return default
    name, value = found
    if (number := _float(value)) is None or number <= 0:
        raise ValueError(f"{name} must be a number above 0, got {value}")
    return int(number) if number.is_integer() else number


def _float(value: object) -> float | None:
    try:
        return None if isinstance(value, bool) or not isinstance(value, int | float | str) else float(value)
    except ValueError:
        return None
