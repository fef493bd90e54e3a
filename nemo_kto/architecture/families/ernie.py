"""ERNIE 4.5, dense and with experts: neighbouring channels are rotated together; one setting for all biases."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from annotated_types import Ge

from nemo_kto.architecture.config_fields import ABSENT, Count, ModelFields, OrZero, PartCount, Positive, Switch
from nemo_kto.architecture.family import ExpertFields, Family
from nemo_kto.architecture.mappings import DENSE, MTP_LAYERS, correction_bias, separate_experts, shared_expert, with_experts


class ErnieFields(ModelFields):
    use_bias: Switch | None = None
    moe_num_experts: PartCount = ABSENT
    moe_k: Count = ABSENT
    moe_intermediate_size: Count = ABSENT
    moe_num_shared_experts: OrZero = ABSENT
    moe_layer_start_index: OrZero = ABSENT
    moe_layer_end_index: Annotated[int, Ge(-1)] = ABSENT
    moe_layer_interval: Count = ABSENT
    moe_norm_min: Positive = ABSENT


ERNIE4_5 = Family(
    name="ernie4_5",
    hf_architecture="Ernie4_5ForCausalLM",
    published="ERNIE 4.5 0.3B",
    mappings=DENSE,
    fields=ErnieFields,
    flags=dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), "use_bias"),
    interleaved_rotary=True,
    own_head_dim=True,
)
ERNIE4_5_MOE = replace(
    ERNIE4_5,
    name="ernie4_5_moe",
    hf_architecture="Ernie4_5_MoeForCausalLM",
    published="ERNIE 4.5 21B-A3B, 300B-A47B",
    mappings=with_experts(
        DENSE,
        (
            *separate_experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
            *shared_expert("mlp.shared_experts"),
            correction_bias("mlp.moe_statics.e_score_correction_bias", 1, "experts"),
        ),
    ),
    experts=ExpertFields(
        number="moe_num_experts",
        chosen="moe_k",
        ffn_hidden_size="moe_intermediate_size",
        shared_experts="moe_num_shared_experts",
        shared_gate=False,
        first_layer="moe_layer_start_index",
        last_layer="moe_layer_end_index",
        sparse_step="moe_layer_interval",
        correction=(1, -1),
        least_sum="moe_norm_min",
    ),
    untrained=MTP_LAYERS,
)
