"""Granite 3 and 4: Llama with factors of its own; in Granite 4 layers with Mamba-2, and experts or a fused MLP in each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Le

from nemo_kto.architecture.config_fields import ABSENT, Count, ModelFields, Positive, Steps
from nemo_kto.architecture.families.llama import LLAMA
from nemo_kto.architecture.family import LINEAR_LAYERS, ExpertFields, Family, check_constants
from nemo_kto.architecture.mappings import DENSE, EXPERT, renamed, sparse, with_experts, without
from nemo_kto.mixers import SOFTMAX_ATTENTION, Mamba2, SequenceMixer
from nemo_kto.mixers.mamba2 import mamba2_weights
from nemo_kto.mixers.param_mapping import Split

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_Experts = Annotated[int, Ge(0), Le(10_000)]  # zero in dense models
_CONSTANT = {"mamba_conv_bias": True, "mamba_proj_bias": False}  # settings that no published model has otherwise


class GraniteFields(ModelFields):
    """Fields of config.json; the last ones are those of Granite 4, where ``intermediate_size`` is the width of an expert."""

    embedding_multiplier: Positive = ABSENT
    residual_multiplier: Positive = ABSENT
    attention_multiplier: Positive = ABSENT
    logits_scaling: Positive = ABSENT
    position_embedding_type: Literal["rope", "nope"] | None = None
    num_local_experts: _Experts = ABSENT
    num_experts_per_tok: _Experts = ABSENT
    shared_intermediate_size: Count = ABSENT
    mamba_n_heads: Count = ABSENT
    mamba_d_head: Count | Literal["auto"] = ABSENT
    mamba_n_groups: Count = ABSENT
    mamba_d_state: Count = ABSENT
    mamba_d_conv: Annotated[Count, Ge(2)] = ABSENT
    mamba_expand: Count = ABSENT
    time_step_limit: Steps = ABSENT


def _mixers(config: PretrainedConfig) -> tuple[SequenceMixer, ...]:
    check_constants(config, _CONSTANT)
    if "linear_attention" not in config.layer_types:
        return (SOFTMAX_ATTENTION,) * config.num_hidden_layers
    mamba = Mamba2(
        heads=config.mamba_n_heads,
        groups=config.mamba_n_groups,
        head_dim=config.mamba_d_head,
        state_dim=config.mamba_d_state,
        kernel=config.mamba_d_conv,
        step_limits=tuple(config.time_step_limit),
    )
    return tuple(mamba if kind == "linear_attention" else SOFTMAX_ATTENTION for kind in config.layer_types)


GRANITE = replace(
    LLAMA,
    name="granite",
    hf_architecture="GraniteForCausalLM",
    published="Granite 3",
    fields=GraniteFields,
    numbers={
        "embedding_multiplier": "embedding_multiplier",
        "residual_multiplier": "residual_multiplier",
        "attention_multiplier": "attention_multiplier",
        "logit_multiplier": lambda config: 1 / config.logits_scaling,
    },
    own=("logits_scaling",),
)
_INPUT, _OUTPUT = "shared_mlp.input_linear.weight", "shared_mlp.output_linear.weight"
_MLPS = renamed(
    without(DENSE, "mlp.linear_fc1.bias", "mlp.linear_fc2.bias"),
    {"mlp.linear_fc1.weight": {_INPUT: ("gate_and_up", "hidden")}, "mlp.linear_fc2.weight": {_OUTPUT: ("hidden", "ffn")}},
)
_BLOCK = "block_sparse_moe"
# the MLP of a layer without experts is the shared expert of a layer with experts
_EXPERTS = (
    sparse("mlp.router.weight", {f"{_BLOCK}.router.layer.weight": ("experts", "hidden")}, Split.REPLICATED),
    sparse(EXPERT + "linear_fc1.weight", {f"{_BLOCK}.input_linear.weight": ("expert_gate_and_up", "hidden")}, Split.GATED),
    sparse(EXPERT + "linear_fc2.weight", {f"{_BLOCK}.output_linear.weight": ("hidden", "expert_ffn")}, Split.ROW_PARALLEL),
    sparse("mlp.shared_experts.linear_fc1.weight", {_INPUT: ("shared_gate_and_up", "hidden")}, Split.GATED),
    sparse("mlp.shared_experts.linear_fc2.weight", {_OUTPUT: ("hidden", "shared_ffn")}, Split.ROW_PARALLEL),
)
GRANITE_HYBRID = Family(
    name="granitemoehybrid",
    hf_architecture="GraniteMoeHybridForCausalLM",
    published="Granite 4.0 H-Micro, H-Tiny, H-Small, Micro, 1B, 350M",
    mappings=with_experts(_MLPS + mamba2_weights("mamba"), _EXPERTS),
    fields=GraniteFields,
    flags={"qkv_bias": "attention_bias", "output_bias": "attention_bias"},
    numbers=GRANITE.numbers,
    module_names={"input_linear": "gate_up_proj", "output_linear": "down_proj"},
    window=LINEAR_LAYERS,
    no_rope=lambda config: config.get("position_embedding_type") != "rope",
    own=("position_embedding_type", "logits_scaling", *_CONSTANT),
    recurrent=tuple(name for name in GraniteFields.model_fields if name.startswith(("mamba_", "time_"))),
    dense_width="shared_intermediate_size",
    mixers=_mixers,
    experts=ExpertFields(shared_ffn_hidden_size="shared_intermediate_size", shared_gate=False),
)
