"""The device of a rank: memory, uploads and clocks, page-locked host memory, and environment variables of GPU libraries."""

from __future__ import annotations

import gc
import io
import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_kto.checkpoint.writer import PlannedSave
from nemo_kto.device import device, environment
from nemo_kto.models.engine.reference import SwappedWeights
from tests.helpers.messages import raises


def test_the_lowest_limit_of_all_control_groups_applies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = {"none": "max\n", "own": "3000000\n", "above": "2000000\n", "more": f"{whole + 1}\n"}
    for name, text in limits.items():
        (tmp_path / name).write_text(text)

    def least(*names: str) -> int:
        monkeypatch.setattr(device, "_memory_limit_files", lambda: iter([tmp_path / name for name in names]))
        return device.host_memory_bytes()

    assert least("none", "own", "above", "more", "missing") == 2_000_000
    assert least("none", "more") == whole
    assert least() == whole


@pytest.mark.parametrize("on_gpu", [False, True])
def test_deterministic_kernels_are_those_of_gpus(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU all are: the setting would only choose slower ones."""
    chosen: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", chosen.append)
    monkeypatch.setattr(device, "on_gpu", lambda: on_gpu)
    device.use_deterministic_kernels()
    assert chosen == [True] * on_gpu


def test_fp32_products_do_not_use_tf32() -> None:
    """NVIDIA's images allow them by an environment variable."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    device.select()
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (False, False)


def test_nothing_is_uploaded_to_the_cpu() -> None:
    tensors = [torch.arange(3), None, torch.ones(2, 2)]
    assert all(there is here for there, here in zip(device.upload(tensors), tensors, strict=True))


def test_a_stopwatch_sums_blocks_and_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "moment", iter([1.0, 3.0, 10.0, 15.0]).__next__)
    watch = device.Stopwatch()
    for _ in range(2):
        with watch.running():
            pass
    assert [watch.read_and_reset(), watch.read_and_reset()] == [2 + 5, 0]


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


ORDERED = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
MARGINS = {"NVTE_FWD_LAYERNORM_SM_MARGIN": "16", "NVTE_BWD_LAYERNORM_SM_MARGIN": "16"}
DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS"}


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ({}, {}),
        ({"ranks": 8}, MARGINS),
        ({"ranks": 8, "tensor_parallel": 2}, {**MARGINS, **ORDERED}),
        ({"ranks": 8, "context_parallel": 2}, {**MARGINS, **ORDERED}),
        ({"deterministic": True}, DETERMINISTIC),
        ({"ranks": 2, "tensor_parallel": 2, "deterministic": True}, {**MARGINS, **ORDERED, **DETERMINISTIC}),
    ],
)
def test_the_variables_of_a_run(run: dict[str, Any], expected: dict[str, str]) -> None:
    settings = {"ranks": 1, "tensor_parallel": 1, "context_parallel": 1, "deterministic": False, **run}
    assert environment.of_run(**settings) == expected


def test_values_of_the_user_are_kept() -> None:
    given = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512", "OTHER": "1"}
    environment.set_defaults({**environment.ALWAYS, "OTHER": "2"}, given)
    assert given == {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512", "OTHER": "1"}
    of_torch_2_9 = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}  # the newer name, which torch reads first
    environment.set_defaults(environment.ALWAYS, of_torch_2_9)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in of_torch_2_9


def test_what_every_process_sets_is_set_before_torch_is_loaded() -> None:
    code = "import os, sys, nemo_kto.device; print(*map(os.environ.get, %r), 'torch' in sys.modules)"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTORCH", "CUDA"))}
    done = subprocess.run(
        [sys.executable, "-c", code % [*environment.ALWAYS, *ORDERED]], env=kept, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [*environment.ALWAYS.values(), "None", "False"]
