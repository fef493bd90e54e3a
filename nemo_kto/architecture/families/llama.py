"""Llama 1 to 3.x and models of its architecture (SmolLM2, TinyLlama, Yi, ...), SmolLM 3, Mistral, Mixtral, Phi 3 to 4."""

from __future__ import annotations

from dataclasses import replace

from nemo_kto.architecture.family import SLIDING, SLIDING_LAYERS, ExpertFields, Family
from nemo_kto.architecture.mappings import DENSE, renamed, separate_experts, with_experts

LLAMA = Family(
    name="llama",
    hf_architecture="LlamaForCausalLM",
    mappings=DENSE,
    flags={"qkv_bias": "attention_bias", "output_bias": "attention_bias", "mlp_bias": "mlp_bias"},
)
# without rotary embeddings in every fourth layer
SMOLLM3 = replace(
    LLAMA,
    name="smollm3",
    hf_architecture="SmolLM3ForCausalLM",
    window=SLIDING_LAYERS,
    no_rope_layers=True,
)
# a sliding window in every layer if ``sliding_window`` is set; Mixtral: the same with experts
MISTRAL = Family(name="mistral", hf_architecture="MistralForCausalLM", mappings=DENSE, window=SLIDING)
MIXTRAL = Family(
    name="mixtral",
    hf_architecture="MixtralForCausalLM",
    mappings=with_experts(DENSE, separate_experts("block_sparse_moe", gate="w1", up="w3", down="w2")),
    module_names={"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"},
    window=SLIDING,
    experts=ExpertFields(),
)
# fused tensors, Mistral's window, and in some models a rotation of a part of each head
PHI3 = Family(
    name="phi3",
    hf_architecture="Phi3ForCausalLM",
    mappings=renamed(
        DENSE,
        {
            "self_attention.linear_qkv.weight": {"self_attn.qkv_proj.weight": ("query_key_value", "hidden")},
            "mlp.linear_fc1.weight": {"mlp.gate_up_proj.weight": ("gate_and_up", "hidden")},
        },
    ),
    window=SLIDING,
    yarn_is_longrope=True,
    partial_rotary=True,
)
