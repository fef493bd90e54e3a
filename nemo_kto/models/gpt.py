"""GPT model: megatron-core's GPTModel, returning hidden states instead of logits."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.architecture.stages import ONE_STAGE, PipelineSplit
from nemo_kto.device import device
from nemo_kto.device.kernels import uses_transformer_engine
from nemo_kto.distributed.gradients import added_to_main_grad, main_grad_of
from nemo_kto.layers.attention import PackedSequences, RepeatedHeads, packed_attention
from nemo_kto.models.transformer import block_spec, transformer_config


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
    with torch.device("meta") if empty else contextlib.nullcontext():
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
    model.logit_softcap = architecture.logit_softcap
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
