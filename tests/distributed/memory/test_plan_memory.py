"""The planned parameters and memory of a rank, compared with the built model and the measured peak of a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.architecture.stages import PipelineSplit
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.errors import UserError
from nemo_kto.layers.layer_settings import FORMATS
from tests.helpers.messages import Message
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_checkpoint, make_rows, write_rows
from tests.helpers.training_jobs import train

TOLERANCE = 0.15
LENGTH = 256  # tokens of every row
# Weights and what belongs to them are most of what a rank holds; what the libraries allocate for themselves is little.
SIZES: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 16384}
EXPERTS = "model.expert_model_parallel_size=2"
FULL = [f"model.activations_checkpoint_{key}" for key in ("granularity=full", "method=uniform", "num_layers=1")]
LORA = ["model.peft.peft_scheme=lora", "model.peft.lora_tuning.target_modules=[all]", "model.reference.mode=adapter"]
TENSOR, PIPELINE = "model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2"
CACHED = "model.reference.mode=cached"


def warm_up(model: Path, rows: Path, folder: Path, world_size: int, overrides: list[str]) -> None:
    """A run of a tiny model: afterwards all is imported, and what libraries allocate once is there."""
    train(model, rows, folder, world_size, overrides)


def measured_and_planned(
    model: Path, rows: Path, folder: Path, world_size: int, overrides: list[str]
) -> tuple[float, dict[str, float]]:
    """Peak growth of this rank's memory in bytes, and the parts of the plan for its stage."""
    from nemo_kto.distributed import state
    from nemo_kto.memory.hardware import Machines
    from nemo_kto.memory.run_plan import make_plan

    plans = []

    def planned(run: ResolvedRun, machines: Machines, *, longest: int | None = None) -> None:
        plans.append((make_plan(run, machines), state.pipeline_stage()))

    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before = _resident("VmRSS")
    one_epoch = "trainer.kto.max_epochs=1"  # a plan knows of no other limit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nemo_kto.run.prepare.check_memory", planned)
        train(model, rows, folder, world_size, [*overrides, one_epoch])
    plan, stage = plans[0]
    memory = plan.stages[stage]
    parts = {name: getattr(memory, name) for name in memory.__dataclass_fields__ if name != "on_gpu"}
    return _resident("VmHWM") - before, {**parts, "in all": memory.device}


def _resident(field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024.0 * int(found.group(1))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan_memory")
    make_checkpoint(folder / "model", "llama", **SIZES)
    make_checkpoint(folder / "small", "llama", hidden_size=128, intermediate_size=128, head_dim=32)
    experts: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 1024}
    make_checkpoint(folder / "mixture", "qwen2_moe", **SIZES, **experts)
    make_checkpoint(folder / "small_mixture", "qwen2_moe")
    write_rows(folder / "rows.jsonl", [{**row, "response": "a" * 2 * LENGTH} for row in make_rows(8)])
    return folder


@pytest.mark.full  # runs of models that are large enough to measure
@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (1, LORA),
        *[(1, [*LORA, f"model.quantize={form}"]) for form in FORMATS],
        (2, [TENSOR, "model.sequence_parallel=true", "model.reference.mode=swap"]),
        (1, [CACHED, *FULL]),
        (1, [CACHED, "trainer.precision=bf16-forced"]),
        (2, [CACHED, "model.optim.use_distributed_optimizer=false"]),
        (2, [CACHED, PIPELINE, "model.virtual_pipeline_model_parallel_size=2"]),
        # with one row the libraries would take a sixth of the memory of a rank with half a frozen model
        (2, [*LORA, TENSOR, "model.micro_batch_size=2"]),
        (2, [EXPERTS, CACHED]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_a_run_uses_the_planned_memory(place: Path, tmp_path: Path, world_size: int, overrides: list[str]) -> None:
    common = [
        f"model.data.seq_length={LENGTH}",
        "model.global_batch_size=4",
        "model.micro_batch_size=1",
        "trainer.kto.max_steps=3",
        "trainer.kto.val_check_interval=0",
        "trainer.kto.save_interval=1",
        *overrides,
    ]
    peaks, plans = zip(*run(place, tmp_path / "first", world_size, common), strict=True)
    tolerance = 0.1 if any("quantize" in override for override in overrides) else TOLERANCE
    if not _near(peaks, plans, tolerance):  # threads of libraries take a varying amount of memory: the minimum of two runs
        again = [peak for peak, _ in run(place, tmp_path / "second", world_size, common)]
        peaks = tuple(map(min, peaks, again))
    for peak, planned in zip(peaks, plans, strict=True):
        planned_mb = {name: round(value / 1e6) for name, value in planned.items()}
        print(f"measured {peak / 1e6:,.0f} MB, planned {planned['in all'] / 1e6:,.0f} MB: {planned_mb}")
    assert _near(peaks, plans, tolerance), (peaks, plans)


def _near(peaks: Sequence[float], plans: Sequence[dict[str, float]], tolerance: float) -> bool:
    return list(peaks) == [pytest.approx(planned["in all"], rel=tolerance) for planned in plans]


def run(place: Path, folder: Path, world_size: int, overrides: list[str]) -> list[tuple[float, dict[str, float]]]:
    """Peak and plan of each rank."""
    cache = f"model.data.cache_dir={folder / 'cache'}"
    small, large = ("small_mixture", "mixture") if EXPERTS in overrides else ("small", "model")
    ranks = RankPool(max_ranks=world_size)  # in a new process: a worker does not return memory
    try:
        for job, model in ((warm_up, small), (measured_and_planned, large)):
            words = (place / model, place / "rows.jsonl", folder / model, world_size, [*overrides, cache])
            found = ranks.run(world_size, job, *words)
    finally:
        ranks.close()
    return found


# Parameters of a rank: its stage, and name -> shape and whether it is trained.
Built = tuple[int, dict[str, tuple[tuple[int, ...], bool]]]
ADAPTERS = LoRASettings(rank=4, alpha=4, target_modules=("all",), layers=(1, 3))


def built(model: Path, tensor: int, split: PipelineSplit, adapters: LoRASettings | None, expert: int) -> Built:
    """The parameters of this rank of a model that is really built."""
    import torch

    from nemo_kto.architecture.architecture import read_architecture
    from nemo_kto.distributed import state
    from nemo_kto.models.gpt import build_chunks
    from nemo_kto.models.lora.adapters import add_adapters

    virtual = split.chunks if split.chunks > 1 else None
    layout = state.Layout(tensor=tensor, pipeline=split.stages, virtual=virtual, expert=expert, expert_tensor=1)
    state.init_distributed(layout=layout, seed=1)
    architecture = read_architecture(model, tensor_parallel=tensor, expert_tensor_parallel=1)
    actual = {}
    for gpt in build_chunks(architecture, params_dtype=torch.float32, split=split, expert_parallel=expert):
        if adapters is not None:
            add_adapters(gpt, adapters, architecture=architecture, seed=1)
        for name, parameter in gpt.named_parameters():
            if name.startswith("decoder.layers."):
                number, rest = name.removeprefix("decoder.layers.").split(".", 1)
                name = f"decoder.layers.{gpt.decoder.layers[int(number)].layer_number - 1}.{rest}"
            actual[name] = tuple(parameter.shape), parameter.requires_grad
    return state.pipeline_stage(), actual


def planned(
    model: Path, tensor: int, split: PipelineSplit, stage: int, adapters: LoRASettings | None, expert: int
) -> Mapping[str, Any]:
    from nemo_kto.architecture.architecture import read_architecture
    from nemo_kto.architecture.parameters import rank_parameters

    architecture = read_architecture(model, tensor_parallel=tensor, expert_tensor_parallel=1)
    found = rank_parameters(architecture, split=split, expert_parallel=expert, stage=stage, adapters=adapters)
    return {name: (each.shape, each.trained) for each in found for name in each.names}


@pytest.fixture(scope="module")
def models(tiny_checkpoint: Callable[..., Path]) -> Callable[[str], Path]:
    """A vocabulary and heads that need padding; tied and untied; biases, and norms on heads or on all of them."""
    changes: dict[str, dict[str, Any]] = {
        "gpt_oss": {"num_local_experts": 8},
        "llama": {"attention_bias": True, "mlp_bias": True},
    }
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
    return lambda family: tiny_checkpoint(family, **heads, **changes.get(family, {}))


@pytest.mark.parametrize(
    ("family", "tensor", "split", "adapters"),
    [
        ("gemma2", 2, PipelineSplit(), None),
        pytest.param("llama", 2, PipelineSplit(stages=2), None, marks=pytest.mark.full),
        ("olmo2", 2, PipelineSplit(), ADAPTERS),
        ("qwen2", 2, PipelineSplit(stages=2, chunks=2), replace(ADAPTERS, dora=True)),
        pytest.param("qwen3", 4, PipelineSplit(), ADAPTERS, marks=pytest.mark.full),
        ("llama", 2, PipelineSplit(), replace(ADAPTERS, target_modules=("embed_tokens",), layers=None)),
        ("qwen3", 1, PipelineSplit(stages=3, chunks=2, counts_embedding=True, counts_loss=True), None),
    ],
)
def test_parameters_of_a_rank_equal_the_plan(
    ranks: RankPool,
    models: Callable[[str], Path],
    family: str,
    tensor: int,
    split: PipelineSplit,
    adapters: LoRASettings | None,
) -> None:
    found: list[Built] = ranks.run(tensor * split.stages, built, models(family), tensor, split, adapters, 1)
    assert {stage for stage, _ in found} == set(range(split.stages))
    for stage, actual in found:
        assert planned(models(family), tensor, split, stage, adapters, 1) == actual


@pytest.mark.parametrize(
    ("family", "tensor", "stages", "expert", "adapters"),
    [
        ("gpt_oss", 2, 1, 2, None),
        ("glm4_moe", 1, 1, 2, None),  # a correction bias, which is not trained
        pytest.param("qwen2_moe", 2, 2, 2, ADAPTERS, marks=pytest.mark.full),
        ("llama4_text", 2, 1, 2, ADAPTERS),  # on a layer's shared expert, and not on the others
        pytest.param("qwen3_moe", 1, 1, 4, None, marks=pytest.mark.full),
    ],
)
def test_parameters_of_experts_equal_the_plan(
    ranks: RankPool,
    models: Callable[[str], Path],
    family: str,
    tensor: int,
    stages: int,
    expert: int,
    adapters: LoRASettings | None,
) -> None:
    """The first expert-parallel rank numbers its experts as the model does; all ranks hold equally many."""
    split = PipelineSplit(stages=stages)
    found: list[Built] = ranks.run(max(tensor, expert) * stages, built, models(family), tensor, split, adapters, expert)
    for stage, actual in found:
        assert planned(models(family), tensor, split, stage, adapters, expert) == actual
        assert any(".experts." in name for name in actual)


def error_with_memory(memory: int, model: Path, rows: Path, folder: Path) -> str:
    """Error of a run on a machine with this many bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nemo_kto.device.device.host_memory_bytes", lambda: memory)
        with pytest.raises(UserError) as error:
            train(model, rows, folder, 2, ["trainer.kto.max_steps=1", "model.reference.mode=cached"])
    return str(error.value)


def test_ranks_share_host_memory(ranks: RankPool, tiny_llama: Path, kto_rows: Path, tmp_path: Path) -> None:
    number = 2 * 259 * 64 + 2 * (36_864 + 2 * 64) + 64  # both tables, two layers with two norms, and the last norm
    # fp32: 4 of weights, 4 of gradients, 8 / 2 of moments, which the two data-parallel ranks share out, and 4 of the policy
    # on the host while the reference is evaluated for a later epoch
    need = 16 * number
    refusals = ranks.run(2, error_with_memory, 2 * need - 2, tiny_llama, kto_rows, tmp_path)
    assert refusals == [Message("1.7 MB", "2 ranks", "nemo-kto plan kto")] * 2
    assert [*tmp_path.glob("*.jsonl")] == [], "nothing was started"
