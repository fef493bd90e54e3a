"""Complete runs on a GPU equal those on the CPU: train, validate, save, resume, export.

Where there is no GPU, the same tests run on the CPU: the expected trajectory, with other settings. So they work when there
is one. All of them are run with --matrix=full only.
"""

from __future__ import annotations

import filecmp
import importlib.util
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from nemo_kto.telemetry.evaluations import SAMPLES_FILE, read_samples
from tests.gpu.jobs import GPUS, IS_EMULATED, LORA, OF_FAMILY, STEPS, Workplace, assert_close, on
from tests.helpers.commands import CLI, environment
from tests.helpers.hf_models import weights
from tests.helpers.training_jobs import trajectory

DEVICE = "gpu" if GPUS else "cpu"
FP32 = 1e-4 if IS_EMULATED else 1e-3  # over four steps
BF16 = 4e-2  # 2.1e-2 is between bf16 and fp32 on a CPU without bf16 instructions
HAS_ENGINE = GPUS > 0 and importlib.util.find_spec("transformer_engine_torch") is not None
# Redundant on the CPU.
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


ADAPTER, CACHED, IN_BF16 = "model.reference.mode=adapter", "model.reference.mode=cached", "trainer.precision=bf16-forced"
PACKED = ("model.data.packing=true", "model.micro_batch_size=null", "model.micro_batch_tokens=256")
RECOMPUTE = tuple(f"model.activations_checkpoint_{key}" for key in ("granularity=full", "method=uniform", "num_layers=1"))
OFFLOADED = "model.optim.offload_fraction=0.5"
SHARED = "model.data.share_prompts=true"
# A checkpoint after every step, written while the next ones are computed.
SAVING = (
    "trainer.kto.save_interval=1",
    "exp_manager.checkpoint_callback_params.async_save=true",
    "exp_manager.checkpoint_callback_params.save_top_k=1",
)
QUICK = Case(name="bf16", overrides=(IN_BF16, "model.micro_batch_size=null"))
REPEATING = [
    Case(name="packed", overrides=PACKED),
    Case(name="bf16-unpacked", overrides=(IN_BF16,)),
    Case(
        name="tokens", overrides=("model.micro_batch_size=null", "model.micro_batch_tokens=256", "model.data.packing=false")
    ),
    Case(name="swap", overrides=("model.micro_batch_size=2",)),
    Case(name="cached", overrides=(CACHED,)),
    Case(name="recompute", overrides=RECOMPUTE),
    Case(name="bf16-packed-dpo", overrides=(IN_BF16, *PACKED), expected="dpo"),
    Case(name="shared-dpo", overrides=(SHARED,), expected="dpo"),
    Case(name="bf16-shared-dpo", overrides=(IN_BF16, SHARED), expected="dpo"),
    Case(name="lora", overrides=(*LORA, ADAPTER), expected="lora"),
    Case(name="dpo", overrides=("model.micro_batch_size=2",), expected="dpo"),
    *(Case(name=name, overrides=model, expected=name) for name, model in OF_FAMILY.items()),
    *(Case(name=f"packed-{name}", overrides=(*OF_FAMILY[name], *PACKED), expected=name) for name in ("delta-nets", "mamba")),
    Case(name="bf16-lora", overrides=(*LORA, IN_BF16, ADAPTER), expected="lora"),
    Case(name="bf16-moments", overrides=(IN_BF16, "model.optim.moments_dtype=bf16")),
    Case(name="bf16-gradients", overrides=(IN_BF16, "model.optim.grad_reduce_in_fp32=false")),
    Case(name="bf16-offload", overrides=(IN_BF16, OFFLOADED)),
]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=repeats) for case in (QUICK, *REPEATING)], ids=lambda case: case.name
)
def test_a_run_equals_the_cpu(case: Case, place: Workplace, expected: Callable[[str], Path]) -> None:
    if OFFLOADED in case.overrides and not GPUS:
        pytest.skip("there is no GPU to offload")
    algorithm = "dpo" if case.expected == "dpo" else "kto"
    shown = place.finish(place.command(case.name, *on(DEVICE), *case.overrides, algorithm=algorithm))
    run = place.folder / case.name
    assert_close(run, expected(case.expected), tolerance=BF16 if case.in_bf16 else FP32, in_bf16=case.in_bf16)
    recorded = place.recorded(case.name)
    assert recorded["devices"] == ["cuda" if GPUS else "cpu"]
    assert recorded["dtypes"] == ["bfloat16" if case.in_bf16 else "float32"]
    if case is QUICK:  # the 8 rows of a step, of up to 64 tokens, are fewer tokens than the least number
        tokens, kernel = "2,048 tokens (a rank's share of the batch), ", "nor torch 2.11"
        reasons = f"{tokens}not packed ({kernel}" if kernel in shown else f"{tokens}packed (the default on GPUs)"
        assert (reasons in shown) is (GPUS > 0)
    if case.name.startswith("bf16-unpacked"):
        assert any(name.startswith("TE") for name in recorded["classes"]) == HAS_ENGINE
    if case.name == "bf16-shared-dpo":
        assert ("SharedPromptAttention" in recorded["classes"]) == HAS_ENGINE


@repeats
def test_layers_without_transformer_engine(place: Workplace, expected: Callable[[str], Path]) -> None:
    """Transformer Engine is hidden where it is installed."""
    modules = place.folder / "hidden"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text("import sys\nsys.modules['transformer_engine'] = None\n")
    run = place.run("local", *on(DEVICE), IN_BF16, env={"PYTHONPATH": environment(modules)["PYTHONPATH"]})
    assert_close(run, expected("kto"), tolerance=BF16, in_bf16=True)
    classes = place.recorded("local")["classes"]
    assert "TorchAttention" in classes
    assert not any(name.startswith("TE") for name in classes)


@repeats
def test_a_run_on_the_cpu_of_a_machine_with_a_gpu(place: Workplace, expected: Callable[[str], Path]) -> None:
    run = place.run("hardware", "hardware=cpu", "model.data.share_prompts=false")
    assert_close(run, expected("kto"), tolerance=1e-5)
    recorded = place.recorded("hardware")
    assert (recorded["devices"], recorded["backend"]) == (["cpu"], "gloo")


@repeats
def test_samples_equal_the_cpu(place: Workplace) -> None:
    """Those from before the first step, when the weights are the same."""
    given = ("exp_manager.samples.count=3", "exp_manager.samples.max_new_tokens=6", "exp_manager.samples.temperature=0.7")
    found = [read_samples(place.run(f"samples-{device}", *on(device), *given) / SAMPLES_FILE) for device in (DEVICE, "cpu")]
    assert [sample.step for sample in found[0]] == [0, 0, 0, STEPS, STEPS, STEPS]
    assert found[0][:3] == found[1][:3]


@pytest.mark.parametrize(
    ("precision", "ranks", "optimizer"),
    [
        pytest.param("32", 1, "", marks=repeats),
        pytest.param("bf16-forced", 1, "", marks=repeats),
        pytest.param("32", 2, "", marks=[repeats, needs_two]),
        pytest.param("bf16-forced", 1, "moments_dtype=bf16", marks=repeats),
        pytest.param(
            "bf16-forced", 1, "offload_fraction=0.5", marks=[repeats, pytest.mark.skipif(not GPUS, reason="needs a GPU")]
        ),
    ],
)
def test_a_resumed_run_is_the_same_run(
    precision: str, ranks: int, optimizer: str, place: Workplace, expected: Callable[[str], Path]
) -> None:
    """A run that saves as it trains, is stopped and resumed logs the same figures and exports the same files, to the bit.

    With deterministic kernels: others sum in any order in the backward passes of attention and of the embedding.
    """
    stop = "{_target_: tests.gpu.recorders.StopAfter, step: 2}"
    name = f"{precision}-{ranks}-{optimizer.partition('=')[0]}"
    settings = [*on(DEVICE, ranks=ranks), f"trainer.precision={precision}", "trainer.deterministic=true", *SAVING]
    settings += [f"model.optim.{optimizer}"] if optimizer else []
    settings.append(f"model.tensor_model_parallel_size={ranks}")
    whole = place.run(f"whole-{name}", *settings)
    stopped = place.run(f"stopped-{name}", *settings, callbacks=[stop], status=85)
    assert len(trajectory(stopped)) == 2
    place.run(f"stopped-{name}", *settings)
    assert place.recorded(f"whole-{name}")["deterministic"] == [str(GPUS > 0), "0"]
    assert trajectory(stopped) == trajectory(whole)
    assert_same_files(stopped / "hf", whole / "hf")
    if precision == "32":
        assert_close(stopped, expected("kto"), tolerance=FP32)
        assert_close_weights(stopped, expected("kto"))


@repeats
@pytest.mark.parametrize("precision", ["32", "bf16-forced"])
def test_a_resumed_run_with_the_default_kernels(precision: str, place: Workplace) -> None:
    """All that was saved, and the figures of the first forward passes, to the last bit; later steps within rounding."""
    name, again = f"bits-{precision}", f"bits-{precision}-again"
    bits = [f"{{_target_: tests.gpu.recorders.RecordHashes, file: {place.folder / each}.bits}}" for each in (name, again)]
    settings = [*on(DEVICE), f"trainer.precision={precision}"]
    stopped = place.run(
        name, *settings, callbacks=[bits[0], "{_target_: tests.gpu.recorders.StopAfter, step: 2}"], status=85
    )
    shutil.copytree(stopped, place.folder / again)
    place.run(name, *settings, callbacks=bits[:1])
    place.run(again, *settings, callbacks=bits[1:])

    lines = [
        [json.loads(line) for line in (place.folder / f"{each}.bits").read_text().splitlines()] for each in (name, again)
    ]
    saved, loaded = (line for line in lines[0] if line["step"] == 2)
    assert (saved.pop("when"), loaded.pop("when")) == ("end", "start")
    assert saved == loaded
    assert lines[1][0] == {"when": "start", **saved}
    assert saved["tensors"] > 0

    ours, theirs = trajectory(stopped), trajectory(place.folder / again)
    assert len(ours) == STEPS
    forward = [figure for figure in ours[2] if "grad_norm" not in figure]
    assert len(forward) > 4
    assert [ours[2][figure] for figure in forward] == [theirs[2][figure] for figure in forward]
    whole = place.run(f"bits-{precision}-whole", *settings)
    for other in (place.folder / again, whole):
        assert_close(stopped, other, tolerance=FP32 if precision == "32" else BF16, in_bf16=precision != "32")


def assert_same_files(ours: Path, theirs: Path) -> None:
    names = sorted(file.name for file in theirs.iterdir())
    assert sorted(file.name for file in ours.iterdir()) == names
    assert filecmp.cmpfiles(ours, theirs, names, shallow=False)[0] == names


def assert_close_weights(run: Path, expected: Path) -> None:
    """Of the exported models."""
    ours, theirs = weights(run / "hf"), weights(expected / "hf")
    assert ours.keys() == theirs.keys()
    for key, weight in theirs.items():
        assert torch.linalg.vector_norm(ours[key] - weight) < FP32 * torch.linalg.vector_norm(weight), key


@repeats
@pytest.mark.parametrize("overrides", [pytest.param((), id="weights"), pytest.param((*LORA, ADAPTER), id="adapters")])
def test_an_export(overrides: tuple[str, ...], place: Workplace, expected: Callable[[str], Path]) -> None:
    """The model at the end is that of the CPU, and `nemo-kto export` writes it from the checkpoint, to the last bit."""
    name = "exported-adapters" if overrides else "exported"
    run = place.run(name, *on(DEVICE), *overrides, "model.micro_batch_size=2")
    place.finish([*CLI, "export", str(run), str(place.folder / f"{name}-again")])
    assert_same_files(place.folder / f"{name}-again", run / "hf")
    assert_close_weights(run, expected("lora" if overrides else "kto"))
