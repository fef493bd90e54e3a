"""Memory of a rank and resources of a step, against manual values."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.architecture.architecture import Architecture, read_architecture
from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.architecture.parameters import rank_parameters
from nemo_kto.architecture.stages import PipelineSplit
from nemo_kto.distributed import logprobs
from nemo_kto.memory import rank_memory as memory_module
from nemo_kto.memory.activations import Activations
from nemo_kto.memory.hardware import GPUS
from nemo_kto.memory.rank_memory import RankMemory, Training, rank_memory, stages_memory
from nemo_kto.memory.run_plan import Step
from nemo_kto.models.engine import optimizer as optimizers
from nemo_kto.models.flops import ModelFlops, Passes
from nemo_kto.tools.plan.speed import step_speed, step_traffic
from tests.helpers.tiny_models import make_checkpoint

TOKENS, WIDTH, LAYERS, HIDDEN = 512, 128, 4, 64


@pytest.fixture(scope="module")
def architecture(tmp_path_factory: pytest.TempPathFactory) -> Architecture:
    return read_architecture(make_checkpoint(tmp_path_factory.mktemp("memory"), "llama"), tensor_parallel=1)


def training(architecture: Architecture, **changes: Any) -> Training:
    settings: dict[str, Any] = {
        "element_bytes": 4,
        "micro_batch_tokens": TOKENS,
        "micro_batch_width": WIDTH,
        "micro_batches": 8,
        "logprob_chunk": 100,
        "on_gpu": False,
    }
    return Training(architecture=architecture, **settings | changes)


def first(architecture: Architecture, **changes: Any) -> RankMemory:
    return rank_memory(training(architecture, **changes), stage=0)


@pytest.mark.parametrize(
    ("changes", "weights", "optimizer", "checkpoint"),
    [
        ({"element_bytes": 4, "distributed_optimizer": False}, 4, 8, 12),
        ({"element_bytes": 4, "distributed_optimizer": False, "data_parallel": 4}, 4, 8, 3),
        ({"element_bytes": 4, "data_parallel": 4}, 4, 2, 4),
        ({"element_bytes": 2, "data_parallel": 4}, 2, 3, 3.5),
        ({"element_bytes": 2, "distributed_optimizer": False, "async_save": False}, 2, 12, 0),
        ({"element_bytes": 2, "data_parallel": 4, "moment_bytes": 2}, 2, 2, 2.5),
        ({"element_bytes": 2, "data_parallel": 4, "optimizer_instances": 2}, 2, 6, 3.5),
        ({"element_bytes": 4, "data_parallel": 4, "context_parallel": 2, "optimizer_instances": 4}, 4, 4, 2),
    ],
)
def test_bytes_per_parameter(
    architecture: Architecture, changes: dict[str, Any], weights: float, optimizer: float, checkpoint: float
) -> None:
    memory, number = first(architecture, **changes), sum(each.total for each in rank_parameters(architecture))
    assert (memory.parameters, memory.trained) == (number, number)
    each = (memory.weights, memory.gradients, memory.optimizer, memory.checkpoint)
    assert each == (number * weights, number * 4, number * optimizer, number * checkpoint)
    assert memory.static == number * (weights + 4 + optimizer)


def test_gradients_in_bf16(architecture: Architecture) -> None:
    """Half the bytes during the whole run. The update needs this rank's share in fp32; gradients of the embedding and of the
    output weight are sums in fp32 over a micro-batch, then in bf16."""
    changes: dict[str, Any] = {"element_bytes": 2, "data_parallel": 4, "on_gpu": True}
    wide, narrow = first(architecture, **changes), first(architecture, **changes, gradient_bytes=2)
    table = architecture.padded_vocab_size * HIDDEN
    assert (wide.gradients, narrow.gradients) == (4 * wide.trained, 2 * wide.trained)
    assert (wide.working, narrow.working) == (0, max(wide.trained, 6 * table))
    assert (narrow.activations, narrow.optimizer) == (wide.activations, wide.optimizer)
    assert narrow.logprobs - wide.logprobs == 4 * table
    adapted = {**changes, "adapters": LoRASettings(rank=4, alpha=4)}
    assert first(architecture, **adapted, gradient_bytes=2).logprobs == first(architecture, **adapted).logprobs
    step = Step(rows=8, width=16, micro_batches=8, forward_only=0)
    for instances in (1, 2):
        several = {**changes, "optimizer_instances": instances}
        traffic = [step_traffic(training(architecture, **several, gradient_bytes=size), step, stage=0) for size in (4, 2)]
        assert traffic[0].data - traffic[1].data == 2 * wide.trained * (1 - instances / 4)
        assert traffic[1].instances == traffic[0].instances / 2


def test_replicas_of_experts_shard_their_state(tmp_path: Path) -> None:
    """A rank has 4 of the 8 experts of 3 matrices of 32 x 64 in 3 layers, which 4 of 8 ranks have; all have the others."""
    mixture = read_architecture(make_checkpoint(tmp_path, "qwen3_moe"), tensor_parallel=1)
    memory = first(mixture, data_parallel=8, expert_parallel=2)
    of_experts = 3 * 4 * 3 * 32 * HIDDEN
    others = sum(each.total for each in rank_parameters(mixture) if ".experts." not in each.name)
    assert memory.parameters == of_experts + others
    assert memory.optimizer == 8 * (of_experts / 4 + others / 8)
    assert memory.checkpoint == 16 * (of_experts / 4 + others / 8)
    halved = first(replace(mixture, tensor_parallel=2, expert_tensor_parallel=2), data_parallel=4, expert_parallel=2)
    assert halved.parameters < memory.parameters
    split = training(mixture, data_parallel=8, expert_parallel=2)
    traffic = step_traffic(split, Step(rows=8, width=16, micro_batches=8, forward_only=0), stage=0)
    of_token = 2 * HIDDEN * 4 + 4  # there and back, and its weight
    counts = split.micro_batches * 8 * 8  # integers of 8 bytes, for 8 experts
    assert traffic.expert == 3 * (2 * 3 * (1 / 2) * of_token * 16 + counts), "layers; passes, top-k, half sent away"


def test_only_adapters_have_gradients_and_optimizer_state(architecture: Architecture) -> None:
    memory = first(architecture, element_bytes=2, adapters=LoRASettings(rank=4, alpha=4))
    heads = 8 * 8 + 2 * 4 * 8  # rows of queries, keys and values
    assert memory.trained == LAYERS * (3 * 4 * HIDDEN + heads * 4)
    assert memory.parameters == first(architecture).parameters + memory.trained
    assert (memory.gradients, memory.optimizer) == (4 * memory.trained, 12 * memory.trained)


@pytest.mark.parametrize(
    ("changes", "bytes_each", "of"),
    [
        ({"swapped": "all"}, 4, "parameters"),
        ({"swapped": "all", "element_bytes": 2}, 2, "parameters"),
        ({"swapped": "all", "element_bytes": 2, "reference_moves": True}, 6, "parameters"),
        ({"swapped": "trained", "adapters": LoRASettings(rank=4, alpha=4)}, 4, "trained"),
        ({}, 0, "parameters"),
    ],
)
def test_the_reference_in_host_memory(architecture: Architecture, changes: dict[str, Any], bytes_each: int, of: str) -> None:
    memory = first(architecture, **changes)
    assert memory.reference == bytes_each * getattr(memory, of)
    assert memory.static == memory.weights + memory.gradients + memory.optimizer + memory.reference
    on_gpu = first(architecture, **changes, on_gpu=True)
    assert on_gpu.static == memory.static - memory.reference
    assert on_gpu.host == memory.reference + memory.checkpoint
    moved = first(architecture, **changes, on_gpu=True, reference_on_gpu=True)
    assert (moved.static - on_gpu.static, moved.device - on_gpu.device) == (memory.reference, memory.reference)
    assert on_gpu.host - moved.host == memory.reference


def test_fp8_copies_of_matrices(architecture: Architecture) -> None:
    """Each as it is and transposed, a byte a value: attention (8 heads and 2 x 4 of 8, output) and gated MLP."""
    plain, quantised = (first(architecture, element_bytes=2, fp8=fp8, on_gpu=True) for fp8 in (False, True))
    matrices = HIDDEN * (8 * 8 + 2 * 4 * 8) + 8 * 8 * HIDDEN + 3 * HIDDEN * architecture.ffn_hidden_size
    assert quantised.weights - plain.weights == 2 * LAYERS * matrices
    assert quantised.device - plain.device == 2 * LAYERS * matrices


def test_the_offloaded_part_of_the_optimizer(architecture: Architecture) -> None:
    """Main weights, moments and gradients there, these and copies of the weights in powers of two; and while it is made, all
    main weights of the GPU's part."""
    memory = first(architecture, element_bytes=2, data_parallel=4, offload=0.75, on_gpu=True)
    assert memory.optimizer == memory.trained * 12 / 4 / 4
    numels = [each.numel for each in rank_parameters(architecture) if each.trained for _ in each.names]
    rounded = [2 ** math.ceil(math.log2(4 * numel)) for numel in numels]
    copied = {2 ** math.ceil(math.log2(2 * numel / 4)) for numel in numels}
    assert sum(rounded) > 4 * memory.trained, "some are not a power of two"
    assert memory.offloaded == (memory.trained * 12 + sum(rounded)) / 4 * 3 / 4 + sum(copied)
    assert memory.host == memory.offloaded + memory.checkpoint
    assert memory.working == memory.trained * 4 / 4
    assert first(architecture, element_bytes=2, data_parallel=4, offload=0.5, on_gpu=True).working == 2 * memory.trained
    assert first(architecture, element_bytes=2, data_parallel=4, offload=1.0, on_gpu=True).working == 0


def test_in_flight_micro_batches_of_a_stage(architecture: Architecture) -> None:
    saved = Activations(architecture=architecture, element_bytes=4)
    layer = saved.layer() * TOKENS
    moment = saved.gradients_of_layer() * TOKENS + saved.tables() * WIDTH
    stages = stages_memory(training(architecture, split=PipelineSplit(stages=4)))
    expected = [count * layer + moment for count in (4, 3, 2, 1)]
    expected[0] += 4 * saved.embedding() * TOKENS
    assert [stage.activations for stage in stages] == expected
    few = stages_memory(training(architecture, split=PipelineSplit(stages=4), micro_batches=2))
    assert few[0].activations == 2 * layer + 2 * saved.embedding() * TOKENS + moment
    assert [stage.logprobs > 0 for stage in stages] == [False, False, False, True]


def test_in_flight_micro_batches_of_virtual_stages(architecture: Architecture) -> None:
    """Two layers a stage in two chunks of one: of five passes on the first stage four are in its first chunk."""
    saved = Activations(architecture=architecture, element_bytes=4)
    layer, split = saved.layer() * TOKENS, PipelineSplit(stages=2, chunks=2)
    moment = saved.gradients_of_layer() * TOKENS + 2 * saved.tables() * WIDTH
    stages = stages_memory(training(architecture, split=split))
    assert [stage.activations for stage in stages] == [
        5 * layer + moment + 4 * saved.embedding() * TOKENS,
        3 * layer + moment,
    ]
    assert [stage.parameters for stage in stages] == [
        stage.parameters for stage in stages_memory(training(architecture, split=PipelineSplit(stages=2)))
    ]


def test_uneven_stages(architecture: Architecture) -> None:
    stages = stages_memory(training(architecture, split=PipelineSplit(stages=2, first=3)))
    saved = Activations(architecture=architecture, element_bytes=4)
    assert (
        stages[0].activations - stages[1].activations
        == (2 * 3 - 1) * saved.layer() * TOKENS + 2 * saved.embedding() * TOKENS
    )
    of_layer = sum(each.numel for each in rank_parameters(architecture) if 0 in each.layers)
    ends = architecture.padded_vocab_size * HIDDEN
    assert [stage.parameters for stage in stages] == [3 * of_layer + ends, of_layer + ends + HIDDEN]


@pytest.mark.parametrize(
    ("method", "count", "inputs", "kept", "again"), [("uniform", 1, 4, 0, 1), ("uniform", 3, 2, 0, 3), ("block", 3, 3, 1, 1)]
)
def test_recomputed_layers_save_only_inputs(
    architecture: Architecture, method: str, count: int, inputs: int, kept: int, again: int
) -> None:
    memory = first(architecture, recompute="full", recompute_method=method, recompute_layers=count)
    saved = Activations(architecture=architecture, element_bytes=4)
    of_tokens = inputs * 4 * HIDDEN + saved.embedding() + saved.gradients_of_layer()
    assert memory.activations == ((kept + again) * saved.layer() + of_tokens) * TOKENS + saved.tables() * WIDTH


def test_memory_of_a_chunk_of_logits(architecture: Architecture) -> None:
    """Logits are in fp32 for bf16 models too; a GPU multiplies their gradient in bf16, 8192 rows at a time."""
    rows, head = architecture.padded_vocab_size, HIDDEN * (4 + 3 * 4 + 4) + 4
    assert first(architecture).logprobs == TOKENS * head + 100 * rows * 4
    of_bf16 = TOKENS * (HIDDEN * (8 + 3 * 2 + 4) + 4)
    assert first(architecture, element_bytes=2).logprobs == of_bf16 + 100 * rows * 4
    gpu: dict[str, Any] = {"element_bytes": 2, "on_gpu": True}
    hidden = first(architecture, **gpu, adapters=LoRASettings(rank=4, alpha=4), logprob_chunk=0).logprobs
    for summands in (1, 2):
        gpu["logprob_summands"], of_gradient = summands, summands * 2
        assert first(architecture, **gpu).logprobs == hidden + 100 * rows * of_gradient + rows * max(100, HIDDEN) * 4
        adapted = first(architecture, **gpu, adapters=LoRASettings(rank=4, alpha=4)).logprobs
        assert adapted == hidden + 100 * rows * (of_gradient + 4)
        large = first(replace(architecture, vocab_size=100_000), **gpu, logprob_chunk=1).logprobs
        assert large == hidden + 100_000 * of_gradient + 8192 * HIDDEN * 4
    assert memory_module._PRODUCT_ROWS == logprobs._PRODUCT_ROWS


def test_the_peak_of_memory(architecture: Architecture) -> None:
    cpu, gpu = first(architecture), first(architecture, on_gpu=True)
    passes = cpu.activations + cpu.logprobs
    assert cpu.device == cpu.static + 2 * passes + cpu.working + cpu.checkpoint, "the allocator keeps one more pass"
    assert gpu.device == 2e9 + gpu.static + max(gpu.activations + gpu.logprobs, gpu.working)
    assert first(architecture, largest_file=10**9).device == 10**9 + cpu.weights + cpu.gradients
    assert first(architecture, largest_file=10**9, on_gpu=True).device == gpu.device


def test_memory_of_an_optimizer_step(architecture: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's copy of all gradients, or two tensors like the largest weight; on a GPU one like each that the rank updates."""
    memory, largest = first(architecture), architecture.padded_vocab_size * HIDDEN
    assert memory.working == 4 * memory.trained
    assert first(architecture, distributed_optimizer=False).working == 2 * 4 * largest
    assert first(architecture, on_gpu=True, data_parallel=4).working == 0
    assert memory_module._UPDATED_VALUES == optimizers._VALUES
    monkeypatch.setattr(memory_module, "_UPDATED_VALUES", largest // 4)
    assert first(architecture, on_gpu=True, moment_bytes=2).working == 2 * largest, "widened, a quarter at a time"


def test_bytes_sent_for_adapters(architecture: Architecture) -> None:
    """Backward, the gradient of A x of three parts in each layer, and none of the input of the first one."""
    step, settings = Step(rows=32, width=WIDTH, micro_batches=8, forward_only=1, disabled=1), LoRASettings(rank=4, alpha=4)
    shared = training(replace(architecture, tensor_parallel=2), data_parallel=4, adapters=settings)
    tokens, answers = 32 * WIDTH / 4, 32 * (WIDTH - 1) / 4
    all_reduce, of_logprobs = 2 * (2 - 1) / 2 * tokens * HIDDEN * 4, 2 * 3 * 4 * answers + HIDDEN * 4 * answers
    of_adapters = LAYERS * 2 * (2 - 1) / 2 * tokens * 3 * 4 * 4
    traffic, trained = step_traffic(shared, step, stage=0), rank_memory(shared, stage=0).trained
    assert traffic.tensor == (LAYERS * 2 * 3 - 1 + 2) * all_reduce + of_logprobs + of_adapters
    assert traffic.data == 3 / 4 * 8 * trained
    last = LoRASettings(rank=4, alpha=4, layers=(LAYERS,))
    staged = training(architecture, data_parallel=2, split=PipelineSplit(stages=2), adapters=last)
    first, second = (step_traffic(staged, step, stage=stage).data for stage in (0, 1))
    assert first == 0, "nothing is trained on this stage"
    assert second == 1 / 2 * 8 * rank_memory(staged, stage=1).trained


def test_estimated_seconds_of_a_step(architecture: Architecture) -> None:
    step, gpu = Step(rows=32, width=WIDTH, micro_batches=8, forward_only=1), replace(GPUS["h100"], link=None)
    alone = step_speed(training(architecture, element_bytes=2, on_gpu=True), step, gpu)
    forward = ModelFlops.of_model(architecture).forward.of_sequences(32, WIDTH)
    assert (alone.flops, alone.bubble) == (4 * forward, 0)
    assert alone.seconds == pytest.approx(4 * forward / (0.5 * 989e12))
    settings = LoRASettings(rank=4, alpha=4)
    adapted, flops = training(architecture, adapters=settings), ModelFlops.of_model(architecture, adapters=settings)
    for disabled in (0, 1):
        passes = Passes(forward=2 - disabled, disabled=disabled, backward=1)
        expected = flops.of_passes(passes).of_sequences(32, WIDTH)
        assert step_speed(adapted, replace(step, disabled=disabled), gpu).flops == expected
    assert step_speed(training(architecture, split=PipelineSplit(stages=4)), step, gpu).bubble == 3 / 11


def test_the_slowest_stage_determines_the_time_of_a_pipeline(architecture: Architecture) -> None:
    step, gpu = Step(rows=32, width=WIDTH, micro_batches=8, forward_only=0), replace(GPUS["h100"], link=None)
    forward = ModelFlops.of_model(architecture).forward
    head = 3 * 32 * (WIDTH - 1) * forward.per_response_token
    layers = 3 * forward.of_sequences(32, WIDTH) - head

    def work(**split: Any) -> float:
        speed = step_speed(training(architecture, element_bytes=2, split=PipelineSplit(stages=2, **split)), step, gpu)
        return speed.seconds * (1 - speed.bubble) * 0.5 * 989e12

    assert work() == pytest.approx(layers / 2 + head)
    assert work(chunks=2) == pytest.approx(layers / 2 + head)
    assert work(last=1) == pytest.approx(max(layers * 3 / 4, layers / 4 + head))


@pytest.mark.parametrize(
    ("form", "element", "per_value", "in_product"),
    [
        ("nf4", 2, 0.5 + 4 / 64, 4 + 2),
        ("nf4", 4, 0.5 + 4 / 64, 4 + 2),
        ("fp8", 2, 1 + 4 / 128, 4 + 2),
        ("fp8", 4, 1 + 4 / 128, 4),
        ("mxfp4", 2, 0.5 + 1 / 32, 4 + 2),
    ],
)
def test_a_quantized_base(architecture: Architecture, form: str, element: int, per_value: float, in_product: int) -> None:
    """Codes and scales of the linear layers; for a product the values in fp32, with codes as int32 or the values in bf16."""
    settings: dict[str, Any] = {"element_bytes": element, "adapters": LoRASettings(rank=4, alpha=4)}
    dense, found = first(architecture, **settings), first(replace(architecture, base_format=form), **settings)
    linear = [each for each in rank_parameters(architecture) if each.is_multiplied]
    values = sum(each.total for each in linear)
    assert found.weights == pytest.approx(dense.weights - values * (element - per_value))
    assert (found.dense, dense.dense) == (in_product * max(each.numel for each in linear), 0)
    assert found.device - found.weights - found.dense == dense.device - dense.weights
    loading = first(replace(architecture, base_format=form), **settings, largest_file=10**9)
    assert loading.device == 10**9 + loading.weights + loading.gradients + loading.dense
