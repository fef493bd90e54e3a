"""Runs of two ranks on GPUs equal one rank on the CPU; without GPUs both run on the CPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.jobs import EXPERTS, GPUS, Workplace, assert_close, on
from tests.gpu.test_jobs import BF16, DEVICE, FP32, IN_BF16, PACKED, REPEATING, Case, needs_two, repeats


@needs_two
@repeats
def test_collectives_of_two_ranks(place: Workplace) -> None:
    """They meet in a file and over the loopback interface, over NCCL where there are GPUs."""
    heard = place.folder / "heard"
    env = {} if GPUS else {"NEMO_KTO_FORCE_CPU": "1"}
    place.finish([sys.executable, "-m", "tests.gpu.collectives", str(heard)], env=env)
    common = {"sum": 3.0, "gathered": [1.0, 2.0], "first": 1.0, "objects": ["rank 0", "rank 1"]}
    backend = {"backend": "nccl", "device": "cuda"} if GPUS else {"backend": "gloo", "device": "cpu"}
    for rank, other in ((0, 2.0), (1, 1.0)):
        assert json.loads(Path(f"{heard}.{rank}").read_text()) == {**common, **backend, "other": other}


CONTEXT = ("model.context_parallel_size=2",)
TENSOR = ("model.tensor_model_parallel_size=2",)
LAYOUTS = {
    "dp2": (),
    "dp2-instances": ("model.optim.num_distributed_optimizer_instances=2",),
    "tp2": TENSOR,
    "tp2-sequence": (*TENSOR, "model.sequence_parallel=true"),
    "pp2": ("model.pipeline_model_parallel_size=2",),
    "cp2": CONTEXT,
    "cp2-packed": (*CONTEXT, *PACKED),
    "pp2-chunks": ("model.pipeline_model_parallel_size=2", "model.virtual_pipeline_model_parallel_size=2"),
}
ON_TWO_RANKS = [Case(name=name, overrides=overrides) for name, overrides in LAYOUTS.items()]
ON_TWO_RANKS += [
    Case(
        name=f"tp2-{case.name}",
        overrides=(*(LAYOUTS["tp2-sequence"] if case.overrides == EXPERTS else TENSOR), *case.overrides),
        expected=case.expected,
    )
    for case in REPEATING
    if case.name in ("packed", "cached", "recompute", "lora", "dpo", "experts")
]


@needs_two
@repeats
@pytest.mark.parametrize("case", ON_TWO_RANKS, ids=lambda case: case.name)
def test_two_ranks(case: Case, place: Workplace, expected: Callable[[str], Path]) -> None:
    algorithm = "dpo" if case.expected == "dpo" else "kto"
    run = place.run(case.name, *on(DEVICE, ranks=2), *case.overrides, algorithm=algorithm)
    assert_close(run, expected(case.expected), tolerance=FP32)
    assert place.recorded(case.name)["backend"] == ("nccl" if GPUS else "gloo")


@repeats
@pytest.mark.parametrize(
    ("name", "ranks", "overrides"),
    [
        ("packed", 1, PACKED),
        pytest.param("cp2", 2, CONTEXT, marks=needs_two),
        pytest.param("cp2-packed", 2, (*CONTEXT, *PACKED), marks=needs_two),
    ],
)
def test_two_ranks_in_bf16_equal_one_rank_with_padding(
    name: str, ranks: int, overrides: tuple[str, ...], place: Workplace
) -> None:
    """Both are off the run in fp32 by what bf16 rounds away, and not from each other."""
    padded = place.run(f"{name}-padded", *on(DEVICE), IN_BF16)
    run = place.run(f"{name}-bf16", *on(DEVICE, ranks=ranks), IN_BF16, *overrides)
    assert_close(run, padded, tolerance=BF16, in_bf16=True)
