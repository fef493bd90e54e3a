"""Layer specs: Transformer Engine's modules, or megatron-core's own together with those of this package."""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.models.layers.attention import TorchAttention
from nemo_kto.models.layers.gated_activation import ClampedSwiGLU, GeGLU, SwiGLU
from nemo_kto.models.layers.moe import BalancedRouter, BiasedExpertOutput, BiasedRouter
from nemo_kto.models.layers.norm import AllHeadsNorm, PostNormLayer, TorchNorm
from nemo_kto.models.layers.rope_tables import RopeTable, TemperatureTable


def block_spec(
    architecture: Architecture,
    config: TransformerConfig,
    vp_stage: int | None,
    *,
    use_te: bool,
    attn_mask_type: AttnMaskType,
) -> TransformerBlockSubmodules:
    """Return the specs of the layers of one model chunk; ``use_te`` selects Transformer Engine's modules."""
    first = get_transformer_layer_offset(config, vp_stage)
    kinds = architecture.sparse_layers[first : first + get_num_layers_to_build(config, vp_stage)]
    specs = {
        sparse: _layer_spec(architecture, config, use_te=use_te, sparse=sparse, attn_mask_type=attn_mask_type)
        for sparse in set(kinds)
    }
    norm: Any = TorchNorm
    if use_te:
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
    return TransformerBlockSubmodules(layer_specs=[specs[sparse] for sparse in kinds], layer_norm=norm)


def _layer_spec(
    architecture: Architecture, config: TransformerConfig, *, use_te: bool, sparse: bool, attn_mask_type: AttnMaskType
) -> ModuleSpec:
    """Return the spec of a layer, either with experts (``sparse``) or with one MLP."""
    make_spec = get_gpt_layer_with_transformer_engine_spec if use_te else get_gpt_layer_local_spec
    layer = make_spec(
        num_experts=config.num_moe_experts if sparse else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=architecture.qk_norm,
        **({} if use_te else {"normalization": "RMSNorm"}),
    )
    if not use_te:
        _use_torch_modules(layer, architecture)
    if sparse:
        mixture = _submodules(layer.submodules.mlp)
        mixture.router = BiasedRouter if architecture.expert_bias else BalancedRouter
        if not config.moe_grouped_gemm:  # adapters on experts need these classes, with Transformer Engine, too
            for experts in (_submodules(mixture.experts), _submodules(mixture.shared_experts)):
                experts.linear_fc1, experts.linear_fc2 = ColumnParallelLinear, RowParallelLinear
        if architecture.expert_bias:
            experts = _submodules(mixture.experts)
            experts.linear_fc1, experts.linear_fc2 = _with_bias(ColumnParallelLinear), BiasedExpertOutput
        # before experts the norm is a separate module, with Transformer Engine, too
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    attention = layer.submodules.self_attention
    attention.params["attn_mask_type"] = attn_mask_type
    if architecture.output_bias and not architecture.mlp_bias:
        attention.submodules.linear_proj = _with_bias(attention.submodules.linear_proj)
    return layer


def _use_torch_modules(layer: ModuleSpec, architecture: Architecture) -> None:
    """Replace modules in the spec of a local layer of megatron-core by those of this package."""
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = TorchNorm if architecture.pre_norm else IdentityOp
    if architecture.post_norm:
        layer.module = PostNormLayer
    local_rope, temperature = architecture.local_rope, architecture.temperature
    parts.self_attention.submodules.core_attention = ModuleSpec(
        module=TorchAttention,
        params={
            "softcap": architecture.attention_softcap,
            "sinks": architecture.sinks,
            "chunked": architecture.family.chunked,
            "rope": RopeTable(rope=architecture.rope, interleaved=architecture.family.interleaved_rotary),
            "norm_after_rope": architecture.rotated_norm,
            "temperature": None if temperature is None else TemperatureTable(temperature=temperature),
            "local_rope": None if local_rope is None else RopeTable(rope=local_rope),
        },
    )
    activation: type | ModuleSpec = SwiGLU if architecture.activation == "silu" else GeGLU
    if architecture.swiglu_limit is not None:
        settings = {"alpha": architecture.swiglu_alpha, "limit": architecture.swiglu_limit}
        activation = ModuleSpec(module=ClampedSwiGLU, params=settings)
    mlp = _submodules(parts.mlp)
    for spec in [_submodules(mlp.experts), _submodules(mlp.shared_experts)] if hasattr(mlp, "experts") else [mlp]:
        spec.activation_func = activation
    attention = parts.self_attention.submodules
    if architecture.all_heads_norm:
        attention.q_layernorm = ModuleSpec(
            module=AllHeadsNorm,
            params={"heads": architecture.num_attention_heads, "padded_heads": architecture.padded_attention_heads},
        )
        attention.k_layernorm = ModuleSpec(
            module=AllHeadsNorm,
            params={"heads": architecture.num_query_groups, "padded_heads": architecture.padded_query_groups},
        )
    elif architecture.qk_norm:
        attention.q_layernorm = attention.k_layernorm = TorchNorm


def _submodules(spec: Any) -> Any:
    """Return the submodules of a spec: a ModuleSpec, or (megatron-core >= 0.18) a partial."""
    return (spec.keywords if isinstance(spec, functools.partial) else vars(spec))["submodules"]


def _with_bias(linear: type) -> type:
    """Return a subclass of a linear layer with a bias; megatron-core's option adds one to attention output and MLP alike."""

    class LinearWithBias(linear):  # type: ignore[misc, valid-type]
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **{**kwargs, "bias": True})

    return LinearWithBias
