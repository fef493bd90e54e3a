"""Operators of the emulated devices: each checks the devices of its arguments, and calls the CPU's on the same memory.

They are registered for the dispatch key CUDA: autograd, type promotion and operators composed of others work as on a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from tests.emulated_cuda import attention, copies, host_work, memory, waits

# These kernels of CUDA need no arithmetic, and work with the substitute for the runtime.
REAL = set(
    """as_strided view view.dtype _reshape_alias unfold view_as_real view_as_complex resize_ empty.memory_format
    empty_strided record_stream is_set_to is_pinned _pin_memory _has_same_storage_numel set_ set_.source_Storage
    set_.source_Storage_storage_offset set_.source_Tensor set_.source_Tensor_storage_offset _efficientzerotensor
    _lazy_clone lift alias _fused_sdp_choice""".split()
)
# Their indices may be on the host.
INDEXING = set("index.Tensor index_put_ index_put _index_put_impl_ _unsafe_index.Tensor _unsafe_index_put".split())
# Tensors without dimensions may be on the host, as in pointwise operators.
SCALARS_ON_HOST = set(
    """fill_.Tensor masked_fill_.Tensor masked_fill.Tensor index_fill_.int_Tensor lerp_.Tensor _foreach_mul_.Tensor
    _foreach_mul.Tensor _foreach_add_.Tensor _foreach_div_.Tensor linalg_vector_norm""".split()
)
# The size of the result, or the result on the host, depends on values.
WAITING = set("nonzero masked_select equal _unique2 unique_dim unique_consecutive bincount".split())

_library = torch.library.Library("aten", "IMPL")


def install() -> None:
    """Replace the kernel of each operator that has one for CUDA."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # torch chooses among its other kernels of attention
    torch._C._set_sdp_use_cudnn = lambda arg: None
    own = {"copy_": copies.copy_, "_local_scalar_dense": _local_scalar_dense}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of each kernel that is replaced
        for full_name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
            space, _, name = full_name.partition("::")
            base, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
            if space == "aten" and name not in {*REAL, *own} and op is not None:
                _library.impl(name, Kernel(name, op), "CUDA")
        for name, kernel in own.items():
            _library.impl(name, kernel, "CUDA")


def _local_scalar_dense(self: torch.Tensor) -> Any:
    waits.note("item()")
    return memory.on_host(self).item()


def _product_in(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``op`` of matrices that are first converted to ``out_dtype``, which the CPU's lacks."""

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        *matrices, dtype = args if len(args) > 2 and isinstance(args[-1], torch.dtype) else (*args, kwargs.pop("out_dtype"))
        return op(*(matrix.to(dtype) for matrix in matrices), **kwargs)

    return call


# Operators whose kernels for the CPU are missing or have other arguments.
SPECIAL: dict[str, Callable[..., Any]] = {
    **{f"{op.__name__}.dtype": _product_in(op) for op in (torch.mm, torch.bmm, torch.addmm, torch.baddbmm)},
    **attention.KERNELS,
}


class Kernel:
    """The kernel of one operator."""

    def __init__(self, name: str, op: Any) -> None:
        self.name = name
        self.op = SPECIAL.get(name, op)
        self.parameters = op._schema.arguments
        self.names = [parameter.name for parameter in self.parameters]
        self.scalars_on_host = torch.Tag.pointwise in op.tags or name in SCALARS_ON_HOST or "foreach" in name
        self.draws = torch.Tag.nondeterministic_seeded in op.tags
        # Of each result that is an argument, written to: that argument.
        self.written = [self._written_argument(result.alias_info) for result in op._schema.returns]

    def _written_argument(self, alias: Any) -> int | None:
        if alias is None or not alias.is_write:
            return None
        sets = [parameter.alias_info and parameter.alias_info.before_set for parameter in self.parameters]
        return sets.index(alias.before_set)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = dict(zip(self.names, args, strict=False)) | kwargs
        device = self.common_device(list(values.values()))
        if device is None:
            named = [value for value in values.values() if isinstance(value, torch.device) and value.index is not None]
            device = named[0] if named else torch.device("cuda", torch.cuda.current_device())
        self.note_wait(values)
        host_work.note_launch()
        arguments: memory.OnDevice = {}
        with waits.uncounted():
            host = {name: memory.as_host_argument(value, arguments) for name, value in values.items()}
            outputs = [p.name for p in self.parameters if p.is_out and isinstance(values.get(p.name), torch.Tensor)]
            host |= {name: torch.empty(0, dtype=values[name].dtype) for name in outputs}
            host_args = [host[name] for name in self.names[: len(args)]]
            host_kwargs = {name: host[name] for name in kwargs}
            if self.draws:
                result = self._drawn(host_args, host_kwargs, values.get("generator"), device)
            else:
                result = self.op(*host_args, **host_kwargs)
            for name in outputs:
                values[name].resize_(host[name].size())
                memory.on_host(values[name]).copy_(host[name])
            results = (result,) if len(self.written) == 1 else result or ()
            answers = [
                memory.as_device_result(value, device, arguments) if at is None else values[self.names[at]]
                for value, at in zip(results, self.written, strict=True)
            ]
        return tuple(answers) if len(answers) > 1 else answers[0] if answers else None

    def common_device(self, values: list[Any]) -> torch.device | None:
        """The device of the arguments; None without one.

        Raises:
            RuntimeError: a GPU would not take these, because they are on two devices, or on the host.
        """
        devices = {tensor.device for tensor in memory.tensors(values) if tensor.device.type == "cuda"}
        refused = {
            tensor.device
            for at, value in enumerate(values)
            for tensor in memory.tensors(value)
            if tensor.device.type == "cpu"
            and not (tensor.dim() == 0 and (self.scalars_on_host or tensor._is_zerotensor()))
            and not (at == 1 and self.name in INDEXING)
        }
        if devices and len(devices | refused) > 1:
            found = " and ".join(sorted(map(str, devices | refused)))
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {found} (aten::{self.name})")
        return next(iter(devices), None)

    def note_wait(self, values: dict[str, Any]) -> None:
        """Count the wait of an operator whose result depends on values that are on the device."""
        if self.name in WAITING or (self.name == "repeat_interleave.Tensor" and values.get("output_size") is None):
            waits.note(self.name)
        elif self.name in INDEXING:
            indices = list(memory.tensors(values["indices"]))
            if any(index.device.type == "cpu" for index in indices):
                waits.note(f"{self.name}, indices on the host")
            elif any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                filled = values.get("values")  # with one number, CUDA fills the mask without its size
                if not (len(indices) == 1 and filled is not None and filled.numel() == 1 and filled.device.type == "cpu"):
                    waits.note(f"{self.name}, mask")

    def _drawn(self, args: list[Any], kwargs: dict[str, Any], generator: Any, device: torch.device) -> Any:
        """The result with numbers by the seed and the offset of the device's generator, whose offset moves on."""
        generator = generator or torch.cuda.default_generators[device.index]
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.set_offset(offset + 4)
        before = torch.random.default_generator.get_state()
        try:
            torch.random.default_generator.manual_seed((seed * 1_000_003 + offset * 7919 + 1) % 2**63)
            return self.op(*args, **kwargs)
        finally:
            torch.random.default_generator.set_state(before)
