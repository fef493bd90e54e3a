"""An architecture and a layout in the words of megatron-core's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.stages import ONE_STAGE, PipelineSplit
from nemo_kto.device.kernels import compiles, fused_rope


def transformer_config(
    architecture: Architecture,
    *,
    engine: bool,
    grouped_experts: bool,
    split: PipelineSplit = ONE_STAGE,
    **settings: Any,
) -> TransformerConfig:
    split.layers(architecture.num_layers)  # which is an error where they cannot be shared out
    fuses_activation = compiles() and architecture.activation == "silu" and architecture.swiglu_limit is None
    # a family has one size of window, or of chunk
    windows = [window for window in architecture.windows if window is not None]
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.padded_attention_heads,
        num_query_groups=architecture.padded_query_groups,
        kv_channels=architecture.head_dim,
        softmax_scale=architecture.softmax_scale,
        ffn_hidden_size=architecture.ffn_hidden_size,
        tensor_model_parallel_size=architecture.tensor_parallel,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_epsilon,
        layernorm_zero_centered_gamma=architecture.zero_centered_norm,
        qk_layernorm=architecture.qk_norm,
        add_bias_linear=architecture.mlp_bias,
        add_qkv_bias=architecture.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        window_size=(windows[0] - 1, 0) if windows else None,
        window_attn_skip_freq=[int(window is not None) for window in architecture.windows] if windows else None,
        # Transformer Engine's ring knows no windows; its gathered keys and values do.
        cp_comm_type="all_gather" if windows else "p2p",
        no_rope_freq=None if all(architecture.rotates) else [int(not rotates) for rotates in architecture.rotates],
        # No dropout: it would add noise to the ratio of policy and reference, which is the signal.
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=settings["params_dtype"] == torch.bfloat16,
        fp8_recipe="tensorwise",  # the scale of a tensor is found when it is needed; megatron-core's default remembers some
        pipeline_dtype=settings["params_dtype"],
        bias_activation_fusion=fuses_activation,
        # megatron-core's way to take the activation from the layer spec; it refuses a fused one beside it
        use_te_activation_func=not engine and not fuses_activation,
        apply_rope_fusion=engine and fused_rope(),
        masked_softmax_fusion=False,  # needs apex's extension, and fails without it only at some lengths
        calculate_per_token_loss=True,  # gradients are sums; whoever trains divides by its own count
        variable_seq_lengths=True,
        **_pipeline_settings(split),
        **_expert_settings(architecture, grouped=engine and grouped_experts),
        **settings,
    )


def _pipeline_settings(split: PipelineSplit) -> dict[str, Any]:
    """A split in the words of megatron-core's configuration, and how its stages exchange activations.

    With several chunks activations and gradients may travel between the same two ranks at the same time. They are then not
    sent in one batch, in which gloo confuses them; and on GPUs they travel while the stages compute.
    """
    interleaved = split.chunks > 1
    return {
        "pipeline_model_parallel_size": split.stages,
        "virtual_pipeline_model_parallel_size": split.chunks if interleaved else None,
        "num_layers_in_first_pipeline_stage": split.first,
        "num_layers_in_last_pipeline_stage": split.last,
        "account_for_embedding_in_pipeline_split": split.counts_embedding,
        "account_for_loss_in_pipeline_split": split.counts_loss,
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def _expert_settings(architecture: Architecture, *, grouped: bool) -> dict[str, Any]:
    """What the configuration says of experts.

    ``grouped``: the experts of a rank multiply their tokens in one call of Transformer Engine's, not one after the other.
    """
    settings: dict[str, Any] = {
        # The default is refused with variable lengths, experts or not.
        "moe_token_dispatcher_type": "alltoall",  # nosec B105  # no password
    }
    if (experts := architecture.experts) is None:
        return settings
    mixed = {} if all(experts.layers) else {"moe_layer_freq": [int(sparse) for sparse in experts.layers]}
    width = experts.shared_ffn_hidden_size
    gate = experts.shared_gate
    shared = {"moe_shared_expert_intermediate_size": width, "moe_shared_expert_gate": gate} if width else {}
    weighs_input = {"moe_router_score_function": "sigmoid", "moe_apply_probs_on_input": True} if experts.weighs_input else {}
    return {
        **settings,
        **mixed,
        **shared,
        **weighs_input,
        "num_moe_experts": experts.number,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_router_topk": experts.per_token,
        "moe_router_pre_softmax": not experts.normalized,  # shares of all experts, or of those that were chosen
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": grouped,
        "expert_tensor_parallel_size": architecture.expert_tensor_parallel,
    }


def recomputed(architecture: Architecture, modules: Sequence[str]) -> list[str]:
    """Experts are MLPs too; megatron-core has a name of its own for them."""
    return [*modules, *["moe"] * ("mlp" in modules and architecture.experts is not None)]
