"""The CPU backend changes only the answers of torch.cuda."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# In a separate process: the backend is installed permanently, and here before other uses of torch.
CODE = """
import torch
from nemo_kto.device.patches import install_cpu_backend

install_cpu_backend()
with torch.device("meta"):
    inside = [torch.arange(3), torch.empty(2), torch.ones(2), torch.tensor([1.0])]
outside = [torch.arange(3), torch.ones(2, device="cuda"), torch.empty_like(inside[1], device="cpu")]
print([tensor.device.type for tensor in inside], [tensor.device.type for tensor in outside])
"""


def test_a_default_device_is_respected() -> None:
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "['meta', 'meta', 'meta', 'meta'] ['cpu', 'cpu', 'cpu']"


WARNED = """
import os, sys, warnings, torch
torch.cuda.is_available = lambda: sys.argv[1] == "gpu"
import nemo_kto.device, megatron.core
with warnings.catch_warnings(record=True) as seen:
    warnings.warn("Transformer Engine and Apex are not installed. Falling back to Torch optimizers.")
    warnings.warn("torch.distributed.all_gather_into_tensor` is deprecated")
print(len(seen), os.environ["CUDA_DEVICE_MAX_CONNECTIONS"])
"""


@pytest.mark.parametrize(("machine", "seen", "given"), [("gpu", "1", None), ("cpu", "0", "32")])
def test_warnings_about_missing_gpu_features_are_shown_on_gpus(machine: str, seen: str, given: str | None) -> None:
    unset = ("CUDA_DEVICE_MAX_CONNECTIONS", "NEMO_KTO_FORCE_CPU")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {} if given is None else {"CUDA_DEVICE_MAX_CONNECTIONS": given}
    command = [sys.executable, "-c", WARNED, machine]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.split() == [seen, given or "1"], "a value of the user is kept"
