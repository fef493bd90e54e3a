"""The GPT model: megatron-core's GPTModel, ending in hidden states instead of logits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_kto.models.activation import GeGLU, SwiGLU
from nemo_kto.models.activations import RECOMPUTED
from nemo_kto.models.architecture import Architecture
from nemo_kto.models.attention import TorchAttention
from nemo_kto.models.embedding import RowEmbedding, scale_of
from nemo_kto.models.layer import PostNormLayer
from nemo_kto.models.lora_settings import LoRASettings
from nemo_kto.models.norm import AllHeadsNorm, TorchNorm
from nemo_kto.models.rope import RotaryTable
from nemo_kto.models.stages import PipelineSplit
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
_ONE_STAGE = PipelineSplit()


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
        logit_softcap: c for which the logits become c tanh(logit / c); None where they stay as they are.
    """

    adapters: LoRASettings | None = None
    logit_softcap: float | None = None

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
    split: PipelineSplit = _ONE_STAGE,
    chunk: int = 0,
    context_parallel: int = 1,
    pre_process: bool = True,
    post_process: bool = True,
    sequence_parallel: bool = False,
    recompute_granularity: str | None = None,
    recompute_method: str | None = None,
    recompute_num_layers: int | None = None,
    recompute_modules: Sequence[str] | None = None,
    attn_mask_type: AttnMaskType = AttnMaskType.causal,
    fp8: str | None = None,
    empty: bool = False,
) -> HiddenStateGPT:
    """Build a chunk of this rank's part of the model, with random weights.

    Args:
        architecture: the model; also says the tensor-parallel size.
        params_dtype: dtype of parameters and activations.
        split: how the layers are shared out over the pipeline.
        chunk: which of this rank's model chunks this is, from 0.
        context_parallel: number of ranks that share a sequence.
        pre_process, post_process: this chunk begins with the embedding; it ends with the output layer.
        sequence_parallel: share out the sequence where tensor parallelism does not share out the work.
        recompute_granularity: None keeps all activations, "selective" forgets those of ``recompute_modules``, "full" those
            of whole layers; then ``recompute_method`` is uniform or block, with ``recompute_num_layers`` a unit or in all.
        recompute_modules: mlp, core_attn or both; None for those of :data:`RECOMPUTED`.
        attn_mask_type: causal, or arbitrary if ``forward`` is given a mask, [batch, 1, sequence, sequence], True = not seen.
        fp8: "hybrid" (e4m3, and e5m2 for gradients) or "e4m3": linear layers multiply in it, in Transformer Engine's layers.
            Scales are those of the tensor at hand: nothing has to be kept from step to step. Weights stay as they are.
        empty: the weights have names and shapes but no values, and take no memory (torch's meta device): adapters can be
            put on and added to the weights of another model. The layers are megatron-core's own, which can be empty.

    Raises:
        SplitError: the layers cannot be shared out like this.
    """
    engine = uses_transformer_engine(params_dtype) and not empty and not architecture.not_in_engine
    config = _transformer_config(
        architecture,
        engine=engine,
        params_dtype=params_dtype,
        split=split,
        context_parallel_size=context_parallel,
        sequence_parallel=sequence_parallel and architecture.tensor_parallel > 1,
        recompute_granularity=recompute_granularity,
        recompute_method=recompute_method,
        recompute_num_layers=recompute_num_layers,
        recompute_modules=list(recompute_modules or RECOMPUTED),
        fp8=fp8,
        use_cpu_initialization=empty,  # whose tensors are on the device of the context below
    )
    vp_stage = chunk if split.chunks > 1 else None
    spec = _block_spec(architecture, config, vp_stage, engine=engine, attn_mask_type=attn_mask_type)
    place = {"pre_process": pre_process, "post_process": post_process, "vp_stage": vp_stage}
    with torch.device("meta") if empty else contextlib.nullcontext():
        return _model(architecture, config, spec, engine=engine, **place)


def build_chunks(architecture: Architecture, *, split: PipelineSplit = _ONE_STAGE, **settings: Any) -> list[HiddenStateGPT]:
    """All model chunks of this rank, with the embedding in the first and the output layer in the last one of the pipeline.

    Args:
        split: how the layers are shared out over the pipeline.
        settings: of :func:`build_gpt`, the same for all.
    """
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


def _model(
    architecture: Architecture, config: TransformerConfig, spec: TransformerBlockSubmodules, *, engine: bool, **place: Any
) -> HiddenStateGPT:
    """The model, with the architecture's frequencies where megatron-core's rotary embedding is used."""
    model = HiddenStateGPT(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=architecture.padded_vocab_size,
        max_sequence_length=architecture.max_position_embeddings,
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="rope" if engine else "none",  # TorchAttention rotates
        **place,
    )
    model.logit_softcap = architecture.logit_softcap
    if model.pre_process and architecture.scaled_embedding:
        model.embedding.word_embeddings.scale = scale_of(architecture.hidden_size, config.params_dtype)
    if engine:
        model.rotary_pos_emb.inv_freq = architecture.rope.inverse_frequencies().to(device.current_device())
    return model


def _transformer_config(
    architecture: Architecture, *, engine: bool, split: PipelineSplit = _ONE_STAGE, **settings: Any
) -> TransformerConfig:
    split.layers(architecture.num_layers)  # which is an error where they cannot be shared out
    fuses_activation = compiles() and architecture.activation == "silu"
    windows = [window for window in architecture.windows if window is not None]  # a family has one size of window
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
        # The default is refused with variable lengths, experts or not.
        moe_token_dispatcher_type="alltoall",  # nosec B106  # no password
        **_pipeline_settings(split),
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


def _block_spec(
    architecture: Architecture,
    config: TransformerConfig,
    vp_stage: int | None,
    *,
    engine: bool,
    attn_mask_type: AttnMaskType,
) -> TransformerBlockSubmodules:
    if engine:
        from megatron.core.extensions.transformer_engine import TENorm

        layer, norm = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=architecture.qk_norm), TENorm
    else:
        layer, norm = _torch_layer_spec(architecture), TorchNorm
    attention = layer.submodules.self_attention
    attention.params["attn_mask_type"] = attn_mask_type
    if architecture.output_bias and not architecture.mlp_bias:
        attention.submodules.linear_proj = _with_bias(attention.submodules.linear_proj)
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config, vp_stage), layer_norm=norm)


def _torch_layer_spec(architecture: Architecture) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(qk_layernorm=architecture.qk_norm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = TorchNorm if architecture.pre_norm else IdentityOp
    if architecture.post_norm:
        layer.module = PostNormLayer
    local_rope = architecture.local_rope
    parts.self_attention.submodules.core_attention = ModuleSpec(
        module=TorchAttention,
        params={
            "softcap": architecture.attention_softcap,
            "rotary": RotaryTable(rope=architecture.rope),
            "local_rotary": None if local_rope is None else RotaryTable(rope=local_rope),
        },
    )
    # a ModuleSpec, and from megatron-core 0.18 on a partial
    mlp: dict[str, Any] = parts.mlp.keywords if isinstance(parts.mlp, functools.partial) else vars(parts.mlp)
    mlp["submodules"].activation_func = SwiGLU if architecture.activation == "silu" else GeGLU
    if architecture.qk_norm:
        queries, keys = _qk_norms(architecture)
        parts.self_attention.submodules.q_layernorm, parts.self_attention.submodules.k_layernorm = queries, keys
    return layer


def _qk_norms(architecture: Architecture) -> tuple[type | ModuleSpec, type | ModuleSpec]:
    if not architecture.all_heads_norm:
        return TorchNorm, TorchNorm
    counts = (
        (architecture.num_attention_heads, architecture.padded_attention_heads),
        (architecture.num_query_groups, architecture.padded_query_groups),
    )
    queries, keys = (
        ModuleSpec(module=AllHeadsNorm, params={"heads": heads, "padded_heads": padded}) for heads, padded in counts
    )
    return queries, keys


def _with_bias(linear: type) -> type:
    """The same linear layer with a bias; megatron-core has one switch for the attention's output and the MLP together."""

    class LinearWithBias(linear):  # type: ignore[misc, valid-type]
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **{**kwargs, "bias": True})

    return LinearWithBias
