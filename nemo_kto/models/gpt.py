"""The GPT model: megatron-core's GPTModel, ending in hidden states instead of logits."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.architecture.stages import ONE_STAGE, PipelineSplit
from nemo_kto.device import device
from nemo_kto.device.kernels import uses_transformer_engine
from nemo_kto.models.layer_spec import block_spec
from nemo_kto.models.layers.embedding import RowEmbedding, scale_of
from nemo_kto.models.transformer_settings import recomputed, transformer_config

# Parameters whose size depends on how many zero heads the tensor-parallel size needs.
_PADDED_WITH_HEADS = (
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.linear_proj.weight",
    "self_attention.core_attention.softmax_offset",
    "self_attention.linear_qkv.lora_b",
    "self_attention.linear_qkv.lora_magnitude",
    "self_attention.linear_proj.lora_a",
    "embedding.word_embeddings.lora_b",
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

    def _preprocess(self, *args: object, padding_mask: Tensor | None = None, **kwargs: object) -> tuple[object, ...]:
        """As megatron-core's, which lets only a mask of the shape of the tokens pass; ours stays as it is."""
        *prepared, _ = super()._preprocess(*args, **kwargs)
        return (*prepared, padding_mask)

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
    split: PipelineSplit = ONE_STAGE,
    chunk: int = 0,
    context_parallel: int = 1,
    pre_process: bool = True,
    post_process: bool = True,
    sequence_parallel: bool = False,
    recompute_modules: Sequence[str] = (),
    attn_mask_type: AttnMaskType = AttnMaskType.causal,
    fp8: str | None = None,
    expert_parallel: int = 1,
    grouped_experts: bool = True,
    empty: bool = False,
    **recompute: str | int | None,
) -> HiddenStateGPT:
    """Build a chunk of this rank's part of the model, with random weights.

    Args:
        architecture: the model; also says the tensor-parallel size.
        params_dtype: dtype of parameters and activations.
        split, chunk: how the layers are shared out over the pipeline; which of this rank's model chunks this is, from 0.
        context_parallel, expert_parallel: ranks that share a sequence; over which the experts of a layer are shared out.
        pre_process, post_process: this chunk begins with the embedding; it ends with the output layer.
        sequence_parallel: share out the sequence where tensor parallelism does not share out the work.
        recompute_modules: mlp, core_attn or both, with recompute_granularity="selective".
        attn_mask_type: causal, or arbitrary if ``forward`` is given a mask, [batch, 1, sequence, sequence], True = not seen.
        fp8: "hybrid" (e4m3, and e5m2 for gradients) or "e4m3": Transformer Engine's linear layers multiply in it.
        grouped_experts: Transformer Engine multiplies the experts of a rank in one call; adapters need each by itself.
        empty: the weights have names and shapes but no values, and take no memory (torch's meta device), in megatron-core's
            own layers: adapters can be put on and added to the weights of another model.
        recompute: recompute_granularity, None to keep all activations, "selective" to forget those of ``recompute_modules``,
            "full" those of whole layers; then recompute_method, uniform or block, and recompute_num_layers a unit or in all.

    Raises:
        SplitError: the layers cannot be shared out like this.
    """
    engine = uses_transformer_engine(params_dtype) and not empty and not architecture.not_in_engine
    config = transformer_config(
        architecture,
        engine=engine,
        grouped_experts=grouped_experts,
        params_dtype=params_dtype,
        split=split,
        context_parallel_size=context_parallel,
        sequence_parallel=sequence_parallel and architecture.tensor_parallel > 1,
        **recompute,
        recompute_modules=recomputed(architecture, recompute_modules),
        fp8=fp8,
        expert_model_parallel_size=expert_parallel,
        use_cpu_initialization=empty,  # whose tensors are on the device of the context below
    )
    vp_stage = chunk if split.chunks > 1 else None
    spec = block_spec(architecture, config, vp_stage, engine=engine, attn_mask_type=attn_mask_type)
    with torch.device("meta") if empty else contextlib.nullcontext():
        ends = {"pre_process": pre_process, "post_process": post_process}
        return _model(architecture, config, spec, engine=engine, vp_stage=vp_stage, **ends)


def build_chunks(architecture: Architecture, *, split: PipelineSplit = ONE_STAGE, **settings: Any) -> list[HiddenStateGPT]:
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
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            # Gradients of experts have a group of their own also where the experts are not shared out: then the state of
            # the optimizer has one form, and experts that every tensor-parallel rank holds are summed over these ranks.
            parameter.allreduce = False
    if engine:
        model.rotary_pos_emb.inv_freq = architecture.rope.inverse_frequencies().to(device.current_device())
    return model
