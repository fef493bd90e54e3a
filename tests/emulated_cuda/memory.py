"""Host and device tensors on the same memory, all of it in the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

OnDevice = dict[int, torch.Tensor]  # the tensor on the device of each storage's address


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the host on the memory of a tensor of a device."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0 or tensor.numel() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    shared = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    made = torch.empty(0, dtype=tensor.dtype).set_(shared, tensor.storage_offset(), tensor.size(), tensor.stride())
    return made.conj() if tensor.is_conj() else made


def on_device(tensor: torch.Tensor, device: torch.device, arguments: OnDevice) -> torch.Tensor:
    """The result of the CPU's kernel as a tensor of the device: a view of an argument where it is one, else a copy."""
    if tensor.numel() and (source := arguments.get(tensor.untyped_storage().data_ptr())) is not None:
        made = torch.empty(0, dtype=tensor.dtype, device=device)
        return made.set_(source.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.size(), strict=True)):
        tensor = tensor.contiguous()
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        on_host(made).copy_(tensor)
    return made


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those in an argument of an operator."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def as_host_argument(value: Any, arguments: OnDevice) -> Any:
    """An argument as the CPU's kernel takes it; ``arguments`` gets the tensors of devices in it."""
    if isinstance(value, torch.Tensor) and value.device.type == "cuda":
        alias = on_host(value)
        if value.numel():
            arguments[alias.untyped_storage().data_ptr()] = value
        return alias
    if isinstance(value, torch.Generator):  # kernels.py draws from its seed and offset
        return None
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, list | tuple):
        return type(value)(as_host_argument(item, arguments) for item in value)
    return value


def as_device_result(value: Any, device: torch.device, arguments: OnDevice) -> Any:
    """The result of the CPU's kernel, on the device."""
    if isinstance(value, torch.Tensor):
        return on_device(value, device, arguments)
    if isinstance(value, list | tuple):
        return [as_device_result(item, device, arguments) for item in value]
    return value
