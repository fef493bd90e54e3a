"""The GPT model: megatron-core's GPTModel, ending in hidden states instead of logits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from nemo_kto.models.activation import SwiGLU
from nemo_kto.models.activations import RECOMPUTED
from nemo_kto.models.architecture import Architecture
from nemo_kto.models.attention import TorchAttention
from nemo_kto.models.embedding import RowEmbedding
from nemo_kto.models.lora_settings import LoRASettings
from nemo_kto.models.norm import TorchNorm
from nemo_kto.models.rope import RotaryTable
from nemo_kto.models.router import BalancedRouter
from nemo_kto.parallel import device
from nemo_kto.parallel.kernels import compiles, fused_rope, uses_transformer_engine

# Parameters whose size depends on how many zero heads the tensor-parallel size needs.
_PADDED_WITH_HEADS = (
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.linear_proj.weight",
    "self_attention.linear_qkv.lora_b",
    "self_attention.linear_proj.lora_a",
)


class _HiddenStateOutput(ColumnParallelLinear):
    """An output layer that owns its weight and leaves its input as it is."""

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        return input_, None


class HiddenStateGPT(GPTModel):
    """A GPTModel whose last pipeline stage returns hidden states, [batch, sequence, hidden].

    Under sequence parallelism they are this rank's part of the sequence. Logits are formed by whoever needs them, from
    ``output_weight()``, a few tokens at a time; the gradient of the weight then arises there and not in this module.

    Attributes:
        adapters: what ``models.lora.add_adapters`` has adapted; None for a model whose own weights are trained.
    """

    adapters: LoRASettings | None = None

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        # GPTModel leaves no choice of the classes it builds here.
        if self.pre_process:
            self.embedding.word_embeddings.__class__ = RowEmbedding
        if self.post_process:
            # The layer stays a module of its own, because DistributedDataParallel may wait in its forward hook for this
            # weight to arrive.
            self.output_layer.__class__ = _HiddenStateOutput

    def output_weight(self) -> Tensor:
        """This rank's rows of the output layer, [padded vocabulary / tensor parallel, hidden]; the embedding's if tied.

        Raises:
            RuntimeError: this pipeline stage has no output layer.
        """
        if not self.post_process:
            raise RuntimeError("only the last pipeline stage has an output weight, and this model is of an earlier one")
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def sharded_state_dict(self, *args: object, **kwargs: object) -> ShardedStateDict:
        """As GPTModel's, and tensors padded with zero heads may be loaded at a layout with more or fewer of them."""
        state = super().sharded_state_dict(*args, **kwargs)
        for name, tensor in state.items():
            if isinstance(tensor, ShardedTensor) and name.endswith(_PADDED_WITH_HEADS):
                tensor.allow_shape_mismatch = True  # cuts or fills with zeros at the end, which is where the padding is
        return state


def build_gpt(
    architecture: Architecture,
    *,
    params_dtype: torch.dtype,
    pipeline_parallel: int = 1,
    pre_process: bool = True,
    post_process: bool = True,
    sequence_parallel: bool = False,
    recompute_granularity: str | None = None,
    recompute_method: str | None = None,
    recompute_num_layers: int | None = None,
    recompute_modules: Sequence[str] | None = None,
    attn_mask_type: AttnMaskType = AttnMaskType.causal,
    fp8: str | None = None,
    expert_parallel: int = 1,
    empty: bool = False,
) -> HiddenStateGPT:
    """Build this rank's part of the model, with random weights.

    Args:
        architecture: the model; also says the tensor-parallel size.
        params_dtype: dtype of parameters and activations.
        pipeline_parallel: number of pipeline stages.
        pre_process, post_process: this part begins with the embedding; it ends with the output layer.
        sequence_parallel: share out the sequence where tensor parallelism does not share out the work.
        recompute_granularity: None keeps all activations, "selective" forgets those of ``recompute_modules``, "full" those
            of whole layers; then ``recompute_method`` is uniform or block, with ``recompute_num_layers`` a unit or in all.
        recompute_modules: mlp, core_attn or both; None for those of :data:`RECOMPUTED`.
        attn_mask_type: causal, or arbitrary if ``forward`` is given a mask, [batch, 1, sequence, sequence], True = not seen.
        fp8: "hybrid" (e4m3, and e5m2 for gradients) or "e4m3": linear layers multiply in it, in Transformer Engine's layers.
            Scales are those of the tensor at hand: nothing has to be kept from step to step. Weights stay as they are.
        expert_parallel: ranks over which the experts of a layer are shared out.
        empty: the weights have names and shapes but no values, and take no memory (torch's meta device): adapters can be
            put on and added to the weights of another model. The layers are megatron-core's own, which can be empty.

    Raises:
        ValueError: the layers cannot be shared out evenly over the pipeline.
    """
    engine = uses_transformer_engine(params_dtype) and not empty
    config = _transformer_config(
        architecture,
        engine=engine,
        params_dtype=params_dtype,
        pipeline_model_parallel_size=pipeline_parallel,
        sequence_parallel=sequence_parallel and architecture.tensor_parallel > 1,
        recompute_granularity=recompute_granularity,
        recompute_method=recompute_method,
        recompute_num_layers=recompute_num_layers,
        recompute_modules=_recomputed(architecture, recompute_modules or RECOMPUTED),
        fp8=fp8,
        expert_model_parallel_size=expert_parallel,
        use_cpu_initialization=empty,  # whose tensors are on the device of the context below
    )
    spec = _block_spec(architecture, config, engine=engine, attn_mask_type=attn_mask_type)
    with torch.device("meta") if empty else contextlib.nullcontext():
        return _model(architecture, config, spec, engine=engine, pre_process=pre_process, post_process=post_process)


def _model(
    architecture: Architecture, config: TransformerConfig, spec: TransformerBlockSubmodules, *, engine: bool, **ends: bool
) -> HiddenStateGPT:
    """The model, with the architecture's frequencies where megatron-core's rotary embedding is used."""
    model = HiddenStateGPT(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=architecture.padded_vocab_size,
        max_sequence_length=architecture.max_position_embeddings,
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="rope" if engine else "none",  # TorchAttention rotates
        **ends,
    )
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            # Gradients of experts have a group of their own also where the experts are not shared out: then the state of
            # the optimizer has one form, and experts that every tensor-parallel rank holds are summed over these ranks.
            parameter.allreduce = False
    if engine:
        model.rotary_pos_emb.inv_freq = architecture.rope.inverse_frequencies().to(device.current_device())
    return model


def _transformer_config(architecture: Architecture, *, engine: bool, **settings: Any) -> TransformerConfig:
    if architecture.num_layers % (stages := settings["pipeline_model_parallel_size"]):
        raise ValueError(
            f"the number of layers must be divisible by the number of pipeline stages, got {architecture.num_layers} layers "
            f"and {stages} stages; choose another pipeline size"
        )
    windows = [window for window in architecture.windows if window is not None]  # a family has one size of window
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.padded_attention_heads,
        num_query_groups=architecture.padded_query_groups,
        kv_channels=architecture.head_dim,
        softmax_scale=architecture.rope.softmax_scale(architecture.head_dim),
        ffn_hidden_size=architecture.ffn_hidden_size,
        tensor_model_parallel_size=architecture.tensor_parallel,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_epsilon,
        qk_layernorm=architecture.qk_norm,
        add_bias_linear=architecture.mlp_bias,
        add_qkv_bias=architecture.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        window_size=(windows[0] - 1, 0) if windows else None,
        window_attn_skip_freq=[int(window is not None) for window in architecture.windows] if windows else None,
        no_rope_freq=None if all(architecture.rotates) else [int(not rotates) for rotates in architecture.rotates],
        # No dropout: it would add noise to the ratio of policy and reference, which is the signal.
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=settings["params_dtype"] == torch.bfloat16,
        fp8_recipe="tensorwise",  # the scale of a tensor is found when it is needed; megatron-core's default remembers some
        pipeline_dtype=settings["params_dtype"],
        bias_activation_fusion=compiles(),
        # megatron-core's way to take the activation from the layer spec; it refuses a fused one beside it
        use_te_activation_func=not engine and not compiles(),
        apply_rope_fusion=engine and fused_rope(),
        masked_softmax_fusion=False,  # needs apex's extension, and fails without it only at some lengths
        calculate_per_token_loss=True,  # gradients are sums; whoever trains divides by its own count
        variable_seq_lengths=True,
        **_expert_settings(architecture, grouped=engine),
        **settings,
    )


def _expert_settings(architecture: Architecture, *, grouped: bool) -> dict[str, Any]:
    """What the configuration says of experts.

    ``grouped``: the experts of a rank multiply their tokens in one call of Transformer Engine's, not one after the other.
    """
    settings: dict[str, Any] = {
        # The default is refused with variable lengths, experts or not.
        "moe_token_dispatcher_type": "alltoall",  # nosec B106  # no password
    }
    if (experts := architecture.experts) is None:
        return settings
    mixed = {} if all(experts.layers) else {"moe_layer_freq": [int(sparse) for sparse in experts.layers]}
    return (
        settings
        | mixed
        | {
            "num_moe_experts": experts.number,
            "moe_ffn_hidden_size": experts.ffn_hidden_size,
            "moe_router_topk": experts.per_token,
            # shares of all experts, or of those that were chosen
            "moe_router_pre_softmax": not experts.normalized,
            "moe_router_dtype": "fp32",
            "moe_grouped_gemm": grouped,
            "expert_tensor_parallel_size": architecture.expert_tensor_parallel,
        }
    )


def _recomputed(architecture: Architecture, modules: Sequence[str]) -> list[str]:
    """Experts are MLPs too; megatron-core has a name of its own for them."""
    return [*modules, *["moe"] * ("mlp" in modules and architecture.experts is not None)]


def _block_spec(
    architecture: Architecture, config: TransformerConfig, *, engine: bool, attn_mask_type: AttnMaskType
) -> TransformerBlockSubmodules:
    first = get_transformer_layer_offset(config)
    kinds = architecture.sparse_layers[first : first + get_num_layers_to_build(config)]
    specs = {
        sparse: _layer_spec(architecture, config, engine=engine, sparse=sparse, attn_mask_type=attn_mask_type)
        for sparse in set(kinds)
    }
    norm: Any = TorchNorm
    if engine:
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
    return TransformerBlockSubmodules(layer_specs=[specs[sparse] for sparse in kinds], layer_norm=norm)


def _layer_spec(
    architecture: Architecture, config: TransformerConfig, *, engine: bool, sparse: bool, attn_mask_type: AttnMaskType
) -> ModuleSpec:
    """Of a layer with experts (``sparse``) or with one MLP."""
    make = get_gpt_layer_with_transformer_engine_spec if engine else get_gpt_layer_local_spec
    layer = make(
        num_experts=config.num_moe_experts if sparse else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=architecture.qk_norm,
        **({} if engine else {"normalization": "RMSNorm"}),
    )
    if not engine:
        _use_torch_modules(layer, architecture)
    if sparse:
        _submodules(layer.submodules.mlp).router = BalancedRouter
        # the norm is a module of its own, whoever makes the layers
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    attention = layer.submodules.self_attention
    attention.params["attn_mask_type"] = attn_mask_type
    if architecture.output_bias and not architecture.mlp_bias:
        attention.submodules.linear_proj = _with_bias(attention.submodules.linear_proj)
    return layer


def _use_torch_modules(layer: ModuleSpec, architecture: Architecture) -> None:
    """Put this package's modules into the spec of one of megatron-core's local layers."""
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = TorchNorm
    rotary = RotaryTable(rope=architecture.rope)
    parts.self_attention.submodules.core_attention = ModuleSpec(module=TorchAttention, params={"rotary": rotary})
    mlp = _submodules(parts.mlp)
    (_submodules(mlp.experts) if hasattr(mlp, "experts") else mlp).activation_func = SwiGLU
    if architecture.qk_norm:
        parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = TorchNorm


def _submodules(spec: Any) -> Any:
    """What a module is made of: of a ModuleSpec, and from megatron-core 0.18 on of a partial."""
    return (spec.keywords if isinstance(spec, functools.partial) else vars(spec))["submodules"]


def _with_bias(linear: type) -> type:
    """The same linear layer with a bias; megatron-core has one switch for the attention's output and the MLP together."""

    class LinearWithBias(linear):  # type: ignore[misc, valid-type]
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **{**kwargs, "bias": True})

    return LinearWithBias
