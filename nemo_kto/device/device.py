"""Device of this rank, its GPU or the CPU; the only module of the package that uses ``torch.cuda`` directly."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import mmap
import os
import resource
import shutil
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_kto.utils import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

_ALIGNMENT = 64  # bytes; alignment of a tensor in a block, the same as that of torch's CPU tensors
_COLLECTIVES_FILE = "TORCH_FR_DUMP_TEMP_FILE"
_DRIVER_FILES = ("nvidia*", "nvhost*", "dxg", "kfd")  # in /dev: files of NVIDIA, Tegra, Windows Subsystem for Linux and AMD


@functools.cache  # layers ask for it in each micro-batch
def on_gpu() -> bool:
    """Return whether CUDA is present and used (``NEMO_KTO_FORCE_CPU=1``, or :func:`force_cpu`, hides it)."""
    if os.environ.get("NEMO_KTO_FORCE_CPU") == "1":
        return False
    # torch need not be imported to find no GPU on a machine without a driver
    has_driver = "torch" in sys.modules or any(next(Path("/dev").glob(name), None) for name in _DRIVER_FILES)
    return has_driver and torch.cuda.is_available()


def force_cpu() -> None:
    """Make this process and its children use the CPU; call before torch looks for GPUs or megatron-core is imported."""
    os.environ["NEMO_KTO_FORCE_CPU"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    on_gpu.cache_clear()


def current_device() -> torch.device:
    """Return the device of this rank: its GPU (by LOCAL_RANK) or the CPU."""
    if not on_gpu():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def device_count() -> int:
    """Return the number of GPUs of this machine; 0 means that ranks run on the CPU."""
    return torch.cuda.device_count() if on_gpu() else 0


def device_name() -> str:
    """Return the product name of this rank's device if the system reports it; otherwise "CPU"."""
    if on_gpu():
        return torch.cuda.get_device_name(current_device())
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as described:
        for line in described:
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return "CPU"


def select() -> None:
    """Make this rank's GPU torch's current device, and disable TF32 for fp32 products."""
    # NVIDIA's images allow TF32, which has 10 of the 23 bits of the mantissa, through TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if on_gpu():
        torch.cuda.set_device(current_device())


def use_deterministic_kernels() -> None:
    """Make torch's operations on a GPU bitwise reproducible, or raise RuntimeError; call before a model is built.

    Libraries ask torch, and Transformer Engine also the environment (``device.environment``), when they build a layer.
    """
    if on_gpu():
        torch.use_deterministic_algorithms(True)


def gpu_has_bf16() -> bool:
    """Return whether the GPU of this rank has bf16 instructions (NVIDIA GPUs before Ampere do not)."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def compute_capability() -> tuple[int, int]:
    """Return the CUDA compute capability of this rank's GPU: (9, 0) for Hopper."""
    return torch.cuda.get_device_capability(current_device())


@functools.cache  # each call of a fused kernel asks for it
def missing_for_compiling() -> tuple[str, ...]:
    """Return the missing requirements for compiling for a GPU, each with its package; empty if none is missing.

    torch.compile generates Triton kernels, and Triton builds their launchers with a C compiler and Python's headers. It
    looks for these in the first step (triton/runtime/build.py), where their absence would end the run.
    """
    compiler = os.environ.get("CC")
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's default, for packages that the user installs, has no headers
        scheme = "posix_prefix"
    found = {
        "triton (pip install triton)": importlib.util.find_spec("triton"),
        "a C compiler (gcc)": shutil.which(compiler) if compiler else shutil.which("gcc") or shutil.which("clang"),
        f"Python.h (python{sys.version_info.major}.{sys.version_info.minor}-dev)": Path(
            sysconfig.get_paths(scheme)["include"], "Python.h"
        ).exists(),
    }
    return tuple(name for name, is_found in found.items() if not is_found)


def upload(tensors: Sequence[torch.Tensor | None]) -> list[Any]:
    """Copy host tensors to this rank's device, in one asynchronous transfer for each dtype.

    The copies go through page-locked memory of torch's allocator, because a copy from other host memory would make the host
    wait for the device. Tensors on the device, and None, are returned unchanged.
    """
    uploaded = list(tensors)
    if not on_gpu():
        return uploaded
    on_host = [(k, tensor) for k, tensor in enumerate(tensors) if tensor is not None and not tensor.is_cuda]
    for dtype in {tensor.dtype for _, tensor in on_host}:
        same_dtype = [(k, tensor) for k, tensor in on_host if tensor.dtype == dtype]
        sizes = [tensor.numel() for _, tensor in same_dtype]
        packed = torch.empty(sum(sizes), dtype=dtype, pin_memory=True)
        torch.cat([tensor.flatten() for _, tensor in same_dtype], out=packed)
        parts = packed.to(current_device(), non_blocking=True).split(sizes)
        for (k, tensor), part in zip(same_dtype, parts, strict=True):
            uploaded[k] = part.view(tensor.shape)
    return uploaded


class _HostBlock(mmap.mmap):
    """Zeroed host memory of an exact size, page-locked if ranks compute on GPUs; freed with the last tensor in it.

    torch's allocator of page-locked memory rounds each block up to a power of two (torch 2.11 to 2.13,
    ATen/core/CachingHostAllocator.h) and keeps freed blocks. Therefore the pages are allocated from the operating system and
    locked with ``cudaHostRegister``; RuntimeError if CUDA cannot lock them.
    """

    def __new__(cls, size: int) -> _HostBlock:
        return super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def __init__(self, size: int) -> None:
        self._unlock: Callable[[], object] | None = None
        if on_gpu():
            # After a fork, copy-on-write could give the registered pages to the child, and new ones to this process.
            self.madvise(mmap.MADV_DONTFORK)
            runtime, address = torch.cuda.cudart(), torch.frombuffer(self, dtype=torch.uint8).data_ptr()
            if (error := runtime.cudaHostRegister(address, size, 0)) != runtime.cudaError.success:
                raise RuntimeError(
                    f"cannot page-lock {size / 1e9:.1f} GB of host memory for the GPU: CUDA error {int(error)}; "
                    "give the job more host memory (`nemo-kto plan` reports the requirement of a rank)"
                )
            self._unlock = functools.partial(runtime.cudaHostUnregister, address)

    def __del__(self) -> None:
        if self._unlock is not None:
            self._unlock()


def host_tensors(like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return zero tensors in host memory with the shapes and dtypes of ``like``, page-locked if ranks compute on GPUs.

    They take the bytes of the tensors in ``like``, each rounded up to a multiple of 64, plus less than a page. Each has its
    own storage, so ``torch.save`` of one does not write the others.
    """
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in like]
    block, starts = _HostBlock(sum(sizes)) if sum(sizes) else None, itertools.accumulate(sizes, initial=0)
    return [
        torch.frombuffer(block, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)
        if tensor.numel()
        else torch.empty(tensor.shape, dtype=tensor.dtype)
        for tensor, start in zip(like, starts, strict=False)  # the last start is the end
    ]


def copied_to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies in host memory that is allocated by :func:`host_tensors`; the host waits for the copies."""
    copies = host_tensors(tensors)
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor.detach())
    return copies


def synchronize() -> None:
    """Wait for the work queued on the device; returns at once on the CPU, where no work is queued."""
    if on_gpu():
        torch.cuda.synchronize()


def has_queued_work() -> bool:
    """Return whether the device has unfinished work; False on the CPU. May be called from any thread."""
    with contextlib.suppress(RuntimeError):  # a device error is raised in the code that waits for the device
        return on_gpu() and not torch.cuda.default_stream(current_device()).query()
    return False


def record_collectives(prefix: str) -> None:
    """Make torch's flight recorder write the last NCCL collectives on a timeout; call before init_process_group."""
    if not on_gpu():
        return
    for name, value in (  # the user's values are kept
        ("TORCH_FR_BUFFER_SIZE", "2000"),  # number of collectives that are recorded
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        (_COLLECTIVES_FILE, prefix),  # the file is ``prefix`` + rank
    ):
        os.environ.setdefault(name, value)


def write_collectives(rank: int) -> None:
    """Write the file of :func:`record_collectives` now, without a timeout; does nothing on the CPU or if it fails."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    if on_gpu() and dump is not None and (prefix := os.environ.get(_COLLECTIVES_FILE)):
        with contextlib.suppress(Exception):  # the file only supplements an error that is raised anyway
            Path(f"{prefix}{rank}").write_bytes(dump())


class Moment:
    """Time at which the device has completed the work queued so far; a difference, in seconds, waits for the later one."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def has_come(self) -> bool:
        """Return whether the device has completed the work."""
        return self._event.query()

    def __sub__(self, earlier: Moment) -> float:
        if not self.has_come():
            self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1000  # milliseconds to seconds


def moment() -> Any:
    """Return the current time, from which earlier ones can be subtracted: a :class:`Moment`, or seconds on the CPU."""
    return Moment() if on_gpu() else time.perf_counter()


class Stopwatch:
    """Measures the device time of the work queued within blocks, without making the host wait inside them."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._pending: deque[tuple[Any, Any]] = deque()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Add the device time of the block."""
        begin = moment()
        yield
        self._pending.append((begin, moment()))
        while self._pending and (not on_gpu() or self._pending[0][1].has_come()):
            self._take()

    def _take(self) -> None:
        begin, end = self._pending.popleft()
        self._seconds += end - begin

    def read_and_reset(self) -> float:
        """Return the seconds measured since the last call, and reset them; waits for the device."""
        while self._pending:
            self._take()
        seconds, self._seconds = self._seconds, 0.0
        return seconds


@functools.cache
def _copy_streams(gpu: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return streams to the device and to the host, the same for all swaps: torch keeps separate memory for each stream."""
    return torch.cuda.Stream(gpu), torch.cuda.Stream(gpu)


def swap_(on_device: Sequence[torch.Tensor], on_host: Sequence[torch.Tensor]) -> None:
    """Swap the contents of tensors on the device with those of tensors on the host, pair by pair.

    On the CPU no value moves: each tensor refers to the memory of the other.

    On a GPU one stream copies to the device and another to the host, so that both directions of the bus are busy; no more
    than two tensors are on the device twice. Work queued on the device afterwards waits for the swap. The host does not: it
    must call :func:`synchronize` before it reads the host tensors.
    """
    if not on_gpu():
        for device_tensor, host_tensor in zip(on_device, on_host, strict=True):
            device_tensor.data, host_tensor.data = host_tensor.data, device_tensor.data
        return
    now, (up, down) = torch.cuda.current_stream(), _copy_streams(torch.cuda.current_device())
    up.wait_stream(now)
    in_flight: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
    for device_tensor, host_tensor in zip(on_device, on_host, strict=True):
        if len(in_flight) == 2:
            up.wait_event(in_flight[0][1])  # the copy's memory belongs to stream ``up``, which reuses it from now on
            in_flight.popleft()
        with torch.cuda.stream(up):
            copy = device_tensor.clone()
            device_tensor.copy_(host_tensor, non_blocking=True)
        down.wait_stream(up)  # the host values must be on the device before they are overwritten
        with torch.cuda.stream(down):
            host_tensor.copy_(copy, non_blocking=True)
            in_flight.append((copy, down.record_event()))
    now.wait_stream(down)  # which has waited for all copies of ``up``


def peak_memory_bytes() -> int:
    """Return the peak memory of this rank: allocated device memory, or on the CPU the resident set of the process."""
    if on_gpu():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux


def total_memory_bytes() -> int:
    """Return the memory of this rank's device; on the CPU that of the machine, which all its ranks share."""
    if on_gpu():
        return int(torch.cuda.get_device_properties(current_device()).total_memory)
    return host_memory_bytes()


def host_memory_bytes() -> int:
    """Return the memory of this machine, or the limit of this process's control group if that is lower."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _memory_limit_files():
        with contextlib.suppress(OSError, ValueError):  # the file contains "max" without a limit
            limits.append(int(file.read_text(encoding="ascii")))
    return min(limits)


def _memory_limit_files() -> Iterator[Path]:
    """Yield the files with memory limits of this process's control group and all its parents (cgroup v2 and v1)."""
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers in ("", "memory"):
                top, file = (root, "memory.max") if not controllers else (root / "memory", "memory.limit_in_bytes")
                group = top / name.lstrip("/")
                yield from (folder / file for folder in (group, *group.parents) if folder.is_relative_to(top))


def get_rng_state() -> torch.Tensor:
    """Return the state of the random generator of this rank's device."""
    return torch.cuda.get_rng_state() if on_gpu() else torch.get_rng_state()


def set_rng_state(state: torch.Tensor) -> None:
    """Restore a state that :func:`get_rng_state` returned."""
    (torch.cuda.set_rng_state if on_gpu() else torch.set_rng_state)(state)
