"""Swapped reference on a GPU: page-locked copies, two streams, and memory for at most two tensors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nemo_kto.device import device
from nemo_kto.models.engine.reference import SwappedWeights

pytestmark = pytest.mark.skipif(not device.on_gpu(), reason="needs a GPU")


def test_a_swap_and_its_reverse_are_exact() -> None:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(size, device=device.current_device())) for size in (7, 1000, 123_457, 1)]
    reference = [parameter.detach().clone() for parameter in parameters]
    swapped = SwappedWeights(parameters=parameters)
    assert all(host.is_pinned() for host in swapped.kept)
    for parameter in parameters:
        parameter.data.mul_(2).add_(1)
    policy = [parameter.detach().clone() for parameter in parameters]
    for _ in range(3):
        with swapped.active():
            assert all(torch.equal(now, then) for now, then in zip(parameters, reference, strict=True))
        assert all(torch.equal(now, then) for now, then in zip(parameters, policy, strict=True))


def test_page_locked_memory_has_the_size_of_the_weights() -> None:
    """Host memory is not rounded up to the next power of two for each tensor, as torch's allocator does."""
    odd = [torch.nn.Parameter(torch.ones(size, device=device.current_device())) for size in (2**18 + 1, 1000, 5 * 2**16 + 3)]
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    swapped = SwappedWeights(parameters=odd)
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) == before
    starts = [host.data_ptr() for host in swapped.kept]
    assert starts[2] + odd[2].nbytes - starts[0] < sum(each.nbytes for each in odd) + 3 * 64
    assert all(host.is_pinned() for host in swapped.kept)


def test_a_swap_needs_memory_for_two_tensors() -> None:
    size, count = 4 * 2**20, 16  # 16 MiB each
    parameters = [torch.nn.Parameter(torch.ones(size, device=device.current_device())) for _ in range(count)]
    swapped = SwappedWeights(parameters=parameters)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with swapped.active():
        pass
    assert torch.cuda.max_memory_allocated() - before <= 3 * 4 * size


def test_the_host_does_not_wait_in_a_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [torch.nn.Parameter(torch.ones(1000, device=device.current_device())) for _ in range(9)]
    swapped, waits = SwappedWeights(parameters=parameters), []

    def counted(wait: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            waits.append(name)
            return wait(*arguments)

        return call

    for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
        monkeypatch.setattr(owner, "synchronize", counted(owner.synchronize, owner.__name__))
    with swapped.active():
        pass
    assert not waits


# torch's sanitizer notes which stream reads and writes which memory, and fails where nothing orders two of them. It forgets
# memory that is freed; here it does not, so that memory that is used again while a copy reads it is noticed as well.
_WATCHED = """
import torch
from torch.cuda import _sanitizer

known = _sanitizer._TensorsAccessed
known.delete_tensor = lambda self, pointer: None
known.create_tensor = lambda self, pointer, stack: self.accesses.setdefault(pointer, _sanitizer.TensorInfo(stack))
_sanitizer.enable_cuda_sanitizer()

from nemo_kto.models.engine.reference import SwappedWeights

parameters = [torch.nn.Parameter(torch.full((5000,), float(k), device="cuda")) for k in range(8)]
held = SwappedWeights(parameters=parameters)
for step in range(3):
    for parameter in parameters:
        parameter.data.add_(100)
    with held.active():
        assert [float(parameter[-1]) for parameter in parameters] == list(range(8))
        torch.cuda.synchronize()
        assert [float(kept[-1]) for kept in held.kept] == [100 * (step + 1) + k for k in range(8)]
    torch.cuda.synchronize()
    assert [float(kept[-1]) for kept in held.kept] == list(range(8))
"""


def test_streams_do_not_race() -> None:
    command = [sys.executable, "-c", _WATCHED]  # it watches a whole process
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
