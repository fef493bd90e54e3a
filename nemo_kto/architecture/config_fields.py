"""Types and constraints of the config.json fields that are read here or by transformers, whose defaults absent ones have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le
from pydantic import AllowInfNan, BaseModel, BeforeValidator, ConfigDict, Field

from nemo_kto.errors import printable, show

ABSENT: Any = None  # default of fields that may be absent but not null

Count = Annotated[int, Ge(1), Le(2**31 - 1)]
PartCount = Annotated[int, Ge(1), Le(10_000)]  # of layers or experts, each of which is looked up by name in the files
Positive = Annotated[float, Gt(0), Le(1e15)]
OrZero = Annotated[int, Ge(0), Le(2**31 - 1)]  # a zero means that there is none
PositiveOrZero = Annotated[float, Ge(0), Le(1e15)]
Indices = list[Annotated[int, Ge(0)]]
Flags = list[Annotated[int, Ge(0), Le(1)]]
Switch = Annotated[bool, BeforeValidator(lambda value: bool(value) if type(value) is int else value)]  # also an integer
# Smallest and largest step of Mamba-2; transformers may write an infinite one as {"__float__": "Infinity"}.
_infinite = BeforeValidator(lambda value: math.inf if value == {"__float__": "Infinity"} else value)
Steps = Annotated[list[Annotated[float, AllowInfNan(), _infinite]], Field(description="a list of two floats")]


# Strict types and finite floats; other fields are ignored.
STRICT = ConfigDict(strict=True, allow_inf_nan=False, protected_namespaces=(), defer_build=True)


class RopeFields(BaseModel):
    """Settings of a RoPE in ``rope_parameters``, or in ``rope_scaling`` of older files."""

    model_config = STRICT

    rope_theta: Positive | None = None
    factor: Positive | None = None
    alpha: PositiveOrZero | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    partial_rotary_factor: Positive | None = None
    attention_factor: Positive | None = None
    beta_fast: PositiveOrZero | None = None
    beta_slow: PositiveOrZero | None = None
    mscale: PositiveOrZero | None = None
    mscale_all_dim: PositiveOrZero | None = None
    original_max_position_embeddings: Positive | None = None
    short_factor: list[Positive] | None = None
    long_factor: list[Positive] | None = None
    truncate: Switch | None = None
    llama_4_scaling_beta: PositiveOrZero | None = None


class LayerRopeFields(RopeFields):
    """The same, or one such set for each layer type."""

    full_attention: Annotated[RopeFields | None, Field(description="an object")] = None
    sliding_attention: Annotated[RopeFields | None, Field(description="an object")] = None


class ModelFields(BaseModel):
    """Fields that several families have; a family with others has a subclass."""

    model_config = STRICT

    architectures: list[str] | None = None
    model_type: str = ABSENT
    hidden_act: str = ABSENT
    hidden_activation: str = ABSENT
    hidden_size: Count = ABSENT
    intermediate_size: Count = ABSENT
    vocab_size: Count = ABSENT
    max_position_embeddings: Count = ABSENT
    original_max_position_embeddings: Count = ABSENT
    num_hidden_layers: PartCount = ABSENT
    router_aux_loss_coef: PositiveOrZero | None = None
    num_attention_heads: Count = ABSENT
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    rms_norm_eps: Positive = ABSENT
    tie_word_embeddings: Switch = ABSENT
    attention_bias: Switch = ABSENT
    mlp_bias: Switch = ABSENT
    layer_types: list[str] | None = None
    sliding_window: Count | None = None
    sliding_window_pattern: Count | str = ABSENT
    max_window_layers: OrZero = ABSENT
    use_sliding_window: Switch = ABSENT
    use_bidirectional_attention: Switch | None = None
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: Positive | None = None
    rope_local_base_freq: Positive = ABSENT
    rope_scaling: Annotated[LayerRopeFields | None, Field(description="an object")] = None
    rope_parameters: Annotated[LayerRopeFields | None, Field(description="an object")] = None
    quantization_config: Annotated[dict[str, Any] | None, Field(description="an object")] = None

    no_rope_layers: Flags | None = None
    no_rope_layer_interval: Count = ABSENT
    num_experts_per_tok: Count = ABSENT
    num_local_experts: PartCount = ABSENT


# Quantized weights that are read: ``quant_method`` of quantization_config -> which of its formats.
QUANTIZED = {
    "mxfp4": "the experts of gpt-oss",
    "fp8": "e4m3, one scale per weight or block",
    "compressed-tensors": "pack-quantized: symmetric int4, one scale per row or group; float-quantized: e4m3, one scale per "
    "weight, row or block; nvfp4-pack-quantized: e2m1, one scale per group and one per weight",
    "modelopt": "quant_algo FP8: e4m3, one scale per weight; NVFP4: e2m1, one scale per 16 values and one per weight",
}


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How the files of a model store quantized weights."""

    method: str  # mxfp4, nvfp4, fp8 or int4
    # rows and columns of a weight that have one scale; None for all
    block: tuple[int | None, int | None] = (None, None)

    def __str__(self) -> str:
        match self.block:
            case (None, _):
                return self.method
            case (1, None):
                return f"{self.method} by rows"
            case (1, columns):
                return f"{self.method} in groups of {columns}"
            case (rows, columns):
                return f"{self.method} in blocks of {rows} x {columns}"


# Fields that describe how weights are quantized: that of transformers, that of older llm-compressor, and that of MLX.
QUANTIZATION_FIELDS = ("quantization_config", "compression_config", "quantization")


def quantization_settings(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return ``quantization_config``, which may be that of the text model; None if the weights are not quantized."""
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    found = [part[name] for part in parts for name in QUANTIZATION_FIELDS if part.get(name)]
    return next((settings for settings in found if isinstance(settings, dict)), None)


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Return how the weights of a configuration are quantized; None if they are not.

    Raises ValueError for a scheme that is not supported; the message names it.
    """
    if (settings := quantization_settings(config)) is None:
        return None
    method = str(settings.get("quant_method"))
    got = f"quant_method {printable(method, 60)!r}"
    if (algorithm := settings.get("quant_algo")) is not None:
        if method in ("modelopt", "None") and (found := _modelopt(settings)) is not None:
            return found
        got += f", quant_algo {printable(str(algorithm), 60)} of NVIDIA ModelOpt"
    elif "quant_method" not in settings and {"bits", "group_size"} <= settings.keys():
        got = f"{printable(str(settings['bits']), 60)} bits in groups of MLX"
    elif method == "mxfp4":
        return Quantization(method=method)
    elif method == "fp8":
        size, fmt = settings.get("weight_block_size"), settings.get("fmt", "e4m3")
        if fmt in ("e4m3", "float8_e4m3fn") and (size is None or _is_block(size)):
            return Quantization(method=method, block=(None, None) if size is None else tuple(size))
        got += f" with weight_block_size {size!r} and fmt {fmt!r}"
    elif method == "compressed-tensors":
        try:
            return _compressed(settings)
        except (AttributeError, LookupError, TypeError, ValueError):
            shown = [group.get("weights") for group in _groups(settings) if isinstance(group, dict)]
            got += f" with format {settings.get('format')!r}" + "".join(f" and weights {weights}" for weights in shown[:2])
            got += "".join(f" and {name} {show(settings[name])}" for name in _changes(settings))
    known = ", ".join(f"{name} ({formats})" for name, formats in QUANTIZED.items())
    text = f"quantization_config must be one of {known}, got {got}"
    raise ValueError(f"{text}; start from the unquantized model")


def _modelopt(settings: Mapping[str, Any]) -> Quantization | None:
    """Return the scheme of a configuration of NVIDIA ModelOpt; None if it is another one, or differs between layers."""
    schemes = {"FP8": Quantization(method="fp8"), "NVFP4": Quantization(method="nvfp4", block=(1, 16))}
    parts = [group["weights"] for group in _groups(settings) if isinstance(group, dict) and "weights" in group]
    sizes = [part.get("group_size") for part in (settings, *parts) if isinstance(part, dict)]
    found = schemes.get(str(settings["quant_algo"]))
    is_other = found is None or "quantized_layers" in settings or any(size not in (None, found.block[1]) for size in sizes)
    return None if is_other else found


def _groups(settings: Mapping[str, Any]) -> list[Any]:
    groups = settings.get("config_groups")
    return [*groups.values()] if isinstance(groups, dict) else []


def _is_block(size: object) -> bool:
    return isinstance(size, list) and len(size) == 2 and all(type(each) is int and each > 0 for each in size)


def _changes(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings of compressed-tensors for which values of weights do not suffice: rotations, sparse storage."""
    sparsity = settings.get("sparsity_config")
    is_sparse = isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense"
    return ["transform_config"] * bool(settings.get("transform_config")) + ["sparsity_config"] * is_sparse


def _compressed(settings: Mapping[str, Any]) -> Quantization:
    """Return the scheme of a configuration of compressed-tensors; any exception means that it is another one."""
    if _changes(settings):
        raise ValueError
    name, found = settings["format"], set[Quantization]()
    method, *kind = {
        "pack-quantized": ("int4", 4, "int", True),
        "float-quantized": ("fp8", 8, "float", True),
        "nvfp4-pack-quantized": ("nvfp4", 4, "float", True),
    }[name]
    for group in _groups(settings):
        weights = group["weights"]
        if [weights["num_bits"], weights["type"], weights["symmetric"]] != kind or (group.get("format") or name) != name:
            raise ValueError
        if weights.get("actorder") not in (None, "weight", "static"):
            raise ValueError
        size = {
            "tensor": [None, None],
            "channel": [1, None],
            "group": [1, weights.get("group_size")],
            "tensor_group": [1, weights.get("group_size")],
            "block": weights.get("block_structure"),
        }[weights["strategy"]]
        if weights["strategy"] in ("group", "block", "tensor_group") and not _is_block(size):
            raise ValueError
        if (method == "nvfp4") != (weights["strategy"] == "tensor_group"):
            raise ValueError
        found.add(Quantization(method=method, block=tuple(size)))
    (quantization,) = found
    return quantization
