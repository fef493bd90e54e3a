"""The CPU backend changes only the answers of torch.cuda, and hides only warnings about missing GPU packages."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

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
