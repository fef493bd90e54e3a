"""Whole jobs on a GPU compute what they compute on the CPU: train, validate, save, resume, export.

Where there is no GPU, the same tests run on the CPU: the expected trajectory, with other settings. So they work when there
is one. A sample of them is in `make test`, all of them with --matrix=full.
"""

from __future__ import annotations

import filecmp
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.jobs import trajectory
from tests.gpu.jobs import DETERMINISTIC, GPUS, IS_EMULATED, LORA, Workplace, assert_close, on
from tests.integration.commands import CLI, environment

DEVICE = "gpu" if GPUS else "cpu"
FP32, BF16 = 1e-4 if IS_EMULATED else 1e-3, 4e-2  # over four steps; 2.1e-2 is between bf16 and fp32 on a CPU without bf16 instructions
HAS_ENGINE = GPUS > 0 and importlib.util.find_spec("transformer_engine_torch") is not None
# On the CPU, a test that another one of these stands for.
repeats = pytest.mark.full if not GPUS else pytest.mark.gpu
needs_two = pytest.mark.skipif(GPUS == 1, reason="needs two GPUs")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job, the run on the CPU that it must equal, and how closely."""

    name: str
    overrides: tuple[str, ...] = ()
    expected: str = "kto"

    @property
    def in_bf16(self) -> bool:
        return IN_BF16 in self.overrides


ADAPTER, CACHED, IN_BF16 = "model.reference.mode=adapter", "model.reference.mode=cached", "trainer.precision=bf16"
PACKED = ("model.data.packing=true", "model.micro_batch_size=null", "model.micro_batch_tokens=256")
QUICK = [
    Case(name="bf16", overrides=(IN_BF16,)),
    Case(name="packed", overrides=PACKED),
]
REPEATING = [
    Case(name="tokens", overrides=("model.micro_batch_size=null", "model.micro_batch_tokens=256")),
    Case(name="swap", overrides=("model.micro_batch_size=2",)),
    Case(name="cached", overrides=(CACHED,)),
    Case(
        name="recompute",
        overrides=(
            "model.activations_checkpoint_granularity=full",
            "model.activations_checkpoint_method=uniform",
            "model.activations_checkpoint_num_layers=1",
        ),
    ),
    Case(name="bf16-packed-dpo", overrides=(IN_BF16, *PACKED), expected="dpo"),
    Case(name="lora", overrides=(*LORA, ADAPTER), expected="lora"),
    Case(name="lora-cached", overrides=(*LORA, CACHED), expected="lora"),
    Case(name="dpo", overrides=("model.micro_batch_size=2",), expected="dpo"),
    Case(name="bf16-cached", overrides=(IN_BF16, CACHED)),
    Case(name="bf16-lora", overrides=(*LORA, IN_BF16, ADAPTER), expected="lora"),
    Case(name="bf16-dpo", overrides=(IN_BF16,), expected="dpo"),
]


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=repeats) for case in REPEATING)], ids=lambda case: case.name
)
def test_a_run_is_that_of_the_cpu(case: Case, place: Workplace, expected: Callable[[str], Path]) -> None:
    algorithm = "dpo" if case.expected == "dpo" else "kto"
    run = place.run(case.name, *on(DEVICE), *case.overrides, algorithm=algorithm)
    assert_close(run, expected(case.expected), tolerance=BF16 if case.in_bf16 else FP32, in_bf16=case.in_bf16)
    noted = place.noted(case.name)
    assert noted["devices"] == ["cuda" if GPUS else "cpu"]
    assert noted["dtypes"] == ["bfloat16" if case.in_bf16 else "float32"]
    if case.name == "bf16":
        assert any(name.startswith("TE") for name in noted["classes"]) == HAS_ENGINE


@repeats
def test_layers_without_transformer_engine(place: Workplace, expected: Callable[[str], Path]) -> None:
    """Where it is installed, it is hidden."""
    modules = place.folder / "hidden"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text("import sys\nsys.modules['transformer_engine'] = None\n")
    run = place.run("local", *on(DEVICE), IN_BF16, env={"PYTHONPATH": environment(modules)["PYTHONPATH"]})
    assert_close(run, expected("kto"), tolerance=BF16, in_bf16=True)
    classes = place.noted("local")["classes"]
    assert "TorchAttention" in classes
    assert not any(name.startswith("TE") for name in classes)


@repeats
def test_a_run_on_the_cpu_of_a_machine_with_a_gpu(place: Workplace, expected: Callable[[str], Path]) -> None:
    run = place.run("hardware", "hardware=cpu")
    assert_close(run, expected("kto"), tolerance=1e-5)
    noted = place.noted("hardware")
    assert (noted["devices"], noted["backend"]) == (["cpu"], "gloo")


@pytest.mark.parametrize("precision", ["32", pytest.param("bf16", marks=repeats)])
def test_a_resumed_run_is_the_same_run(precision: str, place: Workplace) -> None:
    """A run that is stopped and started again logs the same figures and exports the same files, to the last bit."""
    always = "{_target_: tests.gpu.noted.Deterministic}"
    stop = "{_target_: tests.gpu.noted.StopAfter, step: 2}"
    settings = [*on(DEVICE), f"trainer.precision={precision}"]
    whole = place.run(f"whole-{precision}", *settings, callbacks=[always], env=DETERMINISTIC)
    stopped = place.run(f"stopped-{precision}", *settings, callbacks=[always, stop], env=DETERMINISTIC, status=85)
    assert len(trajectory(stopped)) == 2
    place.run(f"stopped-{precision}", *settings, callbacks=[always], env=DETERMINISTIC)
    assert trajectory(stopped) == trajectory(whole)
    assert_same_files(stopped / "hf", whole / "hf")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}


def assert_same_files(ours: Path, theirs: Path) -> None:
    names = sorted(file.name for file in theirs.iterdir())
    assert sorted(file.name for file in ours.iterdir()) == names
    assert filecmp.cmpfiles(ours, theirs, names, shallow=False)[0] == names


@repeats
@pytest.mark.parametrize("overrides", [pytest.param((), id="weights"), pytest.param((*LORA, ADAPTER), id="adapters")])
def test_an_export(overrides: tuple[str, ...], place: Workplace, expected: Callable[[str], Path]) -> None:
    """The model at the end is that of the CPU, and `nemo-kto export` writes it from the checkpoint, to the last bit."""
    name = "exported-adapters" if overrides else "exported"
    run = place.run(name, *on(DEVICE), *overrides, "model.micro_batch_size=2")
    place.finish([*CLI, "export", str(run), str(place.folder / f"{name}-again")])
    assert_same_files(place.folder / f"{name}-again", run / "hf")
    ours, theirs = weights(run / "hf"), weights(expected("lora" if overrides else "kto") / "hf")
    assert ours.keys() == theirs.keys()
    for key, weight in theirs.items():
        assert torch.linalg.vector_norm(ours[key] - weight) < FP32 * torch.linalg.vector_norm(weight), key


@needs_two
@repeats
def test_two_ranks_hear_each_other(place: Workplace) -> None:
    """They meet in a file and over the loopback interface, over NCCL where there are GPUs."""
    heard = place.folder / "heard"
    env = {} if GPUS else {"NEMO_KTO_FORCE_CPU": "1"}
    place.finish([sys.executable, "-m", "tests.gpu.collectives", str(heard)], env=env)
    common = {"sum": 3.0, "gathered": [1.0, 2.0], "first": 1.0, "objects": ["rank 0", "rank 1"]}
    backend = {"backend": "nccl", "device": "cuda"} if GPUS else {"backend": "gloo", "device": "cpu"}
    for rank, other in ((0, 2.0), (1, 1.0)):
        assert json.loads(Path(f"{heard}.{rank}").read_text()) == {**common, **backend, "other": other}


CONTEXT = ("model.context_parallel_size=2",)
LAYOUTS = {
    "dp2": (),
    "tp2": ("model.tensor_model_parallel_size=2",),
    "tp2-sequence": ("model.tensor_model_parallel_size=2", "model.sequence_parallel=true"),
    "pp2": ("model.pipeline_model_parallel_size=2",),
    "cp2": CONTEXT,
    "cp2-packed": (*CONTEXT, *PACKED),
    "pp2-chunks": ("model.pipeline_model_parallel_size=2", "model.virtual_pipeline_model_parallel_size=2"),
}


@needs_two
@repeats
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks(layout: str, place: Workplace, expected: Callable[[str], Path]) -> None:
    run = place.run(layout, *on(DEVICE, ranks=2), *LAYOUTS[layout])
    assert_close(run, expected("kto"), tolerance=FP32)
    assert place.noted(layout)["backend"] == ("nccl" if GPUS else "gloo")


@repeats
@pytest.mark.parametrize(
    ("name", "ranks", "overrides"),
    [
        ("packed", 1, PACKED),
        pytest.param("cp2", 2, CONTEXT, marks=needs_two),
        pytest.param("cp2-packed", 2, (*CONTEXT, *PACKED), marks=needs_two),
    ],
)
def test_in_bf16_they_are_one_rank_with_padded_rows(
    name: str, ranks: int, overrides: tuple[str, ...], place: Workplace
) -> None:
    """Both are off the run in fp32 by what bf16 rounds away, and not from each other."""
    padded = place.run(f"{name}-padded", *on(DEVICE), IN_BF16)
    run = place.run(f"{name}-bf16", *on(DEVICE, ranks=ranks), IN_BF16, *overrides)
    assert_close(run, padded, tolerance=BF16, in_bf16=True)
