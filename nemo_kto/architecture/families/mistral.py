"""Mistral: Llama with a sliding window in every layer if ``sliding_window`` is set; Mixtral: the same with experts."""

from __future__ import annotations

from nemo_kto.architecture.families.mappings import DENSE, separate_experts, with_experts
from nemo_kto.architecture.families.table import ExpertFields, Family, window_everywhere

MISTRAL = Family(name="mistral", hf_architecture="MistralForCausalLM", mappings=DENSE, windows=window_everywhere)
MIXTRAL = Family(
    name="mixtral",
    hf_architecture="MixtralForCausalLM",
    mappings=with_experts(DENSE, separate_experts("block_sparse_moe", gate="w1", up="w3", down="w2")),
    windows=window_everywhere,
    experts=ExpertFields(),
)
