"""The CPU backend: lets the real megatron-core run on gloo ranks, and answers every question about the device.

megatron-core names CUDA in places that have a CPU meaning (which device am I on, wait for the device, allocate here).
:func:`enter` answers those calls for the CPU where CUDA is absent and changes nothing where it is present, so that the
GPTModel, the pipeline schedules, DistributedDataParallel, the distributed optimizer and dist_checkpointing that run on a
laptop are the ones that run on a cluster. This is the only module of the package that names ``torch.cuda``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import resource
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

_entered = False

# What megatron-core and torch say of every run without Transformer Engine, apex or CUDA; none of it is news to a user here.
_NO_NEWS = (
    ".*Apex (is|are) not installed.*",
    ".*Transformer Engine and Apex are not installed.*",
    ".*full scope is deprecated.*",
    ".*CUDA_DEVICE_MAX_CONNECTIONS.*",
    ".*torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated.*",
    ".*`load_state_dict` is deprecated and will be removed.*",
    ".*we are deprecating ShardedTensor.*",
    ".*The .grad attribute of a Tensor that is not a leaf Tensor is being accessed.*",
)

# Factory functions that megatron-core calls with device="cuda".
_FACTORIES = (
    "arange", "empty", "empty_like", "full", "full_like", "linspace", "ones", "ones_like", "rand", "rand_like", "randint",
    "randn", "randn_like", "tensor", "zeros", "zeros_like",
)  # fmt: skip


def on_gpu() -> bool:
    """True where CUDA is present and used (``NEMO_KTO_FORCE_CPU=1`` hides it)."""
    return torch.cuda.is_available() and os.environ.get("NEMO_KTO_FORCE_CPU") != "1"


def device() -> torch.device:
    """The device of this rank: its GPU (by LOCAL_RANK) or the CPU."""
    if not on_gpu():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def device_count() -> int:
    """Number of GPUs of this machine; 0 means the ranks run on the CPU."""
    return torch.cuda.device_count() if on_gpu() else 0


def communication_backend() -> str:
    """The torch.distributed backend that fits the device: nccl or gloo."""
    return "nccl" if on_gpu() else "gloo"


def gpu_has_bf16() -> bool:
    """Whether the GPU of this rank has instructions for bf16 (those before NVIDIA's Ampere do not)."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def synchronize() -> None:
    """Wait for the work queued on the device (nothing is ever queued on the CPU)."""
    if on_gpu():
        torch.cuda.synchronize()


def exchange(on_device: Sequence[torch.Tensor], on_host: Sequence[torch.Tensor]) -> None:
    """Let tensors of the device and of the host change their contents, pair after pair.

    On a GPU one stream copies up and another copies down, so that both directions of the bus are busy; no more than two
    tensors are on the device twice. What the device is given to do afterwards waits for the exchange.
    """
    if not on_gpu():
        for here, there in zip(on_device, on_host, strict=True):
            kept = here.clone()
            here.copy_(there)
            there.copy_(kept)
        return
    now, up, down = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    up.wait_stream(now)
    in_flight: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
    for here, there in zip(on_device, on_host, strict=True):
        if len(in_flight) == 2:
            in_flight.popleft()[1].synchronize()
        with torch.cuda.stream(up):
            kept = here.clone()
            here.copy_(there, non_blocking=True)
        down.wait_stream(up)  # the host's values must have left before they are written over
        with torch.cuda.stream(down):
            there.copy_(kept, non_blocking=True)
            in_flight.append((kept, down.record_event()))
    down.synchronize()  # the host tensors are read by whoever comes next, on the host too
    now.wait_stream(up)


def peak_memory_bytes() -> int:
    """Most memory this rank has held: allocated device memory, or the resident set of the process on the CPU."""
    if on_gpu():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def get_rng_state() -> torch.Tensor:
    """State of the generator that draws on the device."""
    return torch.cuda.get_rng_state() if on_gpu() else torch.get_rng_state()


def set_rng_state(state: torch.Tensor) -> None:
    """Put back what :func:`get_rng_state` gave."""
    if on_gpu():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def quieten() -> None:
    """Keep expected warnings off the terminal. Takes effect for imports of megatron-core that come after."""
    for message in _NO_NEWS:
        warnings.filterwarnings("ignore", message=message)
    # on the CPU megatron-core's "GPU generator" is the CPU generator, so that it moves is no accident
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(lambda record: "CPU RNG" not in record.getMessage())
    for name in ("megatron.core.rerun_state_machine", "megatron.core.optimizer_param_scheduler"):
        logging.getLogger(name).setLevel(logging.ERROR)


def enter() -> None:
    """Prepare this process for megatron-core on its device. May be called any number of times."""
    global _entered
    if _entered:
        return
    _entered = True
    if on_gpu():
        torch.cuda.set_device(device())
        return
    _run_eagerly()
    _answer_device_calls()
    _answer_rng_calls()
    _map_cuda_literals()
    _answer_tensor_types()
    _mend_megatron()


class _Stream:
    """A queue that is always empty: on the CPU every operation is done when it returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _Event:
        return _Event()

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: Any) -> None:
        pass


class _Event(_Stream):
    """An event that has always happened."""

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _NoProperties:
    """What get_device_properties says of a device without CUDA: nothing that would switch a CUDA path on."""

    name, major, minor, multi_processor_count, total_memory = "cpu", 0, 0, 0, 0


def _run_eagerly() -> None:
    """megatron-core compiles its small fusions; on the CPU that costs a C++ compiler and seconds a process, for nothing."""
    import megatron.core.jit

    megatron.core.jit.disable_jit_fuser()
    torch.compiler.set_stance("force_eager")  # for what was decorated before


def _answer_device_calls() -> None:
    cpu = torch.device("cpu")
    stream = _Stream()

    def nothing() -> Callable[..., None]:
        return lambda *args, **kwargs: None  # a new function each time: torch.compile tells them apart by identity

    def current() -> Callable[..., Any]:
        return lambda *args, **kwargs: contextlib.nullcontext()

    answers: dict[str, Any] = {
        "current_device": lambda: cpu,
        "set_device": nothing(),
        "synchronize": nothing(),
        "empty_cache": nothing(),
        "current_stream": lambda *a, **k: stream,
        "default_stream": lambda *a, **k: stream,
        "stream": current(),
        "device": current(),
        "Stream": _Stream,
        "Event": _Event,
        "is_current_stream_capturing": lambda: False,
        "get_device_properties": lambda *a, **k: _NoProperties(),
        "get_device_capability": lambda *a, **k: (0, 0),
        "memory_allocated": lambda *a, **k: 0,
        "max_memory_allocated": lambda *a, **k: 0,
        "memory_reserved": lambda *a, **k: 0,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.cuda.nvtx.range_push = nothing()  # type: ignore[assignment]
    torch.cuda.nvtx.range_pop = nothing()  # type: ignore[assignment]


def _answer_rng_calls() -> None:
    """megatron-core keeps one generator state a purpose; the CPU generator serves, so dropout and init are the real ones."""
    from megatron.core.tensor_parallel import random as mcore_random

    def get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(value)

    torch.cuda.get_rng_state = get_state  # type: ignore[assignment]
    torch.cuda.set_rng_state = set_state  # type: ignore[assignment]
    torch.cuda.manual_seed = seed  # type: ignore[assignment]
    mcore_random._get_cuda_rng_state = get_state
    mcore_random._set_cuda_rng_state = set_state


def _is_cuda(where: Any) -> bool:
    name = where.type if isinstance(where, torch.device) else where
    return isinstance(name, str) and name.startswith("cuda")


def _map_cuda_literals() -> None:
    from torch.utils._device import _device_constructors

    # "with torch.device(...)" knows the factories by identity, and takes note of them when it is first used: transformers
    # builds its models on "meta", and would be left with values that nobody has set.
    _device_constructors()

    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def create(*args: Any, **kwargs: Any) -> Any:
            if "device" in kwargs and _is_cuda(kwargs["device"]):
                kwargs["device"] = "cpu"
            return factory(*args, **kwargs)

        return create

    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[assignment, method-assign]
    torch.nn.Module.cuda = lambda self, *a, **k: self  # type: ignore[assignment, method-assign]

    original_to = torch.Tensor.to

    @functools.wraps(original_to)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple("cpu" if _is_cuda(a) else a for a in args)
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
        return original_to(self, *args, **kwargs)

    torch.Tensor.to = to  # type: ignore[assignment, method-assign]


def _answer_tensor_types() -> None:
    """The optimizers and the gradient clip compare ``tensor.type()`` with 'torch.cuda.FloatTensor' and its kin."""
    original = torch.Tensor.type

    @functools.wraps(original)
    def tensor_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        name = original(self)
        return name if ".cuda." in name else name.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = tensor_type  # type: ignore[assignment, method-assign]


def _mend_megatron() -> None:
    """Names that megatron-core uses without having imported them where Transformer Engine is absent."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
