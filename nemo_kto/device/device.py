"""Where this rank computes: its GPU or the CPU. The one module of the package that names ``torch.cuda`` to use it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_kto.utils.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

_ALIGNMENT = 64  # bytes, of a tensor in a block: what torch gives tensors on the CPU
_COLLECTIVES_FILE = "TORCH_FR_DUMP_TEMP_FILE"
_DRIVER_FILES = ("nvidia*", "nvhost*", "dxg", "kfd")  # in /dev: NVIDIA's, Tegra's, those of Windows' Linux, and AMD's


def on_gpu() -> bool:
    """True where CUDA is present and used (``NEMO_KTO_FORCE_CPU=1`` hides it)."""
    return os.environ.get("NEMO_KTO_FORCE_CPU") != "1" and _may_have_gpu() and torch.cuda.is_available()


def _may_have_gpu() -> bool:
    """False on a machine without a GPU's driver, where torch need not be imported to find none."""
    return "torch" in sys.modules or any(next(Path("/dev").glob(name), None) for name in _DRIVER_FILES)


def force_cpu() -> None:
    """Have this process, and those that it starts, compute on the CPU, GPUs or not.

    Before torch has looked for GPUs and megatron-core is imported. Libraries that look for GPUs themselves find none.
    """
    os.environ["NEMO_KTO_FORCE_CPU"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def current_device() -> torch.device:
    """The device of this rank: its GPU (by LOCAL_RANK) or the CPU."""
    if not on_gpu():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def device_count() -> int:
    """Number of GPUs of this machine; 0 means the ranks run on the CPU."""
    return torch.cuda.device_count() if on_gpu() else 0


def device_name() -> str:
    """What the device of this rank is sold as, where the system tells; "CPU" otherwise."""
    if on_gpu():
        return torch.cuda.get_device_name(current_device())
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as described:
        for line in described:
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return "CPU"


def select() -> None:
    """Make this rank's GPU the one that torch uses, and keep fp32 products fp32.

    NVIDIA's images allow TF32, which has 10 bits of the 23, through TORCH_ALLOW_TF32_CUBLAS_OVERRIDE.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if on_gpu():
        torch.cuda.set_device(current_device())


def gpu_has_bf16() -> bool:
    """Whether the GPU of this rank has instructions for bf16 (those before NVIDIA's Ampere do not)."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def compute_capability() -> tuple[int, int]:
    """NVIDIA's version of the instructions that the GPU of this rank has: (9, 0) is Hopper's."""
    return torch.cuda.get_device_capability(current_device())


def upload(tensors: Sequence[torch.Tensor | None]) -> list[Any]:
    """Tensors from the host to this rank's device, in one transfer for each dtype, which the host does not wait for.

    They go through page-locked memory: a copy from elsewhere makes the host wait for the device. It is that of torch's
    allocator, which keeps such a block and gives it to the next upload once the copy has ended; of its rounding up no more
    than some 100 KB are lost.

    Returns:
        The tensors, in their order; None for None. Those that are on the device already stay as they are.
    """
    uploaded = list(tensors)
    if not on_gpu():
        return uploaded
    on_host = [(k, tensor) for k, tensor in enumerate(tensors) if tensor is not None and not tensor.is_cuda]
    for dtype in {tensor.dtype for _, tensor in on_host}:
        own = [(k, tensor) for k, tensor in on_host if tensor.dtype == dtype]
        sizes = [tensor.numel() for _, tensor in own]
        packed = torch.empty(sum(sizes), dtype=dtype, pin_memory=True)
        torch.cat([tensor.flatten() for _, tensor in own], out=packed)
        parts = packed.to(current_device(), non_blocking=True).split(sizes)
        for (k, tensor), part in zip(own, parts, strict=True):
            uploaded[k] = part.view(tensor.shape)
    return uploaded


class _HostBlock(mmap.mmap):
    """Zeroed host memory of an exact size, page-locked where ranks compute on GPUs; freed with the last tensor in it.

    torch's allocator of page-locked memory rounds each block up to a power of two (``PowerOf2Ceil`` in torch 2.11 and 2.13,
    ATen/core/CachingHostAllocator.h), up to twice what was asked for, and keeps what is freed. So the pages are the
    operating system's, and CUDA is asked to lock them.
    """

    def __new__(cls, size: int) -> _HostBlock:
        return super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def __init__(self, size: int) -> None:
        self._unlock: Callable[[], object] | None = None
        if on_gpu():
            self.madvise(mmap.MADV_DONTFORK)  # a fork might get the pages that the GPU knows, and this process copies
            runtime, address = torch.cuda.cudart(), torch.frombuffer(self, dtype=torch.uint8).data_ptr()
            if (answer := runtime.cudaHostRegister(address, size, 0)) != runtime.cudaError.success:
                raise RuntimeError(
                    f"{size / 1e9:.1f} GB of host memory must be page-locked for the GPU, got CUDA's error {int(answer)}; "
                    "give the job more host memory (`nemo-kto plan` says how much a rank needs)"
                )
            self._unlock = functools.partial(runtime.cudaHostUnregister, address)

    def __del__(self) -> None:
        if self._unlock is not None:
            self._unlock()


def host_tensors(like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Zeros in host memory in the shapes and dtypes of other tensors, page-locked where ranks compute on GPUs.

    They take the bytes of those tensors, each rounded up to 64, and less than a page besides. Each has a storage of its own:
    ``torch.save`` of one writes no other.
    """
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in like]
    if not sum(sizes):
        return [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in like]
    block, starts = _HostBlock(sum(sizes)), itertools.accumulate(sizes, initial=0)
    return [
        torch.frombuffer(block, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)
        if tensor.numel()
        else torch.empty(tensor.shape, dtype=tensor.dtype)
        for tensor, start in zip(like, starts, strict=False)  # the last start is the end
    ]


def copied_to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in host memory, as :func:`host_tensors` makes it; the host waits for them."""
    copies = host_tensors(tensors)
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor.detach())
    return copies


def synchronize() -> None:
    """Wait for the work queued on the device (nothing is ever queued on the CPU)."""
    if on_gpu():
        torch.cuda.synchronize()


def has_queued_work() -> bool:
    """Whether the device has work that is not finished; callable from any thread. Never on the CPU."""
    if not on_gpu():
        return False
    with contextlib.suppress(RuntimeError):  # an error of the device is for those who wait for it
        return not torch.cuda.default_stream(current_device()).query()
    return False


def record_collectives(prefix: str) -> None:
    """Let torch's flight recorder write NCCL's last collectives to ``prefix`` and the rank when one times out.

    Must come before the process group. What the environment says already stays.
    """
    if not on_gpu():
        return
    for name, value in (
        ("TORCH_FR_BUFFER_SIZE", "2000"),  # collectives that are remembered
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        (_COLLECTIVES_FILE, prefix),
    ):
        os.environ.setdefault(name, value)


def write_collectives(rank: int) -> None:
    """Write what :func:`record_collectives` would write at a timeout, now; nothing on the CPU or where that fails."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    if on_gpu() and dump is not None and (prefix := os.environ.get(_COLLECTIVES_FILE)):
        with contextlib.suppress(Exception):  # it is an addition to an error
            Path(f"{prefix}{rank}").write_bytes(dump())


class Moment:
    """When the device will have done all that is queued now. Minus an earlier one: seconds, for which the host waits."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def has_come(self) -> bool:
        """Whether the host need not wait for it."""
        return self._event.query()

    def __sub__(self, earlier: Moment) -> float:
        if not self.has_come():
            self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1000  # it counts milliseconds


def moment() -> Any:
    """The present moment, of which earlier ones are subtracted: a :class:`Moment`, or seconds on the CPU."""
    return Moment() if on_gpu() else time.perf_counter()


class Stopwatch:
    """Seconds that the device takes for what is queued within blocks; the host does not wait for it there."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._pending: deque[tuple[Any, Any]] = deque()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Add what the block takes."""
        begin = moment()
        yield
        self._pending.append((begin, moment()))
        while self._pending and (not on_gpu() or self._pending[0][1].has_come()):
            self._take()

    def _take(self) -> None:
        begin, end = self._pending.popleft()
        self._seconds += end - begin

    def read_and_reset(self) -> float:
        """Seconds since the last time; waits for the device."""
        while self._pending:
            self._take()
        seconds, self._seconds = self._seconds, 0.0
        return seconds


@functools.cache
def _copy_streams(gpu: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """One up and one down, the same for every swap: memory is kept apart for each stream that was ever used."""
    return torch.cuda.Stream(gpu), torch.cuda.Stream(gpu)


def swap_(on_device: Sequence[torch.Tensor], on_host: Sequence[torch.Tensor]) -> None:
    """Swap the contents of tensors on the device with those of tensors on the host, pair by pair.

    On a GPU one stream copies up and another copies down, so that both directions of the bus are busy; no more than two
    tensors are on the device twice. Work queued on the device afterwards waits for the swap, and so does the host, once: the
    host tensors are read by whoever comes next, on the host too.
    """
    if not on_gpu():
        for here, there in zip(on_device, on_host, strict=True):
            kept = here.clone()
            here.copy_(there)
            there.copy_(kept)
        return
    now, (up, down) = torch.cuda.current_stream(), _copy_streams(torch.cuda.current_device())
    up.wait_stream(now)
    in_flight: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
    for here, there in zip(on_device, on_host, strict=True):
        if len(in_flight) == 2:
            up.wait_event(in_flight[0][1])  # its memory, which is that stream's, is used again by what is queued from now on
            in_flight.popleft()
        with torch.cuda.stream(up):
            kept = here.clone()
            here.copy_(there, non_blocking=True)
        down.wait_stream(up)  # the host's values must have left before they are written over
        with torch.cuda.stream(down):
            there.copy_(kept, non_blocking=True)
            in_flight.append((kept, down.record_event()))
    down.synchronize()  # which has waited for all that goes up


def peak_memory_bytes() -> int:
    """Most memory this rank has held: allocated device memory, or the resident set of the process on the CPU."""
    if on_gpu():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def total_memory_bytes() -> int:
    """Memory of the device of this rank; on the CPU that of the machine, which all its ranks share."""
    if on_gpu():
        return int(torch.cuda.get_device_properties(current_device()).total_memory)
    return host_memory_bytes()


def host_memory_bytes() -> int:
    """Memory of this machine, or what its control group lets this process have, where that is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _memory_limits():
        with contextlib.suppress(OSError, ValueError):  # "max", where there is no limit
            limits.append(int(file.read_text(encoding="ascii")))
    return min(limits)


def _memory_limits() -> Iterator[Path]:
    """The files that may hold a limit: of this process's control group and all above it, of version 2 and of version 1."""
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers in ("", "memory"):
                top, file = (root, "memory.max") if not controllers else (root / "memory", "memory.limit_in_bytes")
                group = top / name.lstrip("/")
                yield from (folder / file for folder in (group, *group.parents) if folder.is_relative_to(top))


def get_rng_state() -> torch.Tensor:
    """State of the generator that draws on the device."""
    return torch.cuda.get_rng_state() if on_gpu() else torch.get_rng_state()


def set_rng_state(state: torch.Tensor) -> None:
    """Put back what :func:`get_rng_state` gave."""
    (torch.cuda.set_rng_state if on_gpu() else torch.set_rng_state)(state)
