"""Patches: without the requirements of torch.compile nothing is compiled, and the CPU backend changes only torch.cuda."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.device import device

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
TRITON, COMPILER, HEADERS = "triton (pip install triton)", "a C compiler (gcc)", f"Python.h (python{VERSION}-dev)"


@pytest.fixture
def missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """``missing(*files, CC=...)``: parts that are missing on a machine without these of triton/, gcc and Python.h."""
    include = str(tmp_path / "include")
    monkeypatch.setattr(sysconfig, "get_default_scheme", lambda: "posix_local")  # Debian's, without headers
    monkeypatch.setattr(sysconfig, "get_paths", {"posix_prefix": {"include": include}, "posix_local": {}}.__getitem__)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv("PATH", str(tmp_path))

    def found(*absent: str, compiler: str | None = None) -> list[str]:
        for name in {"triton/__init__.py", "gcc", "include/Python.h"} - {*absent}:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch(mode=0o755)
        monkeypatch.setenv("CC", compiler or "")
        device.missing_for_compiling.cache_clear()  # as in a new process
        return list(device.missing_for_compiling())

    yield found
    device.missing_for_compiling.cache_clear()


@pytest.mark.parametrize(
    ("absent", "compiler", "names"),
    [
        ([], None, []),
        (["triton/__init__.py"], None, [TRITON]),
        (["gcc", "include/Python.h"], None, [COMPILER, HEADERS]),
        ([], "missing-cc", [COMPILER]),
        (["gcc"], sys.executable, []),
    ],
)
def test_missing_parts_of_a_compiler(
    absent: list[str], compiler: str | None, names: list[str], missing: Callable[..., list[str]]
) -> None:
    assert missing(*absent, compiler=compiler) == names


# A rank on a GPU, as far as imports go: which functions megatron-core and others have compiled, and a product of theirs.
RANK = """
import json, warnings
import torch
import nemo_kto.device
from nemo_kto.device import device
device.on_gpu = lambda: True
device.missing_for_compiling = lambda: ["Python.h"]
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.transformer.moe.router import TopKRouter

def doubled(values):
    return 2 * values

def is_compiled(function):
    return hasattr(function, "_torchdynamo_orig_callable")

values = torch.linspace(-2, 2, 8).view(2, 4).requires_grad_()
weights = torch.tensor([[0.5], [2.0]])
output = fused_bias_swiglu.weighted_bias_swiglu_impl(values, None, weights)
gate, up = values.chunk(2, dim=-1)
expected = torch.nn.functional.silu(gate) * up * weights
gradients = [torch.autograd.grad(each.sum(), values)[0] for each in (output, expected)]
functions = fused_bias_swiglu.swiglu, TopKRouter._apply_expert_bias, torch.compile(doubled)
with warnings.catch_warnings(record=True) as seen:
    warnings.warn("Transformer Engine and Apex are not installed. Falling back to Torch optimizers.")
    warnings.warn("torch.distributed.all_gather_into_tensor` is deprecated")
result = {
    "warnings": len(seen),
    "compiled": [is_compiled(each) for each in functions],
    "equal": [torch.equal(output, expected), torch.allclose(*gradients, atol=1e-6, rtol=0)],
}
print(json.dumps(result))
"""


@pytest.mark.full
def test_nothing_is_compiled_without_a_compiler_and_warnings_of_gpus_are_shown() -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH", "CUDA", "NEMO_KTO"))}
    done = subprocess.run([sys.executable, "-c", RANK], env=kept, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    expected = {"warnings": 1, "compiled": [False] * 3, "equal": [True, True]}
    assert json.loads(done.stdout.splitlines()[-1]) == expected


# In a separate process: the backend is installed permanently, and here before other uses of torch.
CODE = """
import os, sys, warnings
import torch
import nemo_kto.run.train
from nemo_kto.device.patches import install_cpu_backend
print({"torch._dynamo", "torch.utils.tensorboard", "wandb"} & set(sys.modules))

with warnings.catch_warnings(record=True) as seen:
    warnings.warn("Transformer Engine and Apex are not installed. Falling back to Torch optimizers.")
    warnings.warn("torch.distributed.all_gather_into_tensor` is deprecated")
    warnings.warn("another")
install_cpu_backend()
with torch.device("meta"):
    inside = [torch.arange(3), torch.empty(2), torch.ones(2), torch.tensor([1.0])]
outside = [torch.arange(3), torch.ones(2, device="cuda"), torch.empty_like(inside[1], device="cpu")]
print([str(each.message) for each in seen], os.environ["PYTORCH_CUDA_ALLOC_CONF"])
print([tensor.device.type for tensor in inside], [tensor.device.type for tensor in outside])
"""


def test_a_default_device_is_respected_and_values_of_the_user_are_kept() -> None:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-3:] == [
        "set()",  # of packages that take a second to import, and that a run on the CPU does not need
        "['another'] backend:native",
        "['meta', 'meta', 'meta', 'meta'] ['cpu', 'cpu', 'cpu']",
    ]


def test_megatron_core_does_not_import_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would make temporary folders, which a killed process leaves behind; Lightning's logger finds it as before."""
    for name in [name for name in sys.modules if name.split(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="wandb"):
        exec("import wandb", {"__name__": "megatron.core.timers"})
    space: dict[str, Any] = {"__name__": "lightning_fabric"}
    exec("import importlib.util; spec = importlib.util.find_spec('wandb')", space)
    assert space["spec"].name == "wandb"
