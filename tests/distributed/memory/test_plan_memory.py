"""The planned memory of a rank, compared with the measured peak of a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.config.resolved import ResolvedRun
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
    make_checkpoint(folder / "small", "llama")
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
    if not _near(peaks, plans):  # threads of libraries take a varying amount of memory: the minimum of two runs
        again = [peak for peak, _ in run(place, tmp_path / "second", world_size, common)]
        peaks = tuple(map(min, peaks, again))
    for peak, planned in zip(peaks, plans, strict=True):
        planned_mb = {name: round(value / 1e6) for name, value in planned.items()}
        print(f"measured {peak / 1e6:,.0f} MB, planned {planned['in all'] / 1e6:,.0f} MB: {planned_mb}")
    assert _near(peaks, plans), (peaks, plans)


def _near(peaks: Sequence[float], plans: Sequence[dict[str, float]]) -> bool:
    return list(peaks) == [pytest.approx(planned["in all"], rel=TOLERANCE) for planned in plans]


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
