"""Memory of a rank, part by part, from plain numbers: nothing is built and nothing is measured.

Every term has a name and a reason; there is no factor that makes the sum fit. What is certain (weights, gradients, optimizer
state, a reference on the host) does not depend on the data. What a pass needs depends on its longest rows, and is counted
for micro-batches that are full of answers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.lora import EMBEDDING, LoRASettings
from nemo_kto.architecture.parameters import RankParameter, rank_parameters
from nemo_kto.architecture.stages import ONE_STAGE, PipelineSplit
from nemo_kto.models.flops import Block, ModelFlops, blocks_of
from nemo_kto.planner.activations import Activations
from nemo_kto.planner.hardware import CONTEXT

_FP32 = 4
_PRODUCT_ROWS = 8192  # of the output weight's gradient at a time, as in nemo_kto.distributed.logprobs, which needs torch


@dataclass(frozen=True, kw_only=True)
class Training:
    """What decides how much memory a rank needs.

    Attributes:
        architecture: the model; also says the tensor-parallel size.
        element_bytes: of a value of the model: 4 in fp32, 2 in bf16.
        fp8: linear layers multiply in fp8.
        split: how the layers are shared out over the pipeline.
        data_parallel, context_parallel: degrees.
        expert_parallel: ranks over which the experts of a layer are shared out.
        sequence_parallel: activations are sharded over the sequence too.
        adapters: what is adapted; None where all weights are trained.
        distributed_optimizer: its state is sharded over the data- and context-parallel ranks.
        moment_bytes: of a value of each of Adam's two moments.
        offload: the part of its state that lies on the host of a GPU.
        swapped: the reference is a copy on the host: of all weights, of those that are trained, or None.
        reference_moves: it is synced with the policy, and has fp32 values besides.
        async_save: checkpoints are written from a copy on the host, whose memory is kept.
        recompute: None, "selective" or "full".
        recompute_modules: with "selective": "mlp", "core_attn" or both.
        recompute_method, recompute_layers: with "full": "uniform" keeps the input of each group of so many layers, "block"
            recomputes so many layers of a stage and keeps the others.
        micro_batch_tokens: the most that a micro-batch holds, on all ranks that share its sequences.
        micro_batch_width: tokens of its longest row; of its longest sequence where it is ``packed``.
        micro_batches: of a step, for each data-parallel rank.
        packed: sequences of a micro-batch lie one after the other in one row.
        logprob_chunk: tokens whose logits exist at the same time.
        largest_file: bytes of the largest file of weights, which is mapped while it is read; 0 where there is none yet.
        on_gpu: ranks compute on GPUs.
    """

    architecture: Architecture
    element_bytes: int
    fp8: bool = False
    split: PipelineSplit = ONE_STAGE
    data_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    sequence_parallel: bool = False
    adapters: LoRASettings | None = None
    distributed_optimizer: bool = True
    moment_bytes: int = _FP32
    offload: float = 0.0
    swapped: str | None = None
    reference_moves: bool = False
    async_save: bool = True
    recompute: str | None = None
    recompute_modules: tuple[str, ...] = ()
    recompute_method: str | None = None
    recompute_layers: int | None = None
    micro_batch_tokens: int
    micro_batch_width: int
    micro_batches: int
    packed: bool = False
    logprob_chunk: int
    largest_file: int = 0
    on_gpu: bool

    @property
    def tensor_parallel(self) -> int:
        """Ranks that share every layer."""
        return self.architecture.tensor_parallel

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights, and sum their gradients."""
        return self.data_parallel * self.context_parallel

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold one copy of a layer's experts; 1 of a dense model."""
        architecture = self.architecture
        return 1 if architecture.experts is None else self.expert_parallel * architecture.expert_tensor_parallel

    @property
    def rank_tokens(self) -> float:
        """The most that a rank has of a micro-batch."""
        return self.micro_batch_tokens / self.context_parallel

    @property
    def recomputed(self) -> frozenset[str]:
        """The modules of a layer that are recomputed one by one; none where whole layers are, or nothing is."""
        return frozenset(self.recompute_modules if self.recompute == "selective" else ())

    @functools.cached_property
    def parameters(self) -> list[list[RankParameter]]:
        """What a rank of each pipeline stage holds."""
        return [
            rank_parameters(
                self.architecture,
                split=self.split,
                expert_parallel=self.expert_parallel,
                stage=stage,
                adapters=self.adapters,
            )
            for stage in range(self.split.stages)
        ]

    @functools.cached_property
    def flops(self) -> ModelFlops:
        """Of a pass through the whole model."""
        return ModelFlops.of_model(self.architecture, adapters=self.adapters)

    @functools.cached_property
    def blocks(self) -> list[list[Block]]:
        """Of the layers of each pipeline stage. Of what other stages send there is a gradient, and of an embedding that is
        adapted, or asked for one because what follows is recomputed."""
        adapted = self.adapters is not None and EMBEDDING in self.adapters.modules
        asked = adapted or self.recompute is not None
        return [
            [
                block
                for number, layers in enumerate(chunks)
                for block in blocks_of(
                    self.architecture, layers, adapters=self.adapters, enters=asked or (stage, number) != (0, 0)
                )
            ]
            for stage, chunks in enumerate(self.split.layers(self.architecture.num_layers))
        ]

    def copies(self, parameter: RankParameter) -> int:
        """Ranks that hold the same values: data- and context-parallel ones; of an expert all of its stage with it."""
        if not parameter.of_expert:
            return self.replicas
        return self.replicas * self.tensor_parallel // self.expert_ranks

    def share(self, parameters: Iterable[RankParameter]) -> float:
        """How many of the trained values are this rank's, where the ranks that hold the same share them out."""
        return sum(each.numel / self.copies(each) for each in parameters if each.trained)

    def state_bytes(self) -> float:
        """The optimizer's, for each trained parameter that it keeps here: two moments, and in bf16 the fp32 value.

        Without what lies on the host.
        """
        main = 0 if self.element_bytes == _FP32 else _FP32
        return (1 - self.offload) * (2 * self.moment_bytes + main)

    def offloaded_bytes(self, parameters: Iterable[RankParameter]) -> float:
        """The optimizer's on the host: fp32 values, two moments and gradients of the part that is there.

        megatron-core takes the gradients from torch's page-locked memory, whose blocks are powers of two, and copies the
        bf16 values through it, of which torch keeps a block of each size.
        """
        trained = [each for each in parameters if each.trained]
        if not self.offload or not trained:
            return 0.0
        gradients = sum(_power_of_two(each.numel * _FP32) / self.copies(each) for each in trained)
        copied = sum({_power_of_two(each.numel * self.element_bytes // self.copies(each)) for each in trained})
        return self.offload * (3 * _FP32 * self.share(trained) + gradients) + copied

    def saved_bytes(self) -> float:
        """What a rank writes into a checkpoint, for each trained parameter of its share.

        The distributed optimizer stores the fp32 values of fp32 weights too, so that any layout and precision can read it.
        """
        main = _FP32 if self.distributed_optimizer or self.element_bytes < _FP32 else 0
        return self.element_bytes + main + 2 * self.moment_bytes


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of a rank.

    Attributes:
        stage: its pipeline stage.
        parameters, trained: their numbers.
        weights, gradients, optimizer: held all the time; gradients are summed in fp32.
        activations: kept for the backward passes of all micro-batches that are on their way at the same time.
        logprobs: hidden states and logits of the last stage.
        working: the largest of what exists only for a moment while gradients are reduced and weights updated.
        heap: what the C library keeps of freed activations, and cannot use again: see :attr:`device`.
        offloaded: of the optimizer, on the host.
        reference, checkpoint: copies on the host.
        file: of weights, mapped while the model is loaded.
        on_gpu: the host is another memory than the device.
    """

    stage: int
    parameters: int
    trained: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    logprobs: float
    working: float
    heap: float
    offloaded: float
    reference: float
    checkpoint: float
    file: float
    on_gpu: bool

    @property
    def certain(self) -> float:
        """What the device must hold whatever the data are."""
        held = self.weights + self.gradients + self.optimizer
        return held if self.on_gpu else held + self.reference

    @property
    def host(self) -> float:
        """On the host of a GPU."""
        return self.offloaded + self.reference + self.checkpoint if self.on_gpu else 0.0

    @property
    def device(self) -> float:
        """The most at one time.

        torch's allocator on a GPU uses the memory of activations again for the update. The C library gives freed memory back
        only from the end of its heap. On the CPU the memory of the first pass stays with the process; moments and copies,
        which then come to lie there and stay, leave holes in which the tensors of the next pass find no room, so that the
        heap grows by a second pass. Where large blocks are always mapped (MALLOC_MMAP_THRESHOLD_=131072) neither is so.
        """
        passes = self.activations + self.logprobs
        if self.on_gpu:
            return CONTEXT + self.certain + max(passes, self.working)
        loading = self.weights + self.gradients + self.file
        return max(loading, self.certain + passes + self.heap + self.working + self.checkpoint)


def rank_memory(training: Training, *, stage: int) -> RankMemory:
    """Memory of a rank of a pipeline stage."""
    parameters = training.parameters[stage]
    count, trained = (sum(each.numel for each in parameters if each.trained >= wanted) for wanted in (False, True))
    share = training.share(parameters)
    kept = share if training.distributed_optimizer else trained  # by the optimizer
    swapped = {None: 0, "all": count, "trained": trained}[training.swapped]
    moving = _FP32 if training.reference_moves and training.element_bytes < _FP32 else 0
    activations = _activations(training, stage, parameters)
    logprobs = _logprobs(training) if stage == training.split.stages - 1 else 0.0
    return RankMemory(
        stage=stage,
        parameters=count,
        trained=trained,
        weights=count * training.element_bytes + (_quantised(parameters) if training.fp8 else 0),
        gradients=trained * _FP32,
        optimizer=kept * training.state_bytes(),
        activations=activations,
        logprobs=logprobs,
        working=_working(training, parameters),
        heap=0.0 if training.on_gpu else activations + logprobs,
        offloaded=training.offloaded_bytes(parameters),
        reference=swapped * (training.element_bytes + moving),
        checkpoint=share * training.saved_bytes() if training.async_save else 0.0,
        file=0.0 if training.on_gpu else training.largest_file,
        on_gpu=training.on_gpu,
    )


def _quantised(parameters: list[RankParameter]) -> int:
    """Matrices in fp8, kept for all micro-batches of a step: as they are, and transposed for the backward pass."""
    return 2 * sum(each.numel for each in parameters if each.is_multiplied)


def _power_of_two(size: int) -> int:
    """The least power of two that is not less than a size in bytes."""
    return 1 << max(size - 1, 0).bit_length()


def stages_memory(training: Training) -> list[RankMemory]:
    """Of a rank of each pipeline stage."""
    return [rank_memory(training, stage=stage) for stage in range(training.split.stages)]


def saved_by_layers(training: Training) -> Activations:
    """The layers' formula."""
    return Activations(
        architecture=training.architecture,
        element_bytes=training.element_bytes,
        sequence_parallel=training.sequence_parallel,
        context_parallel=training.context_parallel,
        expert_parallel=training.expert_parallel,
        adapters=training.adapters,
        on_gpu=training.on_gpu,
        packed=training.packed,
    )


def _activations(training: Training, stage: int, parameters: list[RankParameter]) -> float:
    """What is kept at most of the micro-batches that have gone forward and not back, and what exists only for a moment."""
    saved, tokens = saved_by_layers(training), training.rank_tokens
    chunks = training.split.layers(training.architecture.num_layers)[stage]
    kept = [_kept_by_chunk(training, len(layers)) for layers in chunks]
    kept[0] += saved.embedding() * tokens if stage == 0 else 0
    most = training.split.most_kept(stage, training.micro_batches, kept)
    rotated: float = training.micro_batch_width  # a table, and its values for each token of a row or of a share of it
    if training.packed or training.context_parallel > 1:
        rotated += tokens if training.packed else training.micro_batch_width / training.context_parallel
    rotations = saved.rotations() * rotated * len(chunks)
    once = rotations + saved.gradients_of_layer() * tokens + _recomputation(training, max(map(len, chunks)))
    return most + once + _weight_gradient(training, parameters)


def _kept_by_chunk(training: Training, layers: int) -> float:
    """Of one micro-batch by a chunk of so many layers: activations, or inputs of what is recomputed."""
    each, inputs = _layer(training), 0
    if training.recompute == "full":
        count = min(training.recompute_layers or 1, layers)
        uniform = training.recompute_method != "block"
        inputs, layers = (-(-layers // max(count, 1)), 0) if uniform else (count, layers - count)
    return layers * each + inputs * saved_by_layers(training).layer_input() * training.rank_tokens


def _recomputation(training: Training, layers: int) -> float:
    """What one recomputation makes again in a chunk of so many layers."""
    if training.recompute != "full":
        saved = saved_by_layers(training)
        return (saved.layer() - saved.layer(training.recomputed)) * training.rank_tokens
    count = min(training.recompute_layers or 1, layers)
    return _layer(training) * (min(1, count) if training.recompute_method == "block" else count)


def _layer(training: Training) -> float:
    """Kept by a layer of one micro-batch, but for the modules that are recomputed one by one."""
    saved = saved_by_layers(training)
    return saved.layer(training.recomputed) * training.rank_tokens + saved.adapter_matrices(training.recomputed)


def _weight_gradient(training: Training, parameters: list[RankParameter]) -> float:
    """The largest gradient of a matrix in a layer, before it is added to the sum: in fp32 on the CPU it is added at once."""
    in_layers = [each.numel for each in parameters if each.trained and ".layers." in each.name]
    added_at_once = training.element_bytes == _FP32 and not training.on_gpu
    return 0.0 if added_at_once else max(in_layers, default=0) * training.element_bytes


def _logprobs(training: Training) -> float:
    """Hidden states that meet the vocabulary, and a chunk of logits in fp32; a soft cap's slopes.

    For a bf16 model a GPU multiplies the gradient of the logits as two bf16 matrices. The chunk is free again when their
    product with the hidden states is added to the gradient of the output weight: in place, or a block of rows at a time in
    a torch that cannot. Which of them is not known here; the block is counted, and is seldom more than the chunk.
    """
    saved, tokens = saved_by_layers(training), training.rank_tokens
    rows = training.architecture.padded_vocab_size // training.tensor_parallel
    chunk = min(training.logprob_chunk, tokens) * rows
    logits = chunk * (_FP32 if training.architecture.logit_softcap is None else 2 * _FP32)
    if training.on_gpu and training.element_bytes < _FP32:
        block = min(rows, _PRODUCT_ROWS) * training.architecture.hidden_size * _FP32 if training.adapters is None else 0
        logits = max(logits, chunk * 2 * training.element_bytes + max(chunk * _FP32, block))
    return saved.head() * tokens + logits


def _working(training: Training, parameters: list[RankParameter]) -> float:
    """An update on the CPU goes from weight to weight, with two tensors in fp32; torch's on a GPU makes one of each.

    Moments in bf16 are widened for it, both of them: Transformer Engine did so up to its version 2.12. An optimizer that is
    partly on the host is made twice, first of whole weights: those that stay on the GPU are there in fp32 for that time.

    gloo copies what it scatters and gathers, which the distributed optimizer's gradients and weights are, even to one rank.
    """
    trained = [each.numel for each in parameters if each.trained]
    share = training.share(parameters) if training.distributed_optimizer else sum(trained)
    if training.on_gpu:
        on_gpu, made = 1 - training.offload, sum(trained) * _FP32 if training.offload else 0.0
        return on_gpu * max(share * (_FP32 if training.moment_bytes == _FP32 else 2 * _FP32), made)
    return max(2 * _FP32 * min(max(trained, default=0), share), sum(trained) * _FP32 * training.distributed_optimizer)
