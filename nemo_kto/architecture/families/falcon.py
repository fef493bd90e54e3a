"""Falcon-H1: attention beside Mamba-2 in each layer, and factors on embeddings, projections, outputs and logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Len
from pydantic import Field

from nemo_kto.architecture.config_fields import ABSENT, Count, ModelFields, Positive, Steps, Switch
from nemo_kto.architecture.family import Family, check_constants
from nemo_kto.architecture.mappings import DENSE, renamed, with_final_norm
from nemo_kto.mixers import AttentionWithMamba, Mamba2, SequenceMixer
from nemo_kto.mixers.attention_with_mamba import RECURRENCE
from nemo_kto.mixers.mamba2 import mamba2_weights
from nemo_kto.mixers.param_mapping import Shape

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_Two = Annotated[list[Positive], Len(2, 2)]
_Five = Annotated[list[Positive], Len(5, 5)]
_CONSTANT = {
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "projectors_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
}  # settings that no published model has otherwise


class FalconFields(ModelFields):
    """Fields of config.json; the factors on the five parts of Mamba-2's projection are in their order in the weight."""

    embedding_multiplier: Positive = ABSENT
    lm_head_multiplier: Positive = ABSENT
    key_multiplier: Positive = ABSENT
    attention_in_multiplier: Positive = ABSENT
    attention_out_multiplier: Positive = ABSENT
    ssm_in_multiplier: Positive = ABSENT
    ssm_out_multiplier: Positive = ABSENT
    ssm_multipliers: Annotated[_Five | None, Field(description="a list of five positive floats")] = None
    mlp_multipliers: Annotated[_Two | None, Field(description="a list of two positive floats")] = None
    mamba_d_ssm: Count | None = None
    mamba_n_heads: Count = ABSENT
    mamba_d_head: Count | Literal["auto"] = ABSENT
    mamba_n_groups: Count = ABSENT
    mamba_d_state: Count = ABSENT
    mamba_d_conv: Annotated[Count, Ge(2)] = ABSENT
    mamba_expand: Count = ABSENT
    mamba_rms_norm: Switch = ABSENT
    mamba_norm_before_gate: Switch = ABSENT
    time_step_limit: Steps = ABSENT


def _mixers(config: PretrainedConfig) -> tuple[SequenceMixer, ...]:
    check_constants(config, _CONSTANT | ({"mamba_norm_before_gate": False} if config.mamba_rms_norm else {}))
    mamba = Mamba2(
        heads=config.mamba_n_heads,
        groups=config.mamba_n_groups,
        head_dim=config.mamba_d_head,
        state_dim=config.mamba_d_state,
        kernel=config.mamba_d_conv,
        step_limits=tuple(config.time_step_limit),
        normed=config.mamba_rms_norm,
        # projections have no biases, so that a factor on their input is one on their output
        multipliers=tuple(config.ssm_in_multiplier * each for each in config.ssm_multipliers),
    )
    attention = config.attention_in_multiplier * config.attention_out_multiplier
    mixer = AttentionWithMamba(mamba=mamba, factors=(attention, config.ssm_out_multiplier))
    return (mixer,) * config.num_hidden_layers


def _score_multiplier(config: PretrainedConfig) -> float:
    """Return the factor on the scores: that on keys, and that on the input of both queries and keys."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return float(config.key_multiplier * config.attention_in_multiplier**2 / head_dim**0.5)


_LAYER: dict[str, dict[str, Shape]] = {
    "pre_mlp_layernorm.weight": {"pre_ff_layernorm.weight": ("hidden",)},
    "mlp.linear_fc1.weight": {f"feed_forward.{name}_proj.weight": ("ffn", "hidden") for name in ("gate", "up")},
    "mlp.linear_fc2.weight": {"feed_forward.down_proj.weight": ("hidden", "ffn")},
}
FALCON_H1 = Family(
    name="falcon_h1",
    hf_architecture="FalconH1ForCausalLM",
    published="Falcon-H1 0.5B to 34B, Falcon-H1R",
    mappings=with_final_norm(renamed(DENSE, _LAYER), "model.final_layernorm.weight") + mamba2_weights("mamba", RECURRENCE),
    fields=FalconFields,
    numbers={
        "embedding_multiplier": "embedding_multiplier",
        "logit_multiplier": "lm_head_multiplier",
        "attention_multiplier": _score_multiplier,
        "gate_multiplier": lambda config: config.mlp_multipliers[0],
        "mlp_multiplier": lambda config: config.mlp_multipliers[1],
    },
    refused_by_peft=Mamba2.lora_outputs,  # whose weight fused kernels read
    layer_kinds=(),
    recurrent=tuple(name for name in FalconFields.model_fields if name.startswith(("mamba_", "time_", "ssm_"))),
    own=("key_multiplier", "attention_in_multiplier", "attention_out_multiplier", "mlp_multipliers", *_CONSTANT),
    mixers=_mixers,
)
