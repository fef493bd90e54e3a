"""Memory of a rank, term by term, computed from the configuration without building or measuring anything.

Every term has a name and a reason; there is no fitted correction factor. Static memory (weights, gradients, optimizer state,
a reference on the host) does not depend on the data. The memory of a pass depends on the longest sequences, and is computed
for full micro-batches in which every token is part of a response.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.base_format import is_quantized
from nemo_kto.architecture.lora import EMBEDDING, LoRASettings
from nemo_kto.architecture.parameters import RankParameter, rank_parameters
from nemo_kto.architecture.stages import ONE_STAGE, PipelineSplit
from nemo_kto.layers.layer_settings import FORMATS
from nemo_kto.memory.activations import Activations
from nemo_kto.models.flops import Block, ModelFlops, blocks_of

CONTEXT = 2e9  # bytes of GPU memory for CUDA, its libraries and NCCL; an assumption
_FP32 = 4
_UPDATED_VALUES = 1 << 24  # values of a weight whose moments are fp32 at a time; copied from models.engine.optimizer
_PRODUCT_ROWS = 8192  # rows of the output weight's gradient at a time; copied from distributed.logprobs, which imports torch


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings that determine the memory of a rank."""

    architecture: Architecture  # also determines the tensor-parallel size
    element_bytes: int  # bytes per value of the model: 4 in fp32, 2 in bf16
    fp8: bool = False  # linear layers multiply in fp8
    split: PipelineSplit = ONE_STAGE
    data_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    sequence_parallel: bool = False  # activations between tensor-parallel regions are sharded over the sequence
    adapters: LoRASettings | None = None  # None if all weights are trained
    distributed_optimizer: bool = True  # its state is sharded over the data- and context-parallel ranks
    optimizer_instances: int = 1  # groups of these ranks, each with the whole state
    gradient_bytes: int = _FP32  # per value of the summed gradients
    moment_bytes: int = _FP32  # per value of each of Adam's two moments
    offload: float = 0.0  # fraction of the optimizer state that is stored in the host memory of a GPU
    swapped: str | None = None  # weights of which there is a copy for the reference, on the host: "all", "trained" or None
    reference_on_gpu: bool = False  # this copy is in the memory of the GPU instead
    reference_moves: bool = False  # the reference is synchronised with the policy, and also has fp32 values
    async_save: bool = True  # checkpoints are written from a copy on the host, whose memory is kept
    recompute: str | None = None  # None, "selective" or "full"
    recompute_modules: tuple[str, ...] = ()  # with "selective": "mlp", "core_attn" or both
    # With "full": "uniform" saves the input of each group of ``recompute_layers`` layers; "block" recomputes
    # ``recompute_layers`` layers of a chunk and saves the activations of the others.
    recompute_method: str | None = None
    recompute_layers: int | None = None
    micro_batch_tokens: int  # maximum, on all context-parallel ranks together
    micro_batch_width: int  # tokens of its longest row, or of its longest sequence if ``packed``
    micro_batches: int  # per step and data-parallel rank, if all sequences have the maximum length
    packed: bool = False
    repeats_keys: bool = False  # for each query head, in packed sequences
    logprob_chunk: int  # tokens whose logits exist at the same time
    logprob_summands: int = 1  # bf16 matrices whose sum is the gradient of the logits on a GPU
    largest_file: int = 0  # bytes of the largest file of weights, mapped while it is read; 0 if there is no file yet
    on_gpu: bool

    @property
    def tensor_parallel(self) -> int:
        """Tensor-parallel size."""
        return self.architecture.tensor_parallel

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same weights and sum their gradients."""
        return self.data_parallel * self.context_parallel

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that hold one copy of a layer's experts; 1 for a dense model."""
        return 1 if self.architecture.experts is None else self.expert_parallel * self.architecture.expert_tensor_parallel

    @property
    def rank_tokens(self) -> float:
        """Maximum number of tokens of a micro-batch on one rank."""
        return self.micro_batch_tokens / self.context_parallel

    @property
    def recomputed(self) -> frozenset[str]:
        """Modules of a layer that are recomputed selectively; empty with full or no recomputation."""
        return frozenset(self.recompute_modules if self.recompute == "selective" else ())

    @functools.cached_property
    def parameters(self) -> list[list[RankParameter]]:
        """Parameters of a rank of each pipeline stage."""
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
        """FLOPs of passes through the whole model."""
        return ModelFlops.of_model(self.architecture, adapters=self.adapters)

    @functools.cached_property
    def blocks(self) -> list[list[Block]]:
        """Blocks of the layers of each pipeline stage.

        The input of a stage has a gradient if it is received from another stage. The output of the embedding has one if the
        embedding has adapters, or because recomputation of the following layers requires it.
        """
        adapted = self.adapters is not None and EMBEDDING in self.adapters.modules
        has_gradient = adapted or self.recompute is not None
        found: list[list[Block]] = [[] for _ in range(self.split.stages)]
        for stage, chunks in enumerate(self.split.layers(self.architecture.num_layers)):
            for number, layers in enumerate(chunks):
                enters = has_gradient or (stage, number) != (0, 0)
                found[stage] += blocks_of(self.architecture, layers, adapters=self.adapters, enters=enters)
        return found

    @functools.cached_property
    def saved(self) -> Activations:
        """Formula for the activations that the layers save."""
        return Activations(**{field.name: getattr(self, field.name) for field in fields(Activations)})

    def copies(self, parameter: RankParameter) -> int:
        """Return how many ranks hold the same values of a parameter; for an expert, those of its stage that have it."""
        if not parameter.of_expert:
            return self.replicas
        return self.replicas * self.tensor_parallel // self.expert_ranks

    def share(self, parameters: Iterable[RankParameter]) -> float:
        """Return how many trained values each rank is assigned if those of an optimizer instance partition them."""
        return sum(each.total * self.optimizer_instances / self.copies(each) for each in parameters if each.trained)

    def quantized(self, parameters: Iterable[RankParameter]) -> list[RankParameter]:
        """Return the parameters that are stored in the format of a frozen base."""
        return [each for each in parameters if is_quantized(each.name, self.architecture)]

    def weight_bytes(self, parameters: Iterable[RankParameter]) -> float:
        """Return the bytes of weights; in the format of a frozen base they are codes and scales."""
        stored = self.element_bytes * sum(each.total for each in parameters)
        for each in self.quantized(parameters):
            form = FORMATS[str(self.architecture.base_format)]
            stored += each.count * form.bytes_of(each.shape) - each.total * self.element_bytes
        return stored

    def dense_bytes(self, parameters: Iterable[RankParameter]) -> float:
        """Return the bytes of the largest quantized weight while its dense values are computed for a product.

        These are the values in fp32, and at first codes of 4 bits as int32, then the values in bf16.
        """
        if not (sizes := [each.numel for each in self.quantized(parameters)]):
            return 0.0
        bits = FORMATS[str(self.architecture.base_format)].bits
        codes = _FP32 * bits // 8 if bits < 8 else 0
        return max(sizes) * (_FP32 + max(codes, self.element_bytes % _FP32))

    def state_bytes(self) -> float:
        """Return the bytes of optimizer state on the device per trained value: two moments, and in bf16 the fp32 value."""
        main = 0 if self.element_bytes == _FP32 else _FP32
        return (1 - self.offload) * (2 * self.moment_bytes + main)

    def offloaded_bytes(self, parameters: Iterable[RankParameter]) -> float:
        """Return the bytes of the optimizer on the host: fp32 values, two moments and gradients of the offloaded fraction.

        megatron-core allocates the gradients in torch's page-locked memory, whose blocks are powers of two, and copies the
        bf16 values through such memory, of which torch keeps a block of each size.
        """
        trained = [each for each in parameters if each.trained]
        if not self.offload or not trained:
            return 0.0
        shards = [(each, self.copies(each) // self.optimizer_instances) for each in trained]
        gradients = sum(each.count * power_of_two(each.numel * _FP32) / ranks for each, ranks in shards)
        copied = sum({power_of_two(each.numel * self.element_bytes // ranks) for each, ranks in shards})
        return self.offload * (3 * _FP32 * self.share(trained) + gradients) + copied


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of a rank, in bytes except for the counts."""

    stage: int
    parameters: int  # number of values
    trained: int  # number of trained values
    weights: float  # held during the whole run, as the next two
    gradients: float  # summed over the micro-batches
    optimizer: float
    activations: float  # saved for the backward passes of all in-flight micro-batches
    logprobs: float  # hidden states and logits of the last stage
    dense: float  # the largest weight that is dequantized for a product, or quantized; 0 if none is
    working: float  # the largest temporary during the reduction of gradients and the update of weights
    heap: float  # allocator fragmentation: freed activations that the C library keeps and cannot reuse, see :attr:`device`
    offloaded: float  # optimizer state on the host
    reference: float  # copy on the host, or on the device if ``reference_on_device``
    checkpoint: float  # copy on the host
    file: float  # of weights, mapped while the model is loaded
    on_gpu: bool  # host memory is separate from device memory
    reference_on_device: bool  # always without a GPU

    @property
    def static(self) -> float:
        """Bytes on the device that do not depend on the data."""
        static = self.weights + self.gradients + self.optimizer
        return static + (self.reference if self.reference_on_device else 0.0)

    @property
    def host(self) -> float:
        """Bytes in the host memory of a GPU; 0 without a GPU."""
        reference = 0.0 if self.reference_on_device else self.reference
        return self.offloaded + reference + self.checkpoint if self.on_gpu else 0.0

    @property
    def device(self) -> float:
        """Peak bytes on the device.

        On a GPU torch's allocator reuses the memory of activations for the update. On the CPU the C library returns freed
        memory only from the end of its heap, so the memory of the first pass stays with the process. Moments and copies are
        then allocated in it and stay, and leave holes that are too small for the tensors of the next pass, so the heap grows
        by a second pass. If large blocks are always mapped (MALLOC_MMAP_THRESHOLD_=131072), neither happens.
        """
        passes = self.activations + self.logprobs
        if self.on_gpu:
            return CONTEXT + self.static + max(passes + self.dense, self.working)
        loading = self.weights + self.gradients + self.file + self.dense  # a weight is dense before it is quantized
        return max(loading, self.static + passes + self.dense + self.heap + self.working + self.checkpoint)


def rank_memory(training: Training, *, stage: int) -> RankMemory:
    """Return the memory of a rank of a pipeline stage."""
    parameters = training.parameters[stage]
    count, trained = (sum(each.total for each in parameters if each.trained >= wanted) for wanted in (False, True))
    share = training.share(parameters)
    # The distributed optimizer also stores the fp32 values of fp32 weights, so that any layout and precision can read them.
    saved_bytes = training.element_bytes + 2 * training.moment_bytes
    saved_bytes += _FP32 if training.distributed_optimizer or training.element_bytes < _FP32 else 0
    with_state = share if training.distributed_optimizer else trained  # values with optimizer state on this rank
    # fp8 matrices are kept for all micro-batches of a step: as stored, and transposed for the backward pass
    quantised = 2 * sum(each.total for each in parameters if each.is_multiplied) if training.fp8 else 0
    swapped = {None: 0, "all": count, "trained": trained}[training.swapped]
    moving = _FP32 if training.reference_moves and training.element_bytes < _FP32 else 0
    activations = _activations(training, stage, parameters)
    logprobs = _logprobs(training) if stage == training.split.stages - 1 else 0.0
    return RankMemory(
        stage=stage,
        parameters=count,
        trained=trained,
        weights=training.weight_bytes(parameters) + quantised,
        gradients=trained * training.gradient_bytes,
        optimizer=with_state * training.state_bytes(),
        activations=activations,
        logprobs=logprobs,
        dense=training.dense_bytes(parameters),
        working=_working(training, stage, parameters),
        heap=0.0 if training.on_gpu else activations + logprobs,
        offloaded=training.offloaded_bytes(parameters),
        reference=swapped * (training.element_bytes + moving),
        checkpoint=share / training.optimizer_instances * saved_bytes if training.async_save else 0.0,
        file=0.0 if training.on_gpu else training.largest_file,
        on_gpu=training.on_gpu,
        reference_on_device=training.reference_on_gpu or not training.on_gpu,
    )


def power_of_two(number: float) -> int:
    """Return the smallest power of two that is at least ``number``."""
    return 1 << max(math.ceil(number) - 1, 0).bit_length()


def stages_memory(training: Training) -> list[RankMemory]:
    """Return the memory of a rank of each pipeline stage."""
    return [rank_memory(training, stage=stage) for stage in range(training.split.stages)]


def _activations(training: Training, stage: int, parameters: list[RankParameter]) -> float:
    """Return the peak bytes of saved activations of in-flight micro-batches, plus temporaries."""
    saved, tokens = training.saved, training.rank_tokens
    chunks = training.split.layers(training.architecture.num_layers)[stage]
    kept = [_kept_by_chunk(training, len(layers)) for layers in chunks]
    kept[0] += saved.embedding() * tokens if stage == 0 else 0
    most = training.split.most_kept(stage, training.micro_batches, kept)
    rotated: float = training.micro_batch_width  # the table's positions; below also its values gathered for each token
    if training.packed or training.context_parallel > 1:
        rotated += tokens if training.packed else training.micro_batch_width / training.context_parallel
    rotations = saved.tables() * rotated * len(chunks)
    once = rotations + saved.gradients_of_layer() * tokens + _recomputation(training, max(map(len, chunks)))
    # a layer's largest weight gradient before it is accumulated; in fp32 on the CPU it is added directly
    in_layers = [each.numel for each in parameters if each.trained and each.layers]
    added_at_once = training.element_bytes == _FP32 and not training.on_gpu
    return most + once + (0 if added_at_once else max(in_layers, default=0) * training.element_bytes)


def _kept_by_chunk(training: Training, layers: int) -> float:
    """Return the bytes that a chunk saves for one micro-batch: activations, or only the inputs of recomputed layers."""
    each, inputs = _layer(training), 0
    if training.recompute == "full":
        count = min(training.recompute_layers or 1, layers)
        uniform = training.recompute_method != "block"
        inputs, layers = (-(-layers // max(count, 1)), 0) if uniform else (count, layers - count)
    return layers * each + inputs * training.saved.layer_input() * training.rank_tokens


def _recomputation(training: Training, layers: int) -> float:
    """Return the bytes that one recomputation restores in a chunk of ``layers`` layers."""
    if training.recompute != "full":
        return (training.saved.layer() - training.saved.layer(training.recomputed)) * training.rank_tokens
    count = min(training.recompute_layers or 1, layers)
    return _layer(training) * (min(1, count) if training.recompute_method == "block" else count)


def _layer(training: Training) -> float:
    """Return the bytes that a layer saves for one micro-batch, except in selectively recomputed modules."""
    kept = training.saved.layer(training.recomputed) * training.rank_tokens
    return kept + training.saved.adapter_matrices(training.recomputed)


def _logprobs(training: Training) -> float:
    """Return the bytes of hidden states whose logits are computed, of a chunk of fp32 logits, and of a soft cap's slopes.

    For a bf16 model a GPU multiplies the gradient of the logits as one or two bf16 matrices. The fp32 chunk is freed before
    their product with the hidden states is added to the gradient of the output weight: in place, or a block of rows at a
    time if torch cannot. The planner does not know which applies; it counts the block, seldom larger than the chunk. If
    gradients are summed in bf16, that of a micro-batch is first computed whole, in fp32.
    """
    rows = training.architecture.padded_vocab_size // training.tensor_parallel
    chunk = min(training.logprob_chunk, training.rank_tokens) * rows
    logits = chunk * (_FP32 if training.architecture.logit_softcap is None else 2 * _FP32)
    if training.on_gpu and training.element_bytes < _FP32:
        block = min(rows, _PRODUCT_ROWS) * training.architecture.hidden_size * _FP32 if training.adapters is None else 0
        logits = max(logits, chunk * training.logprob_summands * training.element_bytes + max(chunk * _FP32, block))
    if training.gradient_bytes < _FP32 and training.adapters is None:
        whole = rows * training.architecture.hidden_size
        logits = max(logits + whole * _FP32, whole * (_FP32 + training.element_bytes))
    return training.saved.head() * training.rank_tokens + logits


def _working(training: Training, stage: int, parameters: list[RankParameter]) -> float:
    """Return the bytes of the largest temporary of the reduction of gradients and the update of weights.

    On the CPU weights are updated one after the other, with two fp32 tensors each. On a GPU one kernel updates all weights,
    without temporaries. Both bf16 moments are converted to fp32 for the update, a slice of a weight at a time. An optimizer
    that is partly on the host is built twice, first from whole weights: during that time the weights that stay on the GPU
    exist there in fp32. gloo copies the tensors that it scatters and gathers, here the distributed optimizer's gradients and
    weights, even in a group of one rank. Gradients that are summed in bf16 are converted to fp32 for the update; before, the
    gradient of the embedding is computed whole, in fp32, when most activations of its micro-batch are freed.
    """
    trained = sum(each.total for each in parameters if each.trained)
    share = training.share(parameters) if training.distributed_optimizer else trained
    updated = min(max((each.numel for each in parameters if each.trained), default=0), share)  # values at a time
    whole, converted, widened = 0.0, 0.0, 0.0
    if training.gradient_bytes < _FP32:
        converted = share * _FP32
        if stage == 0 and training.adapters is None:
            table = training.architecture.padded_vocab_size // training.tensor_parallel * training.architecture.hidden_size
            whole = table * (_FP32 + training.element_bytes)
    if training.moment_bytes < _FP32:
        updated = min(updated, _UPDATED_VALUES)
        widened = 2 * _FP32 * updated
    if training.on_gpu:
        return max(whole, converted + widened, (1 - training.offload) * trained * _FP32 if training.offload else 0.0)
    return max(whole, converted + 2 * _FP32 * updated + widened, trained * _FP32 * training.distributed_optimizer)
