"""Without the requirements of torch.compile nothing is compiled, and the values are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from nemo_kto.device import device

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
TRITON, COMPILER, HEADERS = "triton (pip install triton)", "a C compiler (gcc)", f"Python.h (python{VERSION}-dev)"


class Machine:
    """A folder that has all of it: ``triton/``, ``gcc`` and ``include/Python.h``; nothing else is looked at."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("triton/__init__.py", "gcc", "include/Python.h"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).touch(mode=0o755)

    def missing(self, *, scheme: str = "posix_prefix", **environment: str) -> list[str]:
        """Missing parts of a compiler with this environment, in a Python with this scheme."""
        paths = {"posix_prefix": {"include": str(self.folder / "include")}, "posix_local": {"include": "/nowhere"}}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sysconfig, "get_default_scheme", lambda: scheme)
            patch.setattr(sysconfig, "get_paths", lambda scheme: paths[scheme])
            patch.delitem(sys.modules, "triton", raising=False)
            patch.setattr(sys, "path", [str(self.folder)])
            patch.setenv("PATH", str(self.folder))
            patch.delenv("CC", raising=False)
            for name, value in environment.items():
                patch.setenv(name, value)
            return device.missing_for_compiling()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("absent", "missing"),
    [
        ([], []),
        (["triton/__init__.py", "triton"], [TRITON]),
        (["gcc"], [COMPILER]),
        (["include/Python.h"], [HEADERS]),
        (["gcc", "include/Python.h"], [COMPILER, HEADERS]),
    ],
)
def test_missing_parts_of_a_compiler(absent: list[str], missing: list[str], machine: Machine) -> None:
    for name in absent:
        place = machine.folder / name
        place.rmdir() if place.is_dir() else place.unlink()
    assert machine.missing() == missing


def test_an_explicit_compiler_is_used(machine: Machine) -> None:
    assert machine.missing(CC="missing-cc") == [COMPILER]
    (machine.folder / "gcc").rename(machine.folder / "clang")
    assert machine.missing(CC=str(machine.folder / "clang")) == []
    assert machine.missing() == [], "clang is found too"


# A rank on a GPU, as far as imports go: which functions megatron-core and others have compiled, and a product of theirs.
RANK = """
import json, os, sys
import torch
import nemo_kto.device
from nemo_kto.device import device
device.on_gpu = lambda: True
device.missing_for_compiling = lambda: json.loads(os.environ["MISSING"])
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.transformer.moe.router import TopKRouter

def doubled(values):
    return 2 * values

def is_compiled(function):
    return hasattr(function, "_torchdynamo_orig_callable")

values = torch.linspace(-2, 2, 8).view(2, 4).requires_grad_()
weights = torch.tensor([[0.5], [2.0]])
eager = not os.environ["MISSING"].startswith("[]")
result = {
    "wrapped": [is_compiled(fused_bias_swiglu.swiglu), is_compiled(TopKRouter._apply_expert_bias)],
    "others": is_compiled(torch.compile(doubled)),
}
if eager:
    output = fused_bias_swiglu.weighted_bias_swiglu_impl(values, None, weights)
    gate, up = values.chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up * weights
    result["equal"] = [
        torch.equal(output, expected),
        torch.allclose(
            torch.autograd.grad(output.sum(), values)[0], torch.autograd.grad(expected.sum(), values)[0], atol=1e-6, rtol=0
        ),
    ]
print(json.dumps(result))
"""


@pytest.mark.parametrize("missing", [[], [HEADERS]], ids=["all_there", "no_headers"])
def test_nothing_is_compiled_without_a_compiler(missing: list[str]) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RANK],
        env={**kept, "MISSING": json.dumps(missing)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    compiled = not missing
    assert found["wrapped"] == [compiled, compiled]
    assert found["others"] == compiled
    if missing:
        assert found["equal"] == [True, True]
