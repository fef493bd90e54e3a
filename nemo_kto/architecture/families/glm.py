"""GLM 4: norms before and after attention and MLP, fused gate and up projections, half of each head rotated."""

from __future__ import annotations

from nemo_kto.architecture.family import Family
from nemo_kto.architecture.mappings import DENSE, GATE_UP, renamed
from nemo_kto.architecture.param_mapping import replicated

GLM4 = Family(
    name="glm4",
    hf_architecture="Glm4ForCausalLM",
    mappings=(
        *renamed(DENSE, GATE_UP),
        replicated("post_attention_layernorm.weight", "post_self_attn_layernorm.weight", "hidden"),
        replicated("post_mlp_layernorm.weight", "post_mlp_layernorm.weight", "hidden"),
    ),
    flags={"qkv_bias": "attention_bias", "post_norm": True},
    partial_rotary=True,
    interleaved_rotary=True,
    own_head_dim=True,
)
