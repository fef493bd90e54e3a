"""The CPU backend changes what torch.cuda answers, and nothing else that a process does with torch."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: the backend is entered once and for all, and here before anything else has used torch.
CODE = """
import torch
from nemo_kto.parallel.cpu import install_cpu_backend

install_cpu_backend()
with torch.device("meta"):
    inside = [torch.arange(3), torch.empty(2), torch.ones(2), torch.tensor([1.0])]
outside = [torch.arange(3), torch.ones(2, device="cuda"), torch.empty_like(inside[1], device="cpu")]
print([tensor.device.type for tensor in inside], [tensor.device.type for tensor in outside])
"""


def test_a_default_device_is_heeded() -> None:
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "['meta', 'meta', 'meta', 'meta'] ['cpu', 'cpu', 'cpu']"
