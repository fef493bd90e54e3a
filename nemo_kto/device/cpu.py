"""CPU backend: patches torch and megatron-core so that the real megatron-core runs on gloo ranks.

megatron-core calls CUDA functions that have a meaning on the CPU as well (query the current device, synchronise, allocate
memory). :func:`install_cpu_backend` replaces these calls with CPU equivalents if CUDA is absent, and leaves them alone if it
is present. The GPTModel, the pipeline schedules, DistributedDataParallel, the distributed optimizer and dist_checkpointing
that run on a laptop are therefore the ones that run on a cluster.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from nemo_kto.device.device import on_gpu
from nemo_kto.device.imports import define_missing_names, keep_norm_on_device

# Factory functions that megatron-core calls with device="cuda".
_FACTORIES = (
    "arange", "empty", "empty_like", "full", "full_like", "linspace", "ones", "ones_like", "rand", "rand_like", "randint",
    "randn", "randn_like", "tensor", "zeros", "zeros_like",
)  # fmt: skip


@functools.cache
def install_cpu_backend() -> None:
    """Prepare this process for megatron-core on the CPU. May be called any number of times.

    With a GPU, it only defines names that megatron-core lacks and keeps the norm of the gradient on the device.

    Raises:
        RuntimeError: megatron-core was imported with an optimizer for GPUs before the CPU was chosen.
    """
    define_missing_names()
    keep_norm_on_device()
    if on_gpu():
        return
    if not getattr(sys.modules.get("megatron.core.optimizer"), "USING_PYTORCH_OPTIMIZER", True):
        raise RuntimeError(
            "the CPU must be chosen before megatron-core is imported, got one with an optimizer for GPUs; set "
            "NEMO_KTO_FORCE_CPU=1 before Python starts, and import nemo_kto before megatron-core"
        )
    _leave_compiler_out()
    _answer_device_calls()
    _answer_rng_calls()
    _map_cuda_literals()
    _answer_tensor_types()
    _patch_megatron()


class _Stream:
    """Replacement of a CUDA stream that never has pending work: on the CPU every operation is complete when it returns."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record_event(self, event: object = None) -> _Event:
        return _Event()

    def _is_done(self, *args: object) -> None:
        pass

    synchronize = wait_stream = wait_event = record = wait = __exit__ = _is_done

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self


class _Event(_Stream):
    """Replacement of a CUDA event that is always complete."""

    def elapsed_time(self, other: object) -> float:
        return 0.0


def _leave_compiler_out() -> None:
    """Avoid the import of torch's compiler.

    Nothing is compiled on the CPU, but torch would import the compiler only to exclude functions from compilation.
    """
    if "torch._dynamo" in sys.modules:  # megatron-core was imported first, or runs on the CPU of a machine with a GPU
        torch.compiler.set_stance("force_eager")

    def disable(function: object = None, recursive: bool = True, *, reason: str | None = None) -> object:
        return function if function is not None else lambda decorated: decorated

    torch.compiler.disable = disable  # type: ignore[assignment]
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        setattr(torch.optim.Optimizer, name, inspect.unwrap(getattr(torch.optim.Optimizer, name)))
    for optimizer in (torch.optim.Adam, torch.optim.AdamW):  # the removed wrapper also disables gradients
        optimizer.step = torch.no_grad()(inspect.unwrap(optimizer.step))  # type: ignore[method-assign]


def _answer_device_calls() -> None:
    cpu, stream = torch.device("cpu"), _Stream()
    # values that do not enable any CUDA code path
    properties = types.SimpleNamespace(name="cpu", major=0, minor=0, multi_processor_count=0, total_memory=0)

    def always(answer: object) -> Callable[..., object]:
        return lambda *args, **kwargs: answer  # a new function each time: torch.compile distinguishes them by identity

    answers: dict[str, object] = {
        "is_available": False, "device_count": 0, "current_device": cpu,
        "get_device_properties": properties, "get_device_capability": (0, 0),
        "set_device": None, "synchronize": None, "empty_cache": None, "is_current_stream_capturing": False,
        "current_stream": stream, "default_stream": stream,
        "stream": contextlib.nullcontext(), "device": contextlib.nullcontext(),
        "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, always(answer))
    torch.cuda.Stream, torch.cuda.Event = _Stream, _Event  # type: ignore[misc, assignment]
    torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = always(None), always(None)  # type: ignore[assignment]


def _answer_rng_calls() -> None:
    """Redirect CUDA's random-generator functions to the CPU generator.

    megatron-core keeps one generator state for each purpose. With the CPU generator behind them, its own dropout and
    initialisation code runs unchanged.
    """
    from megatron.core.tensor_parallel import random as mcore_random

    def get_state(*args: object, **kwargs: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *args: object, **kwargs: object) -> None:
        torch.set_rng_state(state)

    torch.cuda.get_rng_state = mcore_random._get_cuda_rng_state = get_state  # type: ignore[assignment]
    torch.cuda.set_rng_state = mcore_random._set_cuda_rng_state = set_state  # type: ignore[assignment]
    torch.cuda.manual_seed = torch.default_generator.manual_seed  # type: ignore[assignment]


def _is_cuda(where: object) -> bool:
    name = where.type if isinstance(where, torch.device) else where
    return isinstance(name, str) and name.startswith("cuda")


def _map_cuda_literals() -> None:
    from torch.utils._device import _device_constructors

    # "with torch.device(...)" recognises factory functions by identity, and collects them when it is first used. This call
    # makes it collect the original functions; otherwise models that transformers builds on "meta" would have uninitialised
    # values.
    _device_constructors()

    def on_cpu(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> torch.Tensor:
            args = tuple("cpu" if _is_cuda(argument) else argument for argument in args)
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

        return call

    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[assignment, method-assign]
    torch.nn.Module.cuda = lambda self, *a, **k: self  # type: ignore[assignment, method-assign]
    torch.Tensor.to = on_cpu(torch.Tensor.to)  # type: ignore[assignment, method-assign]


def _answer_tensor_types() -> None:
    """Make ``tensor.type()`` return CUDA type names.

    The optimizers and gradient clipping compare it with 'torch.cuda.FloatTensor' and its variants.
    """
    original: Callable[..., str | torch.Tensor] = torch.Tensor.type

    @functools.wraps(original)
    def tensor_type(
        self: torch.Tensor, dtype: torch.dtype | str | None = None, *args: object, **kwargs: object
    ) -> str | torch.Tensor:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        name = str(original(self))
        return name if ".cuda." in name else name.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = tensor_type  # type: ignore[assignment, method-assign]


def _patch_megatron() -> None:
    """Patch megatron-core's collectives for gloo, and skip copies that a single rank or a CPU does not need."""
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import token_dispatcher

    token_dispatcher.maybe_move_tensor_to_cpu = _as_number_or_tensor
    mappings._gather_along_first_dim = _of_any_size(mappings._gather_along_first_dim, _gather_of_any_size)
    mappings._reduce_scatter_along_first_dim = _of_any_size(
        mappings._reduce_scatter_along_first_dim, _reduce_scatter_of_any_size
    )
    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        setattr(param_and_grad_buffer, name, _skipped_by_one_rank(getattr(param_and_grad_buffer, name)))


def _skipped_by_one_rank(collective: Callable[..., object]) -> Callable[..., object]:
    """Skip a collective in a group of one rank, whose output is its input.

    gloo would copy all gradients, or weights, and copy them back.
    """

    @functools.wraps(collective)
    def call(output: torch.Tensor, input_: torch.Tensor, **options: Any) -> object:
        is_there = output.data_ptr() == input_.data_ptr() and torch.distributed.get_world_size(options["group"]) == 1
        if is_there and not options.get("async_op"):
            return None
        return collective(output, input_, **options)

    return call


def _as_number_or_tensor(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Convert the sizes of an all-to-all to numbers, which gloo needs; megatron-core converts only tensors on a GPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _of_any_size(equal: Callable[..., torch.Tensor], unequal: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Extend a collective to tensors of different sizes.

    gloo gathers and scatters only tensors of equal sizes, but the number of tokens that the router sends to experts differs
    between ranks.

    Args:
        equal: megatron-core's collective, called if all sizes are equal.
        unequal: replacement for different sizes.
    """

    @functools.wraps(equal)
    def call(
        input_: torch.Tensor,
        group: Any,
        sizes: list[int] | None = None,
        use_global_buffer: bool = False,
        *,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
    ) -> torch.Tensor:
        sizes = sizes or output_split_sizes or input_split_sizes
        if sizes is None or len(set(sizes)) == 1:
            return equal(input_, group, None, use_global_buffer)
        return unequal(input_, group, sizes)

    return call


def _gather_of_any_size(input_: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    padded = input_.new_zeros(max(sizes), *input_.shape[1:])
    padded[: len(input_)] = input_
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatter_of_any_size(input_: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    whole = input_.clone()
    torch.distributed.all_reduce(whole, group=group)
    return whole.split(sizes)[group.rank()].clone()
