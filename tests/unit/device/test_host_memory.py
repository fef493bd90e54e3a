"""Page-locked host memory: its size, values and release."""

from __future__ import annotations

import gc
import io
import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_kto.checkpoint.writer import PlannedSave
from nemo_kto.device import device
from nemo_kto.models.engine.reference import SwappedWeights
from tests.helpers.messages import raises

SHAPES = [(5, 3), (), (0, 4), (1000, 7), (65,)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bfloat16, torch.float16]
BYTES = [60, 2, 0, 14_000, 130]
ROUNDED = 64 + 64 + 0 + 14_016 + 192


def tensors() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=draw) * 1000).to(dtype) for shape, dtype in zip(SHAPES, DTYPES, strict=True)]


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the blocks that are made."""
    sizes: list[int] = []
    init = device._HostBlock.__init__

    def recorded(block: Any, size: int) -> None:
        sizes.append(size)
        init(block, size)

    monkeypatch.setattr(device._HostBlock, "__init__", recorded)
    return sizes


def test_a_block_has_the_needed_size(blocks: list[int]) -> None:
    """Less than powers of two: torch's allocator would take 64 + 2 + 16,384 + 256 bytes."""
    given = tensors()
    assert [each.nbytes for each in given] == BYTES
    copies = device.copied_to_host(given)
    assert device.host_tensors([]) == []
    assert blocks == [ROUNDED]
    for copy, value in zip(copies, given, strict=True):
        assert (copy.shape, copy.dtype, copy.device.type) == (value.shape, value.dtype, "cpu")
        assert torch.equal(copy.contiguous().view(torch.uint8), value.view(torch.uint8)) if value.dim() else copy == value
    assert all(copy.data_ptr() % 64 == 0 for copy in copies if copy.numel())


def test_tensors_of_a_block_do_not_overlap() -> None:
    first, second, third = device.host_tensors([torch.empty(3), torch.empty(2, dtype=torch.bfloat16), torch.empty(33)])
    second.fill_(7)
    assert not first.any()
    assert not third.any()
    first.fill_(1), third.fill_(-1)
    assert second.tolist() == [7, 7]
    stored = io.BytesIO()
    torch.save(second, stored)
    alone = io.BytesIO()
    torch.save(second.clone(), alone)
    assert len(stored.getvalue()) == len(alone.getvalue())


def test_a_reference_of_odd_sizes_is_swapped_bitwise(blocks: list[int]) -> None:
    draw = torch.Generator().manual_seed(1)
    shapes, dtypes = [(7,), (129, 3), (1,), (33, 31)], [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    parameters = [
        torch.nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    reference = [parameter.detach().clone() for parameter in parameters]
    swapped = SwappedWeights(parameters=parameters)
    assert blocks == [64 + 1600 + 64 + 2048 + 0]
    for parameter in parameters:
        parameter.data.mul_(-3).add_(0.1)
    policy = [parameter.detach().clone() for parameter in parameters]
    for _ in range(3):
        with swapped.active():
            assert all(torch.equal(now, then) for now, then in zip(parameters, reference, strict=True))
            assert all(torch.equal(now, then) for now, then in zip(swapped.kept, policy, strict=True))
        assert all(torch.equal(now, then) for now, then in zip(parameters, policy, strict=True))
        assert all(torch.equal(now, then) for now, then in zip(swapped.kept, reference, strict=True))


def test_copies_of_a_checkpoint_are_in_one_reused_block(blocks: list[int]) -> None:
    planned, live = PlannedSave(), tensors()
    first = planned.copied_to_host(live)
    for tensor in live:
        tensor.add_(1)
    again = planned.copied_to_host(live)
    assert [copy.data_ptr() for copy in again] == [copy.data_ptr() for copy in first]
    assert all(torch.equal(copy, value) for copy, value in zip(again, live, strict=True))
    assert blocks == [ROUNDED]
    planned.copied_to_host(live[:4])
    assert blocks == [ROUNDED, ROUNDED - 192]


class Runtime:
    """Fake functions of CUDA's runtime."""

    cudaError = SimpleNamespace(success=0)  # CUDA's name

    def __init__(self, answer: int = 0) -> None:
        self.answer, self.locked = answer, dict[int, int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.locked[address] = size
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def flags_of(address: int) -> list[str]:
    """Those of the mapping that starts at an address, by Linux (proc_pid_smaps(5))."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(f"{address:x}-"))
    return next(line for line in lines if line.startswith("VmFlags:")).split()[1:]


def test_pages_are_locked_until_the_last_tensor_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    copies = device.host_tensors(tensors())
    assert runtime.locked == {copies[0].data_ptr(): ROUNDED}
    assert copies[0].data_ptr() % mmap.PAGESIZE == 0
    assert "dc" in flags_of(copies[0].data_ptr()), "not copied to a forked process"
    last = copies[3][10:20].view(-1)
    del copies
    gc.collect()
    assert list(runtime.locked.values()) == [ROUNDED]
    del last
    gc.collect()
    assert runtime.locked == {}


def test_memory_that_cannot_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(answer=2))
    with raises(RuntimeError, "0.1 GB", "page-lock", "2", "nemo-kto plan"):
        device.host_tensors([torch.empty(25_000_000, device="meta")])
