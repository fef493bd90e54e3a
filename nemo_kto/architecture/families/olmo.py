"""OLMoE, OLMo 2 and 3, EXAONE 4: norms of queries and keys; all but OLMoE have norms after attention and MLP, not before."""

from __future__ import annotations

from dataclasses import replace

from nemo_kto.architecture.config_fields import ABSENT, ModelFields, PartCount, Positive, Switch
from nemo_kto.architecture.family import SLIDING_LAYERS, ExpertFields, Family
from nemo_kto.architecture.mappings import DENSE, POST_NORMS, separate_experts, without
from nemo_kto.mixers.softmax_attention import qk_norms


class OlmoeFields(ModelFields):
    clip_qkv: Positive | None = None
    num_experts: PartCount = ABSENT
    norm_topk_prob: Switch = ABSENT


OLMOE = Family(
    name="olmoe",
    hf_architecture="OlmoeForCausalLM",
    published="OLMoE 1B-7B",
    mappings=(
        *without(DENSE, "mlp."),
        *qk_norms("query", "key_value"),
        *separate_experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    ),
    fields=OlmoeFields,
    flags={"qkv_bias": "attention_bias", "output_bias": "attention_bias", "qk_norm": True, "all_heads_norm": True},
    numbers={"qkv_limit": "clip_qkv"},
    experts=ExpertFields(number="num_experts", normalized="norm_topk_prob"),
)
OLMO2 = Family(
    name="olmo2",
    hf_architecture="Olmo2ForCausalLM",
    published="OLMo 2",
    mappings=without(DENSE, "input_layernorm.", "pre_mlp_layernorm.") + POST_NORMS + qk_norms("query", "key_value"),
    flags={
        "qkv_bias": "attention_bias",
        "output_bias": "attention_bias",
        "qk_norm": True,
        "all_heads_norm": True,
        "pre_norm": False,
        "post_norm": True,
    },
)
# norms of each head; in models with windows no RoPE in layers without one
EXAONE4 = replace(
    OLMO2,
    name="exaone4",
    hf_architecture="Exaone4ForCausalLM",
    published="EXAONE 4.0",
    mappings=without(DENSE, "input_layernorm.", "pre_mlp_layernorm.") + POST_NORMS + qk_norms("head", "head"),
    flags={"qk_norm": True, "pre_norm": False, "post_norm": True},
    window=SLIDING_LAYERS,
    layer_pattern="sliding_window_pattern",
    rope_in_windows=True,
)
# a sliding window in three of four layers, whose RoPE is not scaled
OLMO3 = replace(
    OLMO2, name="olmo3", hf_architecture="Olmo3ForCausalLM", published="OLMo 3", window=SLIDING_LAYERS, local_rope=True
)
