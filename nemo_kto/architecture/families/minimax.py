"""MiniMax M2: experts in every layer chosen by sigmoid scores, norms over all heads, a part of each head rotated."""

from __future__ import annotations

from nemo_kto.architecture.config_fields import ABSENT, Count, ModelFields
from nemo_kto.architecture.families.llama import MIXTRAL
from nemo_kto.architecture.family import ExpertFields, Family
from nemo_kto.architecture.mappings import correction_bias
from nemo_kto.architecture.mixers.softmax_attention import qk_norms


class MiniMaxFields(ModelFields):
    rotary_dim: Count = ABSENT


MINIMAX_M2 = Family(
    name="minimax_m2",
    hf_architecture="MiniMaxM2ForCausalLM",
    published="MiniMax-M2, M2.1, M2.5",
    mappings=(
        *MIXTRAL.mappings,
        *qk_norms("query", "key_value"),
        correction_bias("block_sparse_moe.e_score_correction_bias", "experts"),
    ),
    fields=MiniMaxFields,
    module_names=MIXTRAL.module_names,
    flags={"qk_norm": True, "all_heads_norm": True},
    partial_rotary=True,
    own_head_dim=True,
    experts=ExpertFields(sigmoid=True, correction=(-1,), router_in_fp32=False),
)
