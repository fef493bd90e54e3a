"""Types and constraints of the config.json fields that are read here or by transformers, whose defaults absent ones have."""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ConfigDict, Field

ABSENT: Any = None  # default of fields that may be absent but not null

Count = Annotated[int, Ge(1), Le(2**31 - 1)]
PartCount = Annotated[int, Ge(1), Le(10_000)]  # of layers or experts, each of which is looked up by name in the files
Positive = Annotated[float, Gt(0)]
Indices = list[Annotated[int, Ge(0)]]
Flags = list[Annotated[int, Ge(0), Le(1)]]


# Strict types and finite floats; other fields are ignored.
_STRICT = ConfigDict(strict=True, allow_inf_nan=False, protected_namespaces=(), defer_build=True)


class RopeFields(BaseModel):
    """Settings of a RoPE in ``rope_parameters``, or in ``rope_scaling`` of older files."""

    model_config = _STRICT

    rope_theta: Positive | None = None
    factor: Positive | None = None
    alpha: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    partial_rotary_factor: Positive | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    original_max_position_embeddings: Positive | None = None
    short_factor: list[Positive] | None = None
    long_factor: list[Positive] | None = None
    truncate: bool | None = None
    llama_4_scaling_beta: Positive | None = None


class LayerRopeFields(RopeFields):
    """The same, or one such set for each layer type."""

    full_attention: Annotated[RopeFields | None, Field(description="an object")] = None
    sliding_attention: Annotated[RopeFields | None, Field(description="an object")] = None


class ModelFields(BaseModel):
    """Fields that several families have; a family with others has a subclass."""

    model_config = _STRICT

    architectures: list[str] | None = None
    model_type: str = ABSENT
    is_encoder_decoder: bool = ABSENT
    hidden_act: str = ABSENT
    hidden_activation: str = ABSENT
    hidden_size: Count = ABSENT
    intermediate_size: Count = ABSENT
    vocab_size: Count = ABSENT
    max_position_embeddings: Count = ABSENT
    original_max_position_embeddings: Count = ABSENT
    num_hidden_layers: PartCount = ABSENT
    num_attention_heads: Count = ABSENT
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    rms_norm_eps: Positive = ABSENT
    tie_word_embeddings: bool = ABSENT
    attention_bias: bool = ABSENT
    mlp_bias: bool = ABSENT
    layer_types: list[str] | None = None
    sliding_window: Count | None = None
    use_sliding_window: bool = ABSENT
    use_bidirectional_attention: bool | None = None
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    rope_theta: Positive = ABSENT
    rope_local_base_freq: Positive = ABSENT
    rope_scaling: Annotated[LayerRopeFields | None, Field(description="an object")] = None
    rope_parameters: Annotated[LayerRopeFields | None, Field(description="an object")] = None
    quantization_config: Annotated[dict[str, Any] | None, Field(description="an object")] = None

    no_rope_layers: Flags | None = None
    no_rope_layer_interval: Count = ABSENT
    num_experts_per_tok: Count = ABSENT
    num_local_experts: PartCount = ABSENT
