"""megatron-core's TransformerConfig and layer specs for an architecture and a parallel layout.

The layers are Transformer Engine's, or megatron-core's own together with those of this package.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.stages import ONE_STAGE, PipelineSplit
from nemo_kto.device.kernels import compiles, fused_rope, has_expert_kernel
from nemo_kto.layers.gated_activation import ClampedSwiGLU, GeGLU, SquaredReLU, SwiGLU
from nemo_kto.layers.linear import with_bias
from nemo_kto.layers.moe import BalancedRouter, BiasedExpertOutput, BiasedRouter, CorrectedRouter
from nemo_kto.layers.norm import ParallelLayer, PostNormLayer, ScaledResidualLayer, TorchLayerNorm, TorchNorm
from nemo_kto.mixers.param_mapping import Layers


def transformer_config(
    architecture: Architecture,
    *,
    use_te: bool,
    grouped_experts: bool,
    split: PipelineSplit = ONE_STAGE,
    recompute_modules: Sequence[str] = (),
    **settings: Any,
) -> TransformerConfig:
    split.layers(architecture.num_layers)  # raises SplitError if the layers cannot be partitioned
    fuses_activation = compiles() and architecture.activation == "silu" and architecture.swiglu_limit is None
    # all windows (or chunks) of a family have the same size
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
        attention_output_gate=architecture.output_gate,
        add_bias_linear=architecture.mlp_bias,
        add_qkv_bias=architecture.qkv_bias,
        gated_linear_unit=architecture.family.gated_mlp,
        hetereogenous_dist_checkpoint=len(set(architecture.mixers)) > 1,  # a parameter is then not in every layer
        activation_func=F.silu,
        window_size=(windows[0] - 1, 0) if windows else None,
        window_attn_skip_freq=[int(window is not None) for window in architecture.windows] if windows else None,
        # Transformer Engine's ring attention does not support windows; all-gather of keys and values does.
        cp_comm_type="all_gather" if windows else "p2p",
        no_rope_freq=None if all(architecture.rotates) else [int(not rotates) for rotates in architecture.rotates],
        # No dropout: it would add noise to the log-ratio of policy and reference, which is the training signal.
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=settings["params_dtype"] == torch.bfloat16,
        fp8_recipe="tensorwise",  # current scaling; megatron-core's default keeps a history of scales
        pipeline_dtype=settings["params_dtype"],
        bias_activation_fusion=fuses_activation,
        # makes megatron-core take the activation from the layer spec; it rejects this together with a fused activation
        use_te_activation_func=not use_te and not fuses_activation,
        apply_rope_fusion=use_te and fused_rope(),
        masked_softmax_fusion=False,  # needs apex's extension; without it, it fails, but only at some lengths
        calculate_per_token_loss=True,  # gradients are sums; the training code divides by its own count
        variable_seq_lengths=True,
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        # "mlp" includes experts, which megatron-core calls "moe"
        recompute_modules=[*recompute_modules, *["moe"] * ("mlp" in recompute_modules and architecture.experts is not None)],
        **pipeline_settings(split),
        **_expert_settings(architecture, grouped=use_te and grouped_experts),
        **settings,
    )


def pipeline_settings(split: PipelineSplit) -> dict[str, Any]:
    """Return megatron-core's settings for a pipeline split, and for the communication between its stages."""
    # With several chunks per stage, activations and gradients may be exchanged between the same two ranks at the same time.
    # They are then not sent as one batch, in which gloo mixes them up; on GPUs the communication overlaps with computation.
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
        "batch_p2p_sync": False,  # would wait for the device after each message, for versions of torch before 2
    }


def _expert_settings(architecture: Architecture, *, grouped: bool) -> dict[str, Any]:
    """Return megatron-core's settings for experts; ``grouped``: one product for the tokens of all experts of a rank."""
    settings: dict[str, Any] = {
        # megatron-core rejects the default with variable sequence lengths, even for a model without experts.
        "moe_token_dispatcher_type": "alltoall"  # nosec B105  # no password
    }
    if (experts := architecture.experts) is None:
        return settings
    if not all(experts.layers):
        settings["moe_layer_freq"] = [int(sparse) for sparse in experts.layers]
    if width := experts.shared_ffn_hidden_size:
        settings |= {"moe_shared_expert_intermediate_size": width, "moe_shared_expert_gate": experts.shared_gate}
    if experts.weighs_input:
        settings |= {"moe_router_score_function": "sigmoid", "moe_apply_probs_on_input": True}
    return settings | {
        "num_moe_experts": experts.number,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_router_topk": experts.per_token,
        "moe_router_pre_softmax": not experts.normalized,  # softmax over all experts, or over the chosen ones only
        "moe_router_dtype": "fp32" if experts.router_in_fp32 else None,
        "moe_grouped_gemm": grouped,
        "moe_permute_fusion": has_expert_kernel("unpermute"),
        # other routers are ours, or mask logits with -inf, whose sigmoid the kernel would have to order as torch does
        "moe_router_fusion": has_expert_kernel("topk_with_score_function")
        and not (experts.has_own_router or experts.weighs_input),
        "expert_tensor_parallel_size": architecture.expert_tensor_parallel,
    }


def block_spec(
    architecture: Architecture, config: TransformerConfig, vp_stage: int | None, *, use_te: bool, share_prompts: bool = False
) -> TransformerBlockSubmodules:
    """Return the specs of the layers of one model chunk; ``use_te`` selects Transformer Engine's modules.

    ``share_prompts`` is a setting of the sequence mixers.
    """
    first = get_transformer_layer_offset(config, vp_stage)
    layers = slice(first, first + get_num_layers_to_build(config, vp_stage))
    with_mlp = architecture.layers_with[Layers.FEED_FORWARD]
    kinds = list(zip(architecture.mixers[layers], architecture.sparse_layers[layers], with_mlp[layers], strict=True))
    specs = {}
    for mixer, sparse, has_mlp in set(kinds):
        specs[mixer, sparse, has_mlp] = layer = _layer_spec(architecture, config, use_te=use_te, sparse=sparse)
        mixer.specify(layer, architecture, use_te=use_te, share_prompts=share_prompts)
        if not has_mlp:
            layer.submodules.pre_mlp_layernorm = layer.submodules.mlp = IdentityOp
            layer.submodules.mlp_bda = IdentityFuncOp
    norm: Any = TorchLayerNorm if architecture.layer_norm else TorchNorm
    if use_te:
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
    return TransformerBlockSubmodules(layer_specs=[specs[kind] for kind in kinds], layer_norm=norm)


def _layer_spec(architecture: Architecture, config: TransformerConfig, *, use_te: bool, sparse: bool) -> ModuleSpec:
    """Return the spec of a layer, either with experts (``sparse``) or with one MLP, without its sequence mixer."""
    make_spec = get_gpt_layer_with_transformer_engine_spec if use_te else get_gpt_layer_local_spec
    layer = make_spec(
        num_experts=config.num_moe_experts if sparse else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=architecture.qk_norm,
        **({} if use_te else {"normalization": "RMSNorm"}),
    )
    if not use_te:
        _use_torch_modules(layer, architecture)
    if architecture.residual_multiplier != 1.0:
        layer.module = ScaledResidualLayer
        layer.params = {**layer.params, "multiplier": architecture.residual_multiplier}
    if sparse:
        mixture = _submodules(layer.submodules.mlp)
        mixture.router = BiasedRouter if architecture.expert_bias else BalancedRouter
        if architecture.experts is not None and architecture.experts.has_own_router:
            mixture.router = functools.partial(CorrectedRouter, experts=architecture.experts)
        if not config.moe_grouped_gemm:  # adapters on experts need these classes, with Transformer Engine, too
            for experts in (_submodules(mixture.experts), _submodules(mixture.shared_experts)):
                experts.linear_fc1, experts.linear_fc2 = ColumnParallelLinear, RowParallelLinear
        if architecture.expert_bias:
            experts = _submodules(mixture.experts)
            experts.linear_fc1, experts.linear_fc2 = with_bias(ColumnParallelLinear), BiasedExpertOutput
        # before experts the norm is a separate module, with Transformer Engine, too
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    return layer


def _use_torch_modules(layer: ModuleSpec, architecture: Architecture) -> None:
    """Replace modules in the spec of a local layer of megatron-core by those of this package."""
    parts = layer.submodules
    normed = architecture.pre_norm and not architecture.parallel
    parts.input_layernorm = parts.pre_mlp_layernorm = TorchNorm if normed else IdentityOp
    if architecture.post_norm:
        layer.module = PostNormLayer
    if architecture.parallel:
        layer.module = ParallelLayer
    activation: type | ModuleSpec = {"silu": SwiGLU, "relu2": SquaredReLU}.get(architecture.activation, GeGLU)
    if architecture.swiglu_limit is not None:
        settings = {"alpha": architecture.swiglu_alpha, "limit": architecture.swiglu_limit}
        activation = ModuleSpec(module=ClampedSwiGLU, params=settings)
    mlp = _submodules(parts.mlp)
    for spec in [_submodules(mlp.experts), _submodules(mlp.shared_experts)] if hasattr(mlp, "experts") else [mlp]:
        spec.activation_func = activation


def _submodules(spec: Any) -> Any:
    """Return the submodules of a spec: a ModuleSpec, or (megatron-core >= 0.18) a partial."""
    return (spec.keywords if isinstance(spec, functools.partial) else vars(spec))["submodules"]
