"""The CPU backend: patches torch and megatron-core so that the real megatron-core runs on gloo ranks.

megatron-core names CUDA in places that have a CPU meaning (which device am I on, wait for the device, allocate here).
:func:`install_cpu_backend` answers those calls for the CPU where CUDA is absent and changes nothing where it is present, so
that the GPTModel, the pipeline schedules, DistributedDataParallel, the distributed optimizer and dist_checkpointing that run
on a laptop are the ones that run on a cluster.
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

    Where there is a GPU, only the names that megatron-core lacks are defined, and the norm of the gradient stays there.
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
    """A queue that is always empty: on the CPU every operation is done when it returns."""

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
    """An event that has always happened."""

    def elapsed_time(self, other: object) -> float:
        return 0.0


def _leave_compiler_out() -> None:
    """Nothing is compiled on the CPU, so nothing needs to be kept from the compiler, which torch would import to do so."""
    if "torch._dynamo" in sys.modules:  # megatron-core was imported first, or is run on the CPU of a machine with a GPU
        torch.compiler.set_stance("force_eager")

    def disable(function: object = None, recursive: bool = True, *, reason: str | None = None) -> object:
        return function if function is not None else lambda decorated: decorated

    torch.compiler.disable = disable  # type: ignore[assignment]
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        setattr(torch.optim.Optimizer, name, inspect.unwrap(getattr(torch.optim.Optimizer, name)))
    for optimizer in (torch.optim.Adam, torch.optim.AdamW):  # their wrapper also switches gradients off
        optimizer.step = torch.no_grad()(inspect.unwrap(optimizer.step))  # type: ignore[method-assign]


def _answer_device_calls() -> None:
    cpu, stream = torch.device("cpu"), _Stream()
    # nothing that would switch a CUDA path on
    properties = types.SimpleNamespace(name="cpu", major=0, minor=0, multi_processor_count=0, total_memory=0)

    def always(answer: object) -> Callable[..., object]:
        return lambda *args, **kwargs: answer  # a new function each time: torch.compile tells them apart by identity

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
    """megatron-core keeps one generator state a purpose; the CPU generator serves, so dropout and init are the real ones."""
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

    # "with torch.device(...)" knows the factories by identity, and takes note of them when it is first used: transformers
    # builds its models on "meta", and would be left with values that nobody has set.
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
    """The optimizers and the gradient clip compare ``tensor.type()`` with 'torch.cuda.FloatTensor' and its variants."""
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
    """Leave out copies that one rank, or a CPU, does not need."""
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
    """A rank by itself has what it would get. gloo copies all gradients for it, and copies them back; weights too."""

    @functools.wraps(collective)
    def call(output: torch.Tensor, input_: torch.Tensor, **options: Any) -> object:
        is_there = output.data_ptr() == input_.data_ptr() and torch.distributed.get_world_size(options["group"]) == 1
        if is_there and not options.get("async_op"):
            return None
        return collective(output, input_, **options)

    return call


def _as_number_or_tensor(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """gloo wants the sizes of an all-to-all as numbers; megatron-core converts them only where they lie on a GPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _of_any_size(equal: Callable[..., torch.Tensor], unequal: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """gloo gathers and scatters tensors of one size; the tokens of experts are as many as the router sends each rank."""

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
