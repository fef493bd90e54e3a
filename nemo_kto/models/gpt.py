"""GPT model: megatron-core's GPTModel with its configuration and layer specs, returning hidden states instead of logits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.base_format import is_quantized
from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.architecture.stages import ONE_STAGE, PipelineSplit
from nemo_kto.device import device
from nemo_kto.device.kernels import compiles, fused_rope, has_expert_kernel, uses_transformer_engine
from nemo_kto.distributed.gradients import added_to_main_grad, main_grad_of
from nemo_kto.layers.attention import PackedSequences, RepeatedHeads, packed_attention
from nemo_kto.layers.layer_settings import FORMATS
from nemo_kto.layers.mlp import (
    XIELU,
    BalancedRouter,
    BiasedExpertOutput,
    BiasedRouter,
    ClampedSwiGLU,
    CorrectedRouter,
    GeGLU,
    NormedRouter,
    ScaledSwiGLU,
    SquaredReLU,
    SwiGLU,
    normed_experts,
    with_bias,
)
from nemo_kto.layers.norm import ParallelLayer, PostNormLayer, ScaledResidualLayer, TorchLayerNorm, TorchNorm
from nemo_kto.layers.quantized_weight import quantized_linears
from nemo_kto.mixers.param_mapping import MCORE, Layers


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
    is_usual = architecture.activation == "silu" and architecture.swiglu_limit is None and not architecture.scaled_mlp
    fuses_activation = compiles() and is_usual
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
        if architecture.experts is not None and architecture.experts.normed:
            mixture.router, layer.submodules.pre_mlp_layernorm = NormedRouter, IdentityOp
            layer.submodules.mlp = normed_experts(mixture)
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
        layer.params = {**layer.params, "scaled": architecture.scaled_layers}
    if architecture.parallel:
        layer.module = ParallelLayer
    activation: type | ModuleSpec = {"silu": SwiGLU, "relu2": SquaredReLU, "xielu": XIELU}.get(
        architecture.activation, GeGLU
    )
    if architecture.swiglu_limit is not None:
        settings = {"alpha": architecture.swiglu_alpha, "limit": architecture.swiglu_limit}
        activation = ModuleSpec(module=ClampedSwiGLU, params=settings)
    if architecture.scaled_mlp:
        factors = {"gate": architecture.gate_multiplier, "up": architecture.mlp_multiplier}
        activation = ModuleSpec(module=ScaledSwiGLU, params=factors)
    mlp = _submodules(parts.mlp)
    for spec in [_submodules(mlp.experts), _submodules(mlp.shared_experts)] if hasattr(mlp, "experts") else [mlp]:
        spec.activation_func = activation


def _submodules(spec: Any) -> Any:
    """Return the submodules of a spec: a ModuleSpec, or (megatron-core >= 0.18) a partial."""
    return (spec.keywords if isinstance(spec, functools.partial) else vars(spec))["submodules"]


class _HiddenStateOutput(ColumnParallelLinear):
    """Output layer that holds the weight but returns its input, multiplied by the factor on the logits."""

    logit_multiplier = 1.0

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        return input_ if self.logit_multiplier == 1.0 else input_ * self.logit_multiplier, None


class SparseGradEmbedding(VocabParallelEmbedding):
    """megatron-core's embedding, without its dense gradient of the whole table for each micro-batch."""

    scale = 1.0  # factor on the embedding vectors

    def forward(self, input_: Tensor) -> Tensor:
        """Map tokens [b, s] to [b, s, H], or with sequence parallelism to this rank's part of [s, b, H]."""
        hidden_bsh: Tensor = _Lookup.apply(self.weight, *self.local_indices(input_))  # type: ignore[no-untyped-call]
        return self.reduce_lookups(hidden_bsh * self.scale if self.scale != 1.0 else hidden_bsh)

    def local_indices(self, tokens_bs: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's index in this rank's part of the table, [b, s], and whether it is there; 0 if it is not."""
        index_bs = tokens_bs - self.vocab_start_index
        is_local_bs = (index_bs >= 0) & (index_bs < self.num_embeddings_per_partition)
        return torch.where(is_local_bs, index_bs, 0), is_local_bs

    def reduce_lookups(self, hidden_bsh: Tensor) -> Tensor:
        """Sum lookups over the ranks, [b, s, h] with zeros for tokens of other ranks, into the layout of :meth:`forward`."""
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(hidden_bsh.transpose(0, 1).contiguous(), group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(hidden_bsh, group=self.tp_group)


def scale_of(hidden_size: int, dtype: torch.dtype) -> float:
    """Return sqrt(hidden size), rounded to ``dtype`` as in transformers: sqrt(3072) = 55.4256 becomes 55.5 in bf16."""
    return float(torch.tensor(hidden_size**0.5, dtype=torch.float32, device="cpu").to(dtype))


class _Lookup(torch.autograd.Function):
    """Look up a table, with zeros for tokens of other ranks; selecting the local tokens would wait for the device."""

    @staticmethod
    def forward(ctx: Any, weight_VH: Tensor, index_bs: Tensor, is_local_bs: Tensor) -> Tensor:
        ctx.save_for_backward(weight_VH, index_bs, is_local_bs)
        ctx.main_grad_VH = main_grad_of(weight_VH)
        return weight_VH[index_bs].masked_fill_(~is_local_bs.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        weight_VH, index_bs, is_local_bs = ctx.saved_tensors
        index_T, grad_TH = index_bs.flatten(), grads[0].masked_fill(~is_local_bs.unsqueeze(-1), 0.0).flatten(0, 1)
        if ctx.main_grad_VH is not None:
            ctx.main_grad_VH.index_add_(0, index_T, grad_TH.to(ctx.main_grad_VH.dtype))
            return added_to_main_grad(weight_VH), None, None
        wide = torch.promote_types(weight_VH.dtype, torch.float32)  # a frequent token's sum would stop growing in bf16
        grad_VH = torch.zeros_like(weight_VH, dtype=wide).index_add_(0, index_T, grad_TH.to(wide))
        return grad_VH.to(weight_VH.dtype), None, None


class HiddenStateGPT(GPTModel):
    """GPTModel whose last pipeline stage returns hidden states, [batch, sequence, hidden].

    With sequence parallelism these are this rank's part of the sequence. The caller computes logits from
    ``output_weight()``, a few tokens at a time, so the gradient of that weight comes from the caller, not from this module.
    """

    adapters: LoRASettings | None = None  # those that ``add_adapters`` applied; None: the model's own weights are trained
    base_format: str | None = None  # format of its quantized weights
    logit_softcap: float | None = None  # c in c tanh(logit / c); None: no soft cap
    shares_prompts = True  # its attention supports packs whose sequences share prompts
    # ends of the names of parameters whose size depends on the number of zero heads that pad the model
    padded_with_heads: tuple[str, ...] = ()

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        # GPTModel does not let the caller choose these classes.
        if self.pre_process:
            self.embedding.word_embeddings.__class__ = SparseGradEmbedding
        if self.post_process:
            # The layer remains a separate module, because DistributedDataParallel may wait in its forward hook until this
            # weight is gathered.
            self.output_layer.__class__ = _HiddenStateOutput

    def _preprocess(
        self,
        *args: object,
        position_ids: Tensor,
        packed_seq_params: PackedSequences | None = None,
        padding_mask: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[object, ...]:
        """Run megatron-core's method, with two changes.

        ``padding_mask`` is returned as it is; megatron-core requires the tokens' shape. In a pack with shared prompts the
        angles of RoPE are those of each token's position; megatron-core would begin every segment at position 0.
        """
        given = {"position_ids": position_ids, "packed_seq_params": packed_seq_params}
        hidden, angle_t11d, *others, _ = super()._preprocess(*args, **given, **kwargs)
        if packed_seq_params is not None and packed_seq_params.prompts is not None:
            if not self.shares_prompts:
                raise ValueError("share_prompts must be True for packed sequences that share prompts, got False")
            angle_t11d = None if angle_t11d is None else angle_t11d[position_ids[0]]
        return (hidden, angle_t11d, *others, padding_mask)

    def output_weight(self) -> Tensor:
        """Return this rank's rows of the output weight, [padded vocabulary / tp, hidden]; RuntimeError on other stages."""
        if not self.post_process:
            raise RuntimeError("this pipeline stage has no output weight; only the last one has")
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def sharded_state_dict(self, *args: object, **kwargs: object) -> ShardedStateDict:
        """Return GPTModel's sharded state; tensors padded with zero heads may be loaded with more or fewer of them."""
        state = super().sharded_state_dict(*args, **kwargs)
        for name, tensor in state.items():
            if isinstance(tensor, ShardedTensor) and name.endswith(self.padded_with_heads):
                tensor.allow_shape_mismatch = True  # truncates or zero-fills at the end, where the padding is
        return state


def build_gpt(
    architecture: Architecture,
    *,
    params_dtype: torch.dtype,
    split: PipelineSplit = ONE_STAGE,
    chunk: int = 0,
    context_parallel: int = 1,
    pre_process: bool = True,
    post_process: bool = True,
    sequence_parallel: bool = False,
    recompute_modules: Sequence[str] = (),
    fp8: str | None = None,
    expert_parallel: int = 1,
    grouped_experts: bool = True,
    share_prompts: bool = False,
    empty: bool = False,
    **recompute: str | int | None,
) -> HiddenStateGPT:
    """Build one model chunk of this rank, with random weights; SplitError if the layers cannot be partitioned like this.

    Args:
        chunk: index of the chunk among those of this rank, from 0.
        pre_process, post_process: the chunk starts with the embedding; it ends with the output layer.
        fp8: "hybrid" (e4m3, and e5m2 for gradients) or "e4m3", for the products in Transformer Engine's linear layers.
        grouped_experts: Transformer Engine multiplies the experts of a rank in one call; adapters need separate experts.
        share_prompts: packed sequences may share prompts, which layers without Transformer Engine always support.
        empty: create megatron-core's own layers on torch's meta device, without values or memory, in order to apply adapters
            to them and merge these into the weights of another model.
        recompute: recompute_granularity, None to keep all activations, "selective" to recompute ``recompute_modules`` (mlp,
            core_attn or both), "full" for whole layers; recompute_method, uniform or block; recompute_num_layers per unit or
            in total.
    """
    use_te = uses_transformer_engine(params_dtype) and not empty and not architecture.unsupported_by_te
    config = transformer_config(
        architecture,
        use_te=use_te,
        grouped_experts=grouped_experts,
        params_dtype=params_dtype,
        split=split,
        context_parallel_size=context_parallel,
        sequence_parallel=sequence_parallel and architecture.tensor_parallel > 1,
        **recompute,
        recompute_modules=recompute_modules,
        fp8=fp8,
        expert_model_parallel_size=expert_parallel,
        use_cpu_initialization=empty,  # creates tensors on the device of the context below
    )
    vp_stage = chunk if split.chunks > 1 else None
    with contextlib.ExitStack() as stack:
        if empty:
            stack.enter_context(torch.device("meta"))
        elif architecture.base_format is not None:
            only_experts = not is_quantized(f"{MCORE}mlp.linear_fc1.weight", architecture)
            stack.enter_context(quantized_linears(FORMATS[architecture.base_format], only_experts=only_experts))
        model = HiddenStateGPT(
            config=config,
            transformer_layer_spec=block_spec(architecture, config, vp_stage, use_te=use_te, share_prompts=share_prompts),
            vocab_size=architecture.padded_vocab_size,
            max_sequence_length=architecture.max_position_embeddings,
            share_embeddings_and_output_weights=architecture.tied,
            position_embedding_type="rope" if use_te else "none",  # without Transformer Engine, TorchAttention applies RoPE
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
        )
    of_layers = {name for mixer in architecture.mixers for name in mixer.padded_with_heads}
    model.padded_with_heads = (*of_layers, "embedding.word_embeddings.lora_b")
    model.logit_softcap, model.base_format = architecture.logit_softcap, architecture.base_format
    model.shares_prompts = share_prompts or not use_te
    if pre_process:
        scale = scale_of(architecture.hidden_size, params_dtype) if architecture.scaled_embedding else 1.0
        model.embedding.word_embeddings.scale = scale * architecture.embedding_multiplier
    if post_process:
        model.output_layer.logit_multiplier = architecture.logit_multiplier
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            # Gradients of experts use a separate group even if the experts are not sharded: the optimizer state then has
            # the same form at every layout, and gradients of experts that all tensor-parallel ranks hold are summed.
            parameter.allreduce = False
    if use_te:
        model.rotary_pos_emb.inv_freq = architecture.rope.inverse_frequencies().to(device.current_device())
    return model


def build_chunks(architecture: Architecture, *, split: PipelineSplit = ONE_STAGE, **settings: Any) -> list[HiddenStateGPT]:
    """Build all model chunks of this rank; ``settings`` are arguments of :func:`build_gpt`."""
    is_first, is_last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    last = split.chunks - 1
    return [
        build_gpt(
            architecture,
            split=split,
            chunk=chunk,
            pre_process=is_first and chunk == 0,
            post_process=is_last and chunk == last,
            **settings,
        )
        for chunk in range(split.chunks)
    ]


def repeats_keys(architecture: Architecture, dtype: torch.dtype) -> bool:
    """Return whether attention of packs gets keys and values repeated for each query head, on the GPU of this rank."""
    if uses_transformer_engine(dtype) and not architecture.unsupported_by_te:
        return False
    return isinstance(packed_attention(dtype), RepeatedHeads)
